from __future__ import annotations

import contextlib
import http.server
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gen_stack.hub import model_texts
from gen_stack.problems import GenStackError
from tests.generator.helpers import HUB, ONE, load

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = b'{"hidden_size": 1}'


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one public and one gated model, which redirects once, as the real one does."""

    seen: list[tuple[str, str | None]] = []  # noqa: RUF012 - of the class, to be read by the test

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        self.seen.append((self.path, token))
        if self.path.startswith("/org/model/resolve/main/config.json") or self.path.startswith("/org/gated/"):
            if "gated" in self.path and token != "Bearer hf-1":
                self.send_error(401)
                return
            self.send_response(307)
            self.send_header("Location", "/blob/config.json")
            self.end_headers()
        elif self.path.startswith("/blob"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONFIG)
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_models_own_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    spec = load(ONE.replace("/models/m", str(tmp_path))).spec
    place, texts = model_texts(spec, None, {})
    assert (place, texts) == (str(tmp_path), {"config.json": CONFIG, "model.safetensors.index.json": b"{}"})


def test_a_folder_of_another_host() -> None:
    with pytest.raises(GenStackError, match="run this where the model is"):
        model_texts(load(ONE).spec, None, {})


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_CACHE": "{}/hub"}, {"HF_HOME": "{}"}, {"XDG_CACHE_HOME": "{}/.."}, {"HOME": "{}/../.."}]
)
def test_the_cache_of_this_host(variables: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / ".cache" / "huggingface"
    snapshot = home / "hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(CONFIG)
    (home / "hub/models--org--model/refs").mkdir()
    (home / "hub/models--org--model/refs/main").write_text("abc")
    environment = {name: value.format(home) for name, value in variables.items()}
    place, texts = model_texts(load(HUB).spec, None, environment)
    assert (Path(place).resolve(), texts) == (snapshot, {"config.json": CONFIG})


def test_the_hub_and_its_token(tmp_path: Path) -> None:
    with hub() as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HOME": str(tmp_path)}
        assert model_texts(load(HUB).spec, None, environment)[1] == {"config.json": CONFIG}
        gated = load(HUB.replace("org/model", "org/gated")).spec
        with pytest.raises(GenStackError, match=r"401.*token_file"):
            model_texts(gated, None, environment)
        assert model_texts(gated, "hf-1", environment)[1]["config.json"] == CONFIG
        missing = load(HUB.replace("org/model", "org/nothing")).spec
        with pytest.raises(GenStackError, match="is the id right"):
            model_texts(missing, None, environment)


def test_no_hub_to_be_reached(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    with pytest.raises(GenStackError, match=r"the hub cannot be reached: .*set model.config"):
        model_texts(load(HUB).spec, None, environment)
    offline = load(HUB.replace("org/model", "{id: org/model, offline: true}")).spec
    with pytest.raises(GenStackError, match="offline, so nothing is fetched"):
        model_texts(offline, None, environment)
    with pytest.raises(GenStackError, match="no http address"):
        model_texts(load(HUB).spec, None, {**environment, "HF_ENDPOINT": "file:///etc"})


def test_the_command_writes_beside_the_spec(tmp_path: Path) -> None:
    from tests.generator.test_cli import run

    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 1}))
    (tmp_path / "spec.yaml").write_text(ONE.replace("/models/m", str(model)))
    done = run(tmp_path, "facts", "spec.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "set model.config to ./t.model/config.json" in done.stdout
    assert (tmp_path / "t.model/config.json").read_text() == '{"hidden_size": 1}'
    given = ONE.replace("/models/m", f"{{id: {model}, config: ./here/c.json}}")
    (tmp_path / "spec.yaml").write_text(given)
    assert run(tmp_path, "facts", "spec.yaml").returncode == 0
    assert (tmp_path / "here/c.json").exists()
