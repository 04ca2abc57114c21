"""Ask an OpenAI-compatible endpoint a question, as a user's program does."""

from __future__ import annotations

import json
import urllib.request

QUESTION = "What is the capital of France? Answer in one short sentence."


def answer(url: str, model: str, *, key: str | None = None, timeout: float = 180) -> str:
    """Return the answer to `QUESTION`, at temperature 0. Raises `urllib.error.HTTPError` when it is refused."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    target = f"{url}/v1/chat/completions"
    request = urllib.request.Request(target, json.dumps(body).encode(), headers)  # noqa: S310 - the caller's endpoint
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text
