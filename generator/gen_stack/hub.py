"""Where a model's config.json and weights' index can be read: its folder, the hub's cache on this host, or the hub."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

from gen_stack.host_copies import CONFIG, host_folders
from gen_stack.model_files import INDEX, MAX_FILE_BYTES
from gen_stack.problems import GenStackError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPMessage
    from pathlib import Path
    from typing import IO

    from gen_stack.spec import Spec

TIMEOUT_S = 15.0


def model_texts(spec: Spec, token: str | None, environment: Mapping[str, str]) -> tuple[str, dict[str, bytes]]:
    """Find the files that say what a model is, from the nearest place that has them; the index need not exist.

    Gives the place in words, and the files by name. Raises `GenStackError` when no place has a config.json.
    """
    for folder in host_folders(spec, environment):
        if found := _in_folder(folder):
            return str(folder), found
    if spec.model.is_local:
        words = f"there is no {CONFIG} in this folder on this host; run this where the model is"
        raise GenStackError(f"{spec.model.id}: {words}")
    if spec.model.offline or environment.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise GenStackError(f"{spec.model.id}: not in the hub's cache of this host, and offline, so nothing is fetched")
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    return endpoint, _from_hub(endpoint, spec.model.id, spec.model.revision or "main", token)


def _in_folder(folder: Path) -> dict[str, bytes]:
    """Read the two files of a folder; nothing when it has no config."""
    try:
        found = {name: (folder / name).read_bytes() for name in (CONFIG, INDEX) if (folder / name).is_file()}
    except OSError as error:
        raise GenStackError(f"{error.filename or folder}: {error.strerror}") from None
    return found if CONFIG in found else {}


def _from_hub(endpoint: str, model: str, revision: str, token: str | None) -> dict[str, bytes]:
    if urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
        raise GenStackError(f"HF_ENDPOINT {endpoint}: this is no http address")
    base = f"{endpoint.rstrip('/')}/{model}/resolve/{urllib.parse.quote(revision, safe='')}"
    config = _get(f"{base}/{CONFIG}", token)
    if config is None:
        raise GenStackError(f"{model}: the hub has no {CONFIG} at {revision}; is the id right?")
    index = _get(f"{base}/{INDEX}", token)
    return {CONFIG: config, **({INDEX: index} if index is not None else {})}


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and takes the token along only within one host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            made.remove_header("Authorization")
        return made


def _get(url: str, token: str | None) -> bytes | None:
    """Fetch a small file; None when it is not there."""
    request = urllib.request.Request(url, headers={"User-Agent": "gen-stack"})  # noqa: S310 - the scheme is checked
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(MAX_FILE_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        why = "the model is gated or private; set model.token_file" if error.code in (401, 403) else error.reason
        raise GenStackError(f"{url}: status {error.code}: {why}") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        words = f"the hub cannot be reached: {reason}; copy the model's {CONFIG} beside the spec instead"
        raise GenStackError(f"{url}: {words}, and set model.config") from None
    if len(content) > MAX_FILE_BYTES:
        raise GenStackError(f"{url}: more than {MAX_FILE_BYTES} bytes; this is no {CONFIG}")
    return content
