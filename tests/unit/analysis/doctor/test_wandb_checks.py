"""W&B checks: where the key is found, whether the server responds, and that the key is never shown."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.wandb_checks import check_login
from launcher.runs.wandb_settings import find_key

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[str]:
    """Return the address of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed_port() -> str:
    """Return the address of a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def check(environ: Mapping[str, str], home: Path, mode: str | None = None) -> Finding:
    environ = {"HOME": str(home), **environ}
    finding = check_login(environ, mode)  # type: ignore[arg-type]
    assert KEY not in str(finding)
    assert KEY not in repr(find_key(environ))
    return finding


def test_missing_key_is_a_note_unless_the_mode_is_online(tmp_path: Path) -> None:
    finding = check({}, tmp_path)
    assert finding.status == "note"
    assert finding.found == "no API key: runs are logged only if W&B is requested, and then offline"
    online = check({}, tmp_path, mode="online")
    assert online.status == "problem"
    assert "--wandb offline" in online.next_step


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_and_disabled_need_no_key(mode: str, tmp_path: Path) -> None:
    assert check({"WANDB_MODE": mode}, tmp_path).found == f"{mode}, set by the environment"
    assert check({}, tmp_path, mode=mode).found == f"{mode}, set by the manifest"


def test_key_and_responding_server_are_ok(tmp_path: Path, server: str) -> None:
    finding = check({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}, tmp_path)
    assert (finding.status, finding.found) == ("ok", "key in WANDB_API_KEY, the server responds")


def test_unreachable_server_is_a_problem(tmp_path: Path, closed_port: str) -> None:
    finding = check({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": closed_port}, tmp_path)
    assert finding.status == "problem"
    assert finding.found == "key in WANDB_API_KEY, but 127.0.0.1 cannot be reached: Connection refused"
    assert "WANDB_MODE=offline" in finding.next_step
    assert (
        check({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": closed_port, "WANDB_MODE": "offline"}, tmp_path).status == "ok"
    )


def test_proxy_prevents_the_connection_test(tmp_path: Path, closed_port: str) -> None:
    environ = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": closed_port, "HTTPS_PROXY": "http://proxy:3128"}
    assert check(environ, tmp_path).status == "ok"


def test_key_in_netrc_is_used(tmp_path: Path, server: str) -> None:
    file = tmp_path / ".netrc"
    file.write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    file.chmod(0o600)
    assert check({"WANDB_BASE_URL": server}, tmp_path).found == f"key in {file}, the server responds"
    assert check({"WANDB_BASE_URL": server, "NETRC": str(tmp_path / "other")}, tmp_path).status == "note"
    file.write_text("machine machine machine")
    assert check({"WANDB_BASE_URL": server}, tmp_path).status == "note"


@pytest.mark.parametrize("key", ["xyzzy", f"{KEY[:30]} {KEY}"])
def test_invalid_key_is_a_problem(key: str, tmp_path: Path, server: str) -> None:
    finding = check({"WANDB_API_KEY": key, "WANDB_BASE_URL": server}, tmp_path)
    assert (finding.status, finding.next_step) == ("problem", "wandb login --relogin")
    assert key not in str(finding)
