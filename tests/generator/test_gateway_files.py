"""The files that a gateway's section names."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from gen_stack.output import outputs
from gen_stack.planner import make_plan
from tests.generator.helpers import TWO, error, load

if TYPE_CHECKING:
    from pathlib import Path

    from gen_stack.output import OutputFile

KEYS = f"{TWO}gateway: {{nodes: [b], keys_file: keys}}\n"
TLS = f"{TWO}gateway: {{nodes: [a], tls: {{cert_file: cert, key_file: key}}}}\n"
CERT, KEY = "-----BEGIN CERTIFICATE-----\nc\n", "-----BEGIN PRIVATE KEY-----\nk"


def written(folder: Path, text: str, files: dict[str, str]) -> dict[str, OutputFile]:
    """The gateway's secrets, by their paths."""
    loaded = load(text, files)
    return {p: file for p, file in outputs(loaded, make_plan(loaded), folder).items() if "/secrets/gateway/" in p}


def test_the_gateway_gets_digests_of_its_users_keys(tmp_path: Path) -> None:
    files = written(tmp_path, KEYS, {"keys": "# Ann\n sk-1 \n\nsk-2\nsk-1\n"})
    digests = [hashlib.sha256(key).hexdigest().upper() for key in (b"sk-1", b"sk-2")]
    assert {path: file.text for path, file in files.items()} == {"b/secrets/gateway/keys": "\n".join([*digests, ""])}
    assert all(file.secret for file in files.values())


def test_without_a_file_of_keys_the_engines_key_is_the_users_too(tmp_path: Path) -> None:
    files = written(tmp_path, f"{TWO}api: {{key_file: k}}\ngateway: {{nodes: [a]}}\n", {"k": "sk-1"})
    assert files["a/secrets/gateway/keys"].text == f"{hashlib.sha256(b'sk-1').hexdigest().upper()}\n"
    assert files["a/secrets/gateway/engine_key"].text == "engines sk-1\n"


def test_certificate_and_key_are_one_file(tmp_path: Path) -> None:
    assert written(tmp_path, TLS, {"cert": CERT, "key": KEY})["a/secrets/gateway/tls.pem"].text == f"{CERT}{KEY}\n"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("", "the file 'keys' has no key in it; write one a line"),
        ("# nobody\n\n", "the file 'keys' has no key in it; write one a line"),
        ("sk-1\nsk 2\n", "line 2 of the file 'keys' is no key; write one a line, in ASCII and without spaces"),
        ("sk-é\n", "line 1 of the file 'keys' is no key; write one a line, in ASCII and without spaces"),
    ],
)
def test_keys_that_are_none(keys: str, words: str) -> None:
    assert error(KEYS, {"keys": keys}) == f"spec.yaml:6: gateway.keys_file: {words}"


def test_pem_files_that_are_none() -> None:
    no_cert = "the file 'cert' has no CERTIFICATE in it; write the path of a PEM file"
    assert error(TLS, {"cert": KEY, "key": KEY}) == f"spec.yaml:6: gateway.tls.cert_file: {no_cert}"
    locked = "the key in the file 'key' has a passphrase, which nobody can type in; write it without one"
    key = "-----BEGIN ENCRYPTED PRIVATE KEY-----"
    assert error(TLS, {"cert": CERT, "key": key}) == f"spec.yaml:6: gateway.tls.key_file: {locked}"
