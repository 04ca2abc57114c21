"""Docker for a demo: what is said where none can be had, and what is taken back afterwards."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tools import docker_here
from tools.process import ToolError

if TYPE_CHECKING:
    from pathlib import Path

NEW = """
filter -P FORWARD DROP
filter -N DOCKER
filter -N DOCKER-USER
filter -A FORWARD -j DOCKER-USER
filter -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
filter -A FORWARD -i br-0123456789ab -o br-0123456789ab -j ACCEPT
filter -A FORWARD -i vpn0 -m comment --comment "mine, not to be touched" -j ACCEPT
filter -A DOCKER-USER -j RETURN
nat -N DOCKER
nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
nat -A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
nat -A POSTROUTING -s 192.0.2.0/24 -o vpn0 -j MASQUERADE
""".strip().splitlines()


def test_only_dockers_rules_are_taken_back() -> None:
    commands = [" ".join(command) for command in docker_here.undo_rules(NEW, ("filter -P FORWARD ACCEPT",))]
    assert commands == [
        "-t filter -D FORWARD -j DOCKER-USER",
        "-t filter -D FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-t filter -D FORWARD -i br-0123456789ab -o br-0123456789ab -j ACCEPT",
        "-t nat -D POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
        "-t nat -D POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE",
        "-t filter -F DOCKER",
        "-t filter -F DOCKER-USER",
        "-t nat -F DOCKER",
        "-t filter -X DOCKER",
        "-t filter -X DOCKER-USER",
        "-t nat -X DOCKER",
        "-t filter -P FORWARD ACCEPT",
    ]


def test_nothing_new_is_nothing_to_take_back() -> None:
    assert docker_here.undo_rules([], ("filter -P FORWARD ACCEPT",)) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.26.1-4", (2, 26, 1)), ("v2.40.3\n", (2, 40, 3)), ("5.1.0+ds1", (5, 1, 0)), ("unknown", ()), ("", ())],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert docker_here.version_of(text) == version


def test_the_users_own_docker_settings_stay_in_force(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "merged"
    (own / "cli-plugins").mkdir(parents=True)
    folder.mkdir()
    (own / "config.json").write_text('{"auths": {}}')
    (own / "cli-plugins/docker-compose").write_text("too old")
    (own / "cli-plugins/docker-other").write_text("other")
    (tmp_path / "compose").write_text("new")
    docker_here.merge_config(own, tmp_path / "compose", folder)
    assert (folder / "config.json").read_text() == '{"auths": {}}'
    assert (folder / "cli-plugins/docker-compose").read_text() == "new"
    assert (folder / "cli-plugins/docker-other").read_text() == "other"


def test_settings_are_made_where_the_user_has_none(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    docker_here.merge_config(tmp_path / "absent", tmp_path / "compose", tmp_path / "merged")
    assert (tmp_path / "merged/cli-plugins/docker-compose").is_symlink()


def test_a_docker_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setattr(docker_here, "answers", lambda: False)
    with pytest.raises(ToolError, match="DOCKER_HOST=unix:///nowhere; start it, or unset"), docker_here.docker_here():
        pass


def test_who_may_not_install_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker_here, "answers", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ToolError, match="install Docker Engine and the Compose plugin"), docker_here.docker_here():
        pass
