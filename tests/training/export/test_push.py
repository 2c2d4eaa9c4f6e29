"""`--push` uploads what an export has, to a private repository, and explains what the hub refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from launcher.core.errors import InputError, LauncherError, RunFailedError
from launcher.training.export import export
from launcher.training.export.push import check_repo, list_uploads, push
from tests.training.trained_run import Trained, copy_run, data_dir, trained  # noqa: F401

TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """Answers as the hub does to the calls of an upload."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.private = 200, True
        self.requests: list[tuple[str, bytes]] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer({"id": "me/shop", "private": self.server.private, "siblings": []})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._read_chunks()
        self.server.requests.append((self.path, body))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.status != 200:
            self._answer({"error": f"refused; token {TOKEN}"}, self.server.status)
        elif self.path.endswith("/create"):
            self._answer({"url": f"{self._url}/me/shop", "name": "me/shop"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = [{"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for path in paths]
            self._answer({"files": answer})
        elif "/commit/" in self.path:
            self._answer({"commitUrl": f"{self._url}/me/shop/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer({"errors": [], "warnings": []})

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    (made / "README.md").write_text("---\nlicense: mit\n---\n# shop\n")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / ".env").write_text("SECRET=1")
    (made / "notes.txt").write_text("private")
    return made


def upload(folder: Path, *, is_public: bool = False) -> str:
    return push(folder, "me/shop", is_public=is_public, message="m", report=lambda _line: None)


def test_upload_creates_a_private_repository_with_the_export_only(hub: Hub, folder: Path) -> None:
    assert upload(folder).endswith("/me/shop")
    sent = dict(hub.requests)
    created = json.loads(sent["/api/repos/create"])
    assert (created["organization"], created["name"]) == ("me", "shop")
    assert created.get("private") is True or created.get("visibility") == "private"
    (commit,) = [body for path, body in hub.requests if "/commit/" in path]
    values = [json.loads(line)["value"] for line in commit.splitlines()]
    assert {value["path"] for value in values if "path" in value} == {"README.md", "model.safetensors"}
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_existing_public_repository_needs_the_flag(hub: Hub, folder: Path) -> None:
    hub.private = False
    with pytest.raises(InputError, match="exists and is public"):
        upload(folder)
    assert not any("/commit/" in path for path, _ in hub.requests)
    upload(folder, is_public=True)
    assert any("/commit/" in path for path, _ in hub.requests)


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, InputError, "does not accept the token"),
        (403, InputError, "may not write there"),
        (400, RunFailedError, "HTTP 400"),
    ],
)
def test_refusals_are_explained_without_the_token(
    hub: Hub, folder: Path, status: int, kind: type[LauncherError], words: str
) -> None:
    hub.status = status
    with pytest.raises(kind, match=words) as caught:
        upload(folder)
    assert TOKEN not in str(caught.value)


def test_unreachable_hub_is_named(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RunFailedError, match="cannot be reached"):
        upload(folder)


def test_links_are_not_uploaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"not uploaded: tokenizer\.json"):
        list_uploads(folder)


@pytest.mark.parametrize(
    "name", ["shop", "me/shop/x", "../x", "me/..", "me/-x", "me/a b", "", "me/x.git", "http://x/y"]
)
def test_names_that_are_no_repository_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a repository"):
        check_repo(name)


def test_push_without_a_token_fails_before_the_export(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    out = tmp_path / "out"
    assert export.main([f"--run={trained.paths.root}", f"--out={out}", "--push=me/shop"]) == 2
    assert "HF_TOKEN" in capsys.readouterr().err
    assert not out.exists()
    assert export.main([f"--run={trained.paths.root}", "--dry-run"]) == 2
    assert "require --push" in capsys.readouterr().err


@pytest.mark.usefixtures("data_dir")
def test_adapter_is_exported_without_local_paths_and_dry_run_lists_it(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path)
    config = paths.adapter / "adapter_config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"base_model_name_or_path": "/srv/me/models/launcher/tiny"}))
    flags = [f"--run={paths.root}", "--format=adapter", "--push=me/shop", "--dry-run"]
    assert export.main(flags) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("me/shop (private): ")
    out = paths.root / "peft"
    files = {file.name for file in out.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert all(name in listed for name in files)
    assert "/srv/me" not in (out / "adapter_config.json").read_text()
    card = (out / "README.md").read_text()
    assert "vllm serve merged --served-model-name neo4j" in card  # vLLM cannot load the embedded base
    assert export.main(flags) == 0  # the export is there already
    (paths.adapter / "adapter_model.safetensors").touch()
    assert export.main(flags) == 2
    assert "older than the weights" in capsys.readouterr().err


@pytest.mark.usefixtures("data_dir")
@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff" * 100])
def test_damaged_adapter_is_not_exported(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
) -> None:
    paths = copy_run(trained, tmp_path)
    (paths.adapter / "adapter_model.safetensors").write_bytes(content)
    assert export.main([f"--run={paths.root}", "--format=adapter"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (paths.root / "peft").exists()


@pytest.mark.usefixtures("data_dir")
def test_adapter_with_nan_values_is_not_exported(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path)
    file = paths.adapter / "adapter_model.safetensors"
    weights = load_file(file)
    weights[min(weights)].view(-1)[0] = float("nan")
    save_file(weights, file)
    assert export.main([f"--run={paths.root}", "--format=adapter"]) == 2
    assert "has NaN or infinite values" in capsys.readouterr().err
