"""W&B: where a key is found, whether its server answers, and that the key itself is never shown."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from launcher.doctor.findings import Finding
from launcher.doctor.login import judge_login, probe_login
from launcher.tracking import find_key

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[str]:
    """Somebody who listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def look(environ: Mapping[str, str], home: Path, mode: str | None = None) -> Finding:
    environ = {"HOME": str(home), **environ}
    finding = judge_login(probe_login(environ), mode)  # type: ignore[arg-type]
    assert KEY not in str(finding)
    assert KEY not in repr(probe_login(environ, asks_server=False))
    assert KEY not in repr(find_key(environ))
    return finding


def test_no_key_is_a_note_unless_the_run_shall_be_online(tmp_path: Path) -> None:
    assert (look({}, tmp_path).status, look({}, tmp_path).found) == ("note", "no key: runs are kept offline")
    online = look({}, tmp_path, mode="online")
    assert online.status == "problem"
    assert "--wandb offline" in online.next_step


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_who_does_not_want_it_needs_no_key(mode: str, tmp_path: Path) -> None:
    assert look({"WANDB_MODE": mode}, tmp_path).found == f"{mode}, as the environment says"
    assert look({}, tmp_path, mode=mode).found == f"{mode}, as the manifest says"


def test_a_key_and_a_server_that_answers(tmp_path: Path, server: str) -> None:
    finding = look({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}, tmp_path)
    assert (finding.status, finding.found) == ("ok", "a key in WANDB_API_KEY, the server answers")


def test_a_server_that_does_not_answer(tmp_path: Path, nobody: str) -> None:
    finding = look({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": nobody}, tmp_path)
    assert finding.status == "problem"
    assert finding.found == "a key in WANDB_API_KEY, but 127.0.0.1 cannot be reached: Connection refused"
    assert "WANDB_MODE=offline" in finding.next_step
    assert look({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": nobody, "WANDB_MODE": "offline"}, tmp_path).status == "ok"


def test_behind_a_proxy_nobody_is_knocked_at(tmp_path: Path, nobody: str) -> None:
    environ = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": nobody, "HTTPS_PROXY": "http://proxy:3128"}
    assert look(environ, tmp_path).status == "ok"


def test_a_key_in_netrc(tmp_path: Path, server: str) -> None:
    file = tmp_path / ".netrc"
    file.write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    file.chmod(0o600)
    assert look({"WANDB_BASE_URL": server}, tmp_path).found == f"a key in {file}, the server answers"
    assert look({"WANDB_BASE_URL": server, "NETRC": str(tmp_path / "other")}, tmp_path).status == "note"
    file.write_text("machine machine machine")
    assert look({"WANDB_BASE_URL": server}, tmp_path).status == "note"


@pytest.mark.parametrize("key", ["xyzzy", f"{KEY[:30]} {KEY}"])
def test_what_cannot_be_a_key(key: str, tmp_path: Path, server: str) -> None:
    finding = look({"WANDB_API_KEY": key, "WANDB_BASE_URL": server}, tmp_path)
    assert (finding.status, finding.next_step) == ("problem", "wandb login --relogin")
    assert key not in str(finding)
