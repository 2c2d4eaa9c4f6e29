"""A minimal W&B server that records runs, their rows and their end."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class RecordedRun:
    """Everything that was sent for one run."""

    upserts: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    is_preempting: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The last config that was sent."""
        texts = [upsert["config"] for upsert in self.upserts if upsert.get("config")]
        return {name: value["value"] for name, value in json.loads(texts[-1]).items() if "value" in value}


@dataclass
class Server:
    url: str
    runs: dict[str, RecordedRun] = field(default_factory=dict)
    bodies: list[str] = field(default_factory=list)  # everything that was sent
    refuses: bool = False  # reject every key
    is_broken: bool = False  # reply with nonsense

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def run(self, name: str) -> RecordedRun:
        return self.runs.setdefault(name, RecordedRun())

    def reply(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if self.is_broken:
            return {}
        if "upsertBucket" in query:
            return {"upsertBucket": self._upsert(variables)}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "UnVuOjE=", "uploadHeaders": [], "files": files}}
        if "RunResumeStatus" in query:
            return {"model": self._resume(variables["name"])}
        if "Viewer" in query:
            viewer = {"id": "v", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        return {}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or "unnamed"
        run = self.run(name)
        run.upserts.append(variables)
        project = {"id": "UHJvajox", "name": variables.get("project") or "p", "entity": {"id": "e", "name": "team"}}
        bucket: dict[str, Any] = {"id": "UnVuOjE=", "name": name, "displayName": name, "config": "{}"}
        bucket |= {"project": project}
        bucket |= {"description": None, "sweepName": None, "historyLineCount": len(run.rows)}
        return {"bucket": bucket, "inserted": len(run.upserts) == 1}

    def _resume(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        rows = self.runs[name].rows
        bucket: dict[str, Any] = {"id": "UnVuOjE=", "name": name, "displayName": name, "tags": [], "notes": None}
        bucket |= {"wandbConfig": "{}"}
        bucket |= {"summaryMetrics": json.dumps(self.runs[name].summary), "config": "{}", "logLineCount": 0}
        bucket |= {"historyLineCount": len(rows), "eventsLineCount": 0, "eventsTail": "[]"}
        bucket |= {"historyTail": json.dumps([json.dumps(row) for row in rows[-1:]])}
        return {"id": "UHJvajox", "name": "p", "entity": {"id": "e", "name": "team"}, "bucket": bucket}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.run(name)
        for file, chunk in body.get("files", {}).items():
            lines = [json.loads(line) for line in chunk["content"]]
            if file == "wandb-history.jsonl":
                run.rows += lines
            elif file == "wandb-summary.json":
                run.summary |= lines[-1]
        run.is_preempting |= bool(body.get("preempting"))
        if body.get("complete"):
            run.exit_code = body.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = (gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw).decode(
            errors="replace"
        )
        self.server.recorder.bodies.append(body)
        response: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            request = json.loads(body)
            response = {"data": self.server.recorder.reply(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.server.recorder.stream(self.path.split("/")[-2], json.loads(body))
        self._reply(json.dumps(response).encode())

    do_PUT = do_POST  # noqa: N815

    def do_GET(self) -> None:
        self._reply(b"{}")

    def _reply(self, data: bytes) -> None:
        self.send_response(401 if self.server.recorder.refuses else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Http(ThreadingHTTPServer):
    recorder: Server
    daemon_threads = True


@contextmanager
def serve() -> Iterator[Server]:
    http = _Http(("127.0.0.1", 0), _Handler)
    http.recorder = Server(url=f"http://127.0.0.1:{http.server_address[1]}")
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield http.recorder
    finally:
        http.shutdown()
        http.server_close()
