"""The files that a gateway's section names: API keys, and certificate with private key."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gen_stack.model_files import text_of
from gen_stack.problems import KeyPath, Problem, shown

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class GatewayFiles:
    """What they hold, and what is wrong with them. No message has any part of a secret in it."""

    keys: tuple[str, ...] = ()
    tls: str | None = None
    problems: tuple[Problem, ...] = ()


def gateway_files(section: Any, folder: Path) -> GatewayFiles:
    """Read the files that the section of a spec names, relative to the spec's folder; it need not be valid."""
    section = section if isinstance(section, dict) else {}
    tls = section.get("tls") if isinstance(section.get("tls"), dict) else {}
    keys, wrong = _keys(section.get("keys_file"), folder)
    cert, wrong_cert = _pem(tls.get("cert_file"), ("gateway", "tls", "cert_file"), folder, "CERTIFICATE")
    key, wrong_key = _pem(tls.get("key_file"), ("gateway", "tls", "key_file"), folder, "PRIVATE KEY")
    both = f"{cert.rstrip()}\n{key.rstrip()}\n" if cert and key else None
    return GatewayFiles(keys, both, (*wrong, *wrong_cert, *wrong_key))


def _keys(value: Any, folder: Path) -> tuple[tuple[str, ...], list[Problem]]:
    """Read one key a line; empty lines, and those that begin with #, are the reader's own."""
    path: KeyPath = ("gateway", "keys_file")
    if not isinstance(value, str) or not value:
        return (), []
    text, problems = text_of(folder / value, path, value)
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    bad = [number for number, key in keys if not (key.isascii() and key.isprintable() and " " not in key)]
    if not problems and not keys:
        problems = [Problem(path, f"the file {shown(value)} has no key in it; write one a line")]
    elif bad:
        words = f"line {bad[0]} of the file {shown(value)} is no key; write one a line, in ASCII and without spaces"
        problems = [Problem(path, words)]
    return tuple(dict.fromkeys(key for _, key in keys)), problems


def _pem(value: Any, path: KeyPath, folder: Path, kind: str) -> tuple[str, list[Problem]]:
    if not isinstance(value, str) or not value:
        return "", []
    text, problems = text_of(folder / value, path, value)
    if not problems and f"{kind}-----" not in text:
        problems = [Problem(path, f"the file {shown(value)} has no {kind} in it; write the path of a PEM file")]
    elif "ENCRYPTED" in text:
        words = f"the key in the file {shown(value)} has a passphrase, which nobody can type in; write it without one"
        problems = [Problem(path, words)]
    return text, problems
