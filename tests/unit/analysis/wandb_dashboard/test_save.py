"""`launcher dashboard` with a fake W&B server, one that does not respond, and none."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.analysis.wandb_dashboard.workspace import INSTALL_COMMAND, ViewTarget, render_specification
from tests.conftest import python_path
from tests.forked_python import run_python

pytestmark = pytest.mark.process

pytest.importorskip("wandb_workspaces", reason=f"the dashboard needs wandb-workspaces: {INSTALL_COMMAND}")

KEY = "0123456789abcdef0123456789abcdef01234567"
VIEWER = {"id": "1", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}


@dataclass
class Server:
    """Fake W&B server that stores views."""

    url: str = ""
    views: dict[str, dict[str, Any]] = field(default_factory=dict)  # by their names
    upserts: list[dict[str, Any]] = field(default_factory=list)
    is_silent: bool = False
    refusal: str = ""

    def respond(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        if "upsertView" not in query and "allViews" not in query:
            return {"data": {"viewer": VIEWER}}
        if self.refusal:
            return {"errors": [{"message": self.refusal}], "data": None}
        if "allViews" in query:
            view = self.views.get(variables["viewName"])
            edges = [] if view is None else [{"node": view}]
            return {"data": {"project": {"allViews": {"edges": edges}}}}
        self.upserts.append(dict(variables))
        view = {"id": variables.get("id") or f"view-{len(self.views)}", "displayName": variables["displayName"]}
        self.views[variables["name"]] = {**view, "spec": variables["spec"]}
        return {"data": {"upsertView": {"view": {**view, "name": variables["name"]}, "inserted": True}}}


@pytest.fixture
def server() -> Iterator[Server]:
    state, closing = Server(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/graphql":  # wandb's own telemetry
                return self._send({})
            if state.is_silent:
                closing.wait(60)
                return None
            request = json.loads(body)
            return self._send(state.respond(request["query"], request.get("variables") or {}))

        def _send(self, tree: object) -> None:
            data = json.dumps(tree).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield state
    closing.set()
    http.shutdown()


def dashboard(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `launcher dashboard`, with a fork of the process that sends."""
    return _run("tests.unit.analysis.wandb_dashboard.forked_dashboard", folder, arguments, variables)


def real_dashboard(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `launcher dashboard`, whose process that sends imports wandb again."""
    return _run("launcher", folder, arguments, variables)


def _run(
    module: str, folder: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**ours, "PYTHONPATH": python_path(), "HOME": str(folder), "NO_COLOR": "1", **variables}
    return run_python(["-m", module, "dashboard", *arguments], cwd=folder, env=environment)


def test_view_is_created_once_and_then_updated(tmp_path: Path, server: Server) -> None:
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    first, second = real_dashboard(tmp_path, **online), dashboard(tmp_path, **online)
    assert (first.returncode, first.stderr.count("\n")) == (0, 1), first.stderr
    assert first.stdout.startswith(f"created: {server.url}/team/expert-launcher?nw=")
    assert second.stdout == first.stdout.replace("created", "updated")
    assert len(server.views) == 1
    assert "id" not in server.upserts[0]
    assert server.upserts[1]["id"] == "view-0"
    assert not (tmp_path / "dashboard.json").exists()


def test_sent_specification_equals_the_file(tmp_path: Path, server: Server) -> None:
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    result = dashboard(tmp_path, "--entity", "team", "--name", "mine", "-o", "mine.json", **online)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "mine.json").read_text()
    assert json.loads(server.upserts[0]["spec"]) == json.loads(text)["spec"]
    assert server.upserts[0]["name"] == json.loads(text)["name"]
    assert server.upserts[0]["displayName"] == "mine"
    assert text == render_specification(ViewTarget(entity="team", project="expert-launcher", name="mine"))


def test_saved_view_is_updated_by_its_url(tmp_path: Path, server: Server) -> None:
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    server.views["nw-abc123-v"] = {"id": "theirs", "displayName": "theirs", "spec": "{}"}
    url = f"{server.url}/team/proj?nw=abc123"
    result = dashboard(tmp_path, "--url", url, **online)
    assert result.stdout == f"updated: {url}\n", result.stderr
    assert "next: open it in a browser" in result.stderr
    assert server.upserts[0]["id"] == "theirs"
    missing = dashboard(tmp_path, "--url", f"{server.url}/team/proj?nw=gone", **online)
    assert missing.returncode == 2
    assert "team/proj has no saved view gone" in missing.stderr


def test_rejection_is_reported_without_a_traceback(tmp_path: Path, server: Server) -> None:
    server.refusal = "permission denied"
    result = dashboard(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert result.returncode == 2
    assert "error: W&B rejected the dashboard:" in result.stderr
    assert "permission denied" in result.stderr
    assert "with --offline the dashboard is only written to a file" in result.stderr
    assert "Traceback" not in result.stderr
    assert KEY not in result.stderr


def test_silent_server_times_out(tmp_path: Path, server: Server) -> None:
    server.is_silent = True
    began = time.monotonic()
    result = real_dashboard(tmp_path, "--timeout", "3", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert time.monotonic() - began < 90
    assert result.returncode == 0, result.stderr
    assert "nothing sent to W&B: no response within 3 s" in result.stderr
    assert result.stdout == "specification: dashboard.json\n"


def test_specification_is_written_without_a_network(tmp_path: Path) -> None:
    began = time.monotonic()
    result = dashboard(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert time.monotonic() - began < 90
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "nothing sent to W&B: http://127.0.0.1:9: [Errno 111] Connection refused",
        "next: `launcher dashboard` with an API key (`wandb login`) and a network creates or updates this workspace",
    ]
    target = ViewTarget(entity="", project="expert-launcher", name="expert launcher")
    assert (tmp_path / "dashboard.json").read_text() == render_specification(target)


def test_specification_is_written_without_a_key(tmp_path: Path) -> None:
    result = dashboard(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert "nothing sent to W&B: no key" in result.stderr
    assert result.stdout == "specification: dashboard.json\n"


@pytest.mark.parametrize("flag", ["--offline", "--dry-run"])
def test_offline_sends_nothing(tmp_path: Path, server: Server, flag: str) -> None:
    result = dashboard(tmp_path, flag, "--project", "p", "-o", "x.json", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert (result.returncode, result.stdout) == (0, "specification: x.json\n")
    assert result.stderr.startswith("next: `launcher dashboard` with an API key")
    assert json.loads((tmp_path / "x.json").read_text())["project"] == "p"
    assert server.upserts == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "https://wandb.ai/team/proj"), "is not the URL of a saved view"),
        (("--url", "https://wandb.ai/team/proj?nw=nwuserme"), "is not the URL of a saved view"),
        (("--url", "http://[::1"), "is not the URL of a saved view"),
        (("--url", "https://wandb.ai/t/p?nw=abc", "--entity", "t"), "omit --entity and --project"),
        (("--project", "a/b"), "--project 'a/b': use at most 128 letters"),
        (("--entity", "\x1b[31m"), "--entity"),
        (("--name", "rocket 🚀"), "use 1 to 128 letters"),
        (("--offline", "-o", "no/such/folder/x.json"), "the folder no/such/folder does not exist"),
        (("--offline", "-o", "/dev/null"), "--output /dev/null: it is a device"),
        (("-o", "."), "--output .: it is a folder"),
        (("-o", ""), "--output: the path is empty"),
    ],
)
def test_invalid_flag_is_rejected(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = dashboard(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr
