"""Rows that are tokenized in several processes give the bytes of one process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launcher.corpus.build import _cut_rows
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.worker_processes import count_workers
from tests.conftest import ROOT
from tests.unit.request.test_planned_steps import write_expert

pytestmark = pytest.mark.process

# In a process of its own: pytest's has threads, and forking would not be safe.
PREPARE = """
import json, os, sys, time
from pathlib import Path
from launcher.corpus import build, worker_processes
from launcher.launch.prepare_data import prepare_planned
from launcher.request.request import Request, plan_request

manifest, data, script, *counts = sys.argv[1:]
build._MIN_PARALLEL_BYTES, build._CHUNK_ROWS = 0, 37
exec(script)
for count in counts:
    os.environ["LAUNCHER_DATA_DIR"] = f"{data}/{count}"
    build.count_workers = lambda: int(count)
    planned = plan_request(Request(expert=manifest, profile="full"))
    rows = []
    store = prepare_planned(planned, lambda _: None, rows.append).store
    print(json.dumps({"rows": sum(rows), "folder": str(store.folder)}))
"""


BAD_ROWS = ["{", '{"question": "", "answer": ""}', "[1]", '{"question": "q <|im_end|>", "answer": "a"}']


def start(manifest: Path, data: Path, *num_workers: int, script: str = "") -> subprocess.Popen[str]:
    """Prepare the data with each number of processes in turn."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PREPARE, str(manifest), str(data), script, *map(str, num_workers)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare(manifest: Path, data: Path, *num_workers: int) -> list[tuple[int, dict[str, bytes]]]:
    process = start(manifest, data, *num_workers)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    prepared = []
    for report in map(json.loads, out.splitlines()):
        files = [file for file in Path(report["folder"]).iterdir() if file.suffix == ".arrow" or "audit" in file.name]
        prepared.append((report["rows"], {file.name: file.read_bytes() for file in files}))
    return prepared


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = write_expert(tmp_path, 1000)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    draw = random.Random(1)
    for place in draw.sample(range(1000), 60):
        rows[place] = draw.choice(BAD_ROWS)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return file


def test_processes_give_the_bytes_of_one(manifest: Path, tmp_path: Path) -> None:
    three, one = prepare(manifest, tmp_path / "data", 3, 1)  # workers are forked before this process has threads
    rows, expected = one
    assert rows == 1000
    assert {"train.arrow", "validation.arrow"} < expected.keys()
    assert b'"rejected"' in expected["audit.json"]
    assert three == one


def test_killed_worker_is_an_error(manifest: Path, tmp_path: Path) -> None:
    die = "import os\nmake = build.tokenize_here\nbuild.tokenize_here = lambda *a: os.kill(os.getpid(), 9)"
    process = start(manifest, tmp_path / "data", 2, script=die)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "InputError: a process that tokenizes rows was killed" in err


def test_workers_end_with_a_killed_parent(manifest: Path, tmp_path: Path) -> None:
    wait = "build.tokenize_here = lambda *a: time.sleep(600)"
    process = start(manifest, tmp_path / "data", 2, script=wait)
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 120
    while len(workers := parent.children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


def test_chunks_are_bounded_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.corpus.build._CHUNK_CHARACTERS", 100)
    rows: list[Row | BadRow] = [
        Row(number=number, fields={"messages": [{"role": "user", "content": "x" * 40}]}) for number in range(6)
    ]
    rows.insert(2, BadRow(number=9, reason="bad"))
    assert [len(chunk) for chunk in _cut_rows(rows)] == [4, 3]


@pytest.mark.parametrize(
    ("cores", "num_threads", "has_torch", "expected"),
    [(8, 1, False, 7), (64, 1, False, 16), (2, 1, False, 1), (8, 2, False, 1), (8, 1, True, 1)],
)
def test_workers_need_cores_and_a_process_that_can_fork(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_threads: int, has_torch: bool, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr("threading.active_count", lambda: num_threads)
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(sys, "modules", modules | ({"torch": sys} if has_torch else {}))
    assert count_workers() == expected
