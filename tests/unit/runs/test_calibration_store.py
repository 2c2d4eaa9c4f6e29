"""The calibration file: which finished runs count, how it is written, and how a damaged file is handled."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.core import metrics
from launcher.core.run_paths import RunPaths
from launcher.hardware.model import Hardware
from launcher.plan.model import CALIBRATION_TERM, Plan
from launcher.request.request import Request, format_request, load_request, merge_requests
from launcher.runs.calibration_store import (
    CalibrationFile,
    describe_machine,
    find_disturbance,
    get_calibration_file,
    load_calibration,
    measure_run,
    remember_run,
)
from launcher.runs.record import load_record
from tests.made_runs import MadeRun, write_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    file: Path
    runs: Path

    def make(self, run_id: str = "a", **changes: Any) -> RunPaths:
        """Write a run on an H200 with constant metrics, as if the hardware had been probed."""
        peak, speed = changes.pop("peak", 1.0), changes.pop("speed", 1.0)
        plan_changes = changes.pop("plan", {})
        values = changes.pop("values", {})
        paths = write_run(self.runs, MadeRun(run_id=run_id, gpu="h200", num_steps=20, **changes))
        tree = json.loads(paths.plan.read_text())
        tree["hardware"] |= {"source": "probe", "free_vram_mib": None}
        tree |= plan_changes
        plan = Plan.model_validate(tree)
        paths.plan.write_text(plan.model_dump_json())
        lines = []
        for line in paths.metrics.read_text().splitlines():
            row = json.loads(line)
            if metrics.TRAIN_LOSS in row["values"]:
                row["values"] |= {
                    metrics.PREDICTION_ERROR: 1 / peak - 1,
                    metrics.TOKENS_PER_SECOND: speed * (plan.speed.estimated_tokens_per_second or 1.0),
                    metrics.ALLOC_RETRIES: 0.0,
                    **values,
                }
            lines.append(json.dumps(row))
        paths.metrics.write_text("\n".join(lines) + "\n")
        return paths

    def read(self) -> CalibrationFile:
        return CalibrationFile.model_validate_json(self.file.read_text())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    file = tmp_path / "deep" / "calibration.json"
    monkeypatch.setenv("LAUNCHER_CALIBRATION", str(file))
    return Store(file=file, runs=tmp_path / "runs")


def hardware_of(paths: RunPaths) -> Hardware:
    return load_record(paths).plan.hardware


def test_calibration_file_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCHER_CALIBRATION")
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path))
    assert get_calibration_file() == tmp_path / "calibration.json"
    monkeypatch.setenv("LAUNCHER_CALIBRATION", str(tmp_path / "other.json"))
    assert get_calibration_file() == tmp_path / "other.json"
    for word in ("off", "OFF", "0", "none"):
        monkeypatch.setenv("LAUNCHER_CALIBRATION", word)
        assert get_calibration_file() is None


def test_finished_run_calibrates_later_plans(store: Store) -> None:
    paths = store.make(peak=1.02, speed=0.9)
    assert remember_run(paths).startswith(
        "measured memory +2.0 % against the estimate, speed -10.0 % against the estimate, stored"
    )
    (entry,) = store.read().entries
    assert entry.seen.memory_ratio == pytest.approx(1.02, rel=1e-6)
    assert entry.seen.speed_ratio == pytest.approx(0.9, rel=1e-6)
    assert (entry.machine.gpu, entry.seen.run) == ("h200", "a")
    known = load_calibration(hardware_of(paths))
    assert list(known.runs) == [entry.seen.family]


def test_same_run_is_stored_once_and_old_ones_are_dropped(store: Store) -> None:
    for number in range(12):
        remember_run(store.make(f"run-{number:02d}"))
    remember_run(RunPaths(store.runs / "run-11"))
    assert [entry.seen.run for entry in store.read().entries] == [f"run-{number:02d}" for number in range(2, 12)]


def test_ratios_are_against_the_plain_estimate(store: Store) -> None:
    """Holds for a plan that was already calibrated, too; otherwise each correction would undo the previous one."""
    plain = load_record(store.make("plain", peak=1.1)).plan
    seen = measure_run(load_record(RunPaths(store.runs / "plain")))
    more = round(0.1 * plain.memory.allocated_bytes)
    memory = plain.memory.model_dump(mode="json")
    memory["terms"] = [*memory["terms"], {"name": CALIBRATION_TERM, "num_bytes": more, "note": "+10 %"}]
    corrected = store.make("corrected", peak=1.0, plan={"memory": memory})
    again = measure_run(load_record(corrected))
    assert again.estimated_bytes == seen.estimated_bytes
    assert again.memory_ratio == pytest.approx(seen.memory_ratio, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "stopped"}, "it is not finished"),
        ({"oom_fallbacks": ("micro-batch 1",)}, "it ran out of memory"),
        ({"plan": {"profile_steps": {"first_step": 2, "last_step": 3}}}, "some of its steps were profiled"),
        ({"values": {metrics.ALLOC_RETRIES: 1.0}}, "GPU memory was short"),
        ({"values": {metrics.PEAK_RESERVED_GIB: 10.0, metrics.USED_GIB: 20.0}}, "other processes used the GPU"),
        ({"peak": 2.5}, "its memory was 2.50 times the estimate, which is implausible"),
        ({"speed": 0.01}, "its speed was 0.01 times the estimate, which is implausible"),
    ],
)
def test_disturbed_runs_do_not_count(store: Store, changes: dict[str, Any], why: str) -> None:
    paths = store.make(**changes)
    assert find_disturbance(load_record(paths)) == why
    assert remember_run(paths) == f"speed and memory of this run are not used to calibrate later plans: {why}"
    assert not store.file.exists()


def test_short_resumed_and_shared_runs_do_not_count(store: Store) -> None:
    record = load_record(store.make())
    assert find_disturbance(record) == ""
    assert record.outcome is not None
    assert find_disturbance(replace(record, rows=record.rows[:6])) == "it has fewer than 8 steps"
    (attempt,) = record.outcome.attempts or ({"started_at": "2026-11-15T10:00:00+00:00"},)
    twice = record.outcome.model_copy(update={"attempts": (attempt, attempt)})
    assert find_disturbance(replace(record, outcome=twice)) == "it was resumed"
    shared = record.plan.hardware.model_copy(update={"free_vram_mib": 100_000})
    busy = record.plan.model_copy(update={"hardware": shared})
    assert find_disturbance(replace(record, plan=busy)) == "other processes used the GPU"
    many = record.plan.model_copy(update={"hardware": record.plan.hardware.model_copy(update={"nodes": 2})})
    assert find_disturbance(replace(record, plan=many)).startswith("it ran on several nodes")
    alone = store.make("alone", values={metrics.PEAK_RESERVED_GIB: 10.0, metrics.USED_GIB: 12.0})
    assert find_disturbance(load_record(alone)) == ""
    failed = record.outcome.model_copy(update={"has_compile_failed": True})
    assert find_disturbance(replace(record, outcome=failed)) == "torch.compile failed"
    other = record.outcome.model_copy(update={"attention_backend": "flex"})
    assert find_disturbance(replace(record, outcome=other)) == "another attention backend than planned was used"
    planned = record.outcome.model_copy(update={"attention_backend": record.plan.attention.backend})
    assert find_disturbance(replace(record, outcome=planned)) == ""
    launched = record.outcome.model_copy(update={"has_cuda_graph_failed": True})
    assert find_disturbance(replace(record, outcome=launched)) == "the CUDA graph could not be captured"


def test_calibration_is_per_machine_and_software(store: Store) -> None:
    paths = store.make()
    remember_run(paths)
    here = hardware_of(paths)
    assert load_calibration(here).runs
    assert not load_calibration(here.model_copy(update={"source": "catalogue"})).runs
    assert not load_calibration(here.model_copy(update={"nodes": 2})).runs, "all nodes must come to the same plan"
    assert here.gpu is not None
    another = here.model_copy(update={"gpu": here.gpu.model_copy(update={"key": "h100"})})
    assert not load_calibration(another).runs
    tree = json.loads(store.file.read_text())
    assert tree["entries"][0]["machine"]["software"]["estimators"] == describe_machine(here).software["estimators"]
    tree["entries"][0]["machine"]["software"]["torch"] = "1.0"
    store.file.write_text(json.dumps(tree))
    assert not load_calibration(here).runs


@pytest.mark.parametrize("text", ["", "{", '{"entries": [{}]}', '{"schema_version": 9}', "\udcff"])
def test_unreadable_file_is_moved_aside(store: Store, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = store.make()
    store.file.parent.mkdir()
    store.file.write_bytes(text.encode(errors="surrogateescape"))
    assert not load_calibration(hardware_of(paths)).runs
    assert "plans use the estimates only" in capsys.readouterr().err
    remember_run(paths)
    assert "moved to calibration.json.unreadable" in capsys.readouterr().err
    assert len(store.read().entries) == 1
    assert store.file.with_name("calibration.json.unreadable").is_file()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="needs a folder that is not writable")
def test_unwritable_folder_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_CALIBRATION", "/proc/none/calibration.json")
    assert remember_run(store.make()) == ""
    assert "warning: the measurements of this run are not stored for later plans" in capsys.readouterr().err


def test_disabled_calibration_reads_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    paths = store.make()
    remember_run(paths)
    before = store.file.read_bytes()
    monkeypatch.setenv("LAUNCHER_CALIBRATION", "off")
    assert remember_run(store.make("b")) == ""
    assert not load_calibration(hardware_of(paths)).runs
    assert store.file.read_bytes() == before


def test_no_calibration_is_part_of_the_request(tmp_path: Path) -> None:
    asked = Request(expert="neo4j", calibrated=False)
    file = tmp_path / "request.json"
    file.write_text(format_request(asked))
    assert not load_request(file).calibrated
    tree = json.loads(file.read_text())
    del tree["calibrated"]
    file.write_text(json.dumps(tree))
    assert load_request(file).calibrated, "requests of before it was thought of"
    assert not merge_requests(load_request(file), asked).calibrated
