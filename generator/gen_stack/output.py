"""All that a stack's folder holds: the rendered files, and the secrets beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from typing import TYPE_CHECKING

from gen_stack.problems import GenStackError
from gen_stack.render.compose import render_compose

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gen_stack.load import LoadedSpec
    from gen_stack.plan import GroupPlan, Plan
    from gen_stack.targets import Target


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """The text of one file, and whether only its owner may read it."""

    text: str
    secret: bool = False

    @property
    def mode(self) -> int:
        """Permission bits: 0600 for a secret, 0755 for a script, else 0644."""
        return 0o600 if self.secret else 0o755 if self.text.startswith("#!") else 0o644


def outputs(loaded: LoadedSpec, plan: Plan, folder: Path) -> dict[str, OutputFile]:
    """List what the output folder is to hold, by path below it.

    Reads the group tokens that are there already, since those are made once and never again; a new one is made in
    memory only. Raises `GenStackError` when one there is no token, and `OSError` when it cannot be read.
    """
    files = {path: OutputFile(text) for path, text in render_compose(plan).items()}
    for group in plan.groups:
        texts = dict(loaded.secrets)
        if group.supervised and "group_token" not in texts:
            copies = [f"{node.name}/secrets/group_token" for node in group.nodes]
            texts["group_token"] = _group_token(folder, [_token_path(group), *copies])
            files[_token_path(group)] = OutputFile(f"{texts['group_token']}\n", secret=True)
        for node in group.nodes:
            for name in node.secrets:
                files[f"{node.name}/secrets/{name}"] = OutputFile(f"{texts[name]}\n", secret=True)
    for name in plan.gateway.nodes if plan.gateway else ():
        for path, text in _gateway_secrets(loaded).items():
            files[f"{name}/secrets/gateway/{path}"] = OutputFile(text, secret=True)
    return files


def _gateway_secrets(loaded: LoadedSpec) -> dict[str, str]:
    """Write the gateway's secrets as HAProxy reads them: of its users' keys it has digests only."""
    texts = {}
    if loaded.gateway_keys:
        digests = [hashlib.sha256(key.encode()).hexdigest().upper() for key in loaded.gateway_keys]
        texts["keys"] = "".join(f"{digest}\n" for digest in digests)
    if "api_key" in loaded.secrets:
        texts["engine_key"] = f"engines {loaded.secrets['api_key']}\n"
    if loaded.gateway_tls:
        texts["tls.pem"] = loaded.gateway_tls
    return texts


def exports(loaded: LoadedSpec, plan: Plan, target: Target, folder: Path) -> dict[str, OutputFile]:
    """List what the folder of an export is to hold: a folder for each group, with the head's secrets in it.

    Raises what `outputs` raises, and `InputError` when the target cannot do what the plan says.
    """
    files: dict[str, OutputFile] = {}
    for group in plan.groups:
        files |= {f"{group.name}/{path}": OutputFile(text) for path, text in target.render(plan, group).items()}
        texts = dict(loaded.secrets)
        if "group_token" not in texts:
            texts["group_token"] = _group_token(folder, [f"{group.name}/secrets/group_token"])
        for name in group.head.secrets:
            files[f"{group.name}/secrets/{name}"] = OutputFile(f"{texts[name]}\n", secret=True)
    return files


def _token_path(group: GroupPlan) -> str:
    return f"secrets/{group.name}.token"


def _group_token(folder: Path, paths: Sequence[str]) -> str:
    """Find a group's token where it was made, else where a copy of it is, else make one of 256 bits."""
    for path in paths:
        if (folder / path).is_file() and (token := (folder / path).read_text("utf-8", "replace").strip()):
            if not (token.isascii() and token.isprintable() and " " not in token):
                raise GenStackError(f"{folder / path}: this is no token; it must be one line of letters and digits")
            return token
    return secrets.token_hex(32)
