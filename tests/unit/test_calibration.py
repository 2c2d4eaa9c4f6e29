"""The file that keeps what finished runs measured: which of them count, how it is written, and what spoils it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import metrics
from launcher.calibration import (
    CalibrationFile,
    describe_machine,
    find_calibration_file,
    find_disturbance,
    load_calibration,
    measure_run,
    remember_run,
)
from launcher.hardware import Hardware
from launcher.inputs import Request, load_request, merge_requests, write_request
from launcher.paths import RunPaths
from launcher.plan.model import CALIBRATION_TERM, Plan
from launcher.record import load_record
from tests.made_runs import MadeRun, write_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    file: Path
    runs: Path

    def make(self, run_id: str = "a", **changes: Any) -> RunPaths:
        """A run of the catalogue's H200, all rows alike, as a machine that was looked at."""
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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    file = tmp_path / "deep" / "calibration.json"
    monkeypatch.setenv("LAUNCHER_CALIBRATION", str(file))
    return Place(file=file, runs=tmp_path / "runs")


def hardware_of(paths: RunPaths) -> Hardware:
    return load_record(paths).plan.hardware


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCHER_CALIBRATION")
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path))
    assert find_calibration_file() == tmp_path / "calibration.json"
    monkeypatch.setenv("LAUNCHER_CALIBRATION", str(tmp_path / "other.json"))
    assert find_calibration_file() == tmp_path / "other.json"
    for word in ("off", "OFF", "0", "none"):
        monkeypatch.setenv("LAUNCHER_CALIBRATION", word)
        assert find_calibration_file() is None


def test_a_finished_run_is_kept_and_later_plans_get_it(place: Place) -> None:
    paths = place.make(peak=1.02, speed=0.9)
    assert remember_run(paths).startswith(
        "memory +2.0 % against the estimate, speed -10.0 % against the estimate, kept"
    )
    (entry,) = place.read().entries
    assert entry.seen.memory_ratio == pytest.approx(1.02, rel=1e-6)
    assert entry.seen.speed_ratio == pytest.approx(0.9, rel=1e-6)
    assert (entry.machine.gpu, entry.seen.run) == ("h200", "a")
    known = load_calibration(hardware_of(paths))
    assert list(known.runs) == [entry.seen.family]


def test_the_same_run_counts_once_and_old_ones_go(place: Place) -> None:
    for number in range(12):
        remember_run(place.make(f"run-{number:02d}"))
    remember_run(RunPaths(place.runs / "run-11"))
    assert [entry.seen.run for entry in place.read().entries] == [f"run-{number:02d}" for number in range(2, 12)]


def test_ratios_are_against_the_plain_estimate(place: Place) -> None:
    """Of a plan that was corrected already, too: else each correction would undo the last."""
    plain = load_record(place.make("plain", peak=1.1)).plan
    seen = measure_run(load_record(RunPaths(place.runs / "plain")))
    more = round(0.1 * plain.memory.allocated_bytes)
    memory = plain.memory.model_dump(mode="json")
    memory["terms"] = [*memory["terms"], {"name": CALIBRATION_TERM, "num_bytes": more, "note": "+10 %"}]
    corrected = place.make("corrected", peak=1.0, plan={"memory": memory})
    again = measure_run(load_record(corrected))
    assert again.estimated_bytes == seen.estimated_bytes
    assert again.memory_ratio == pytest.approx(seen.memory_ratio, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "stopped"}, "it is not done"),
        ({"rungs": ("micro-batch 1",)}, "it ran out of memory on the way"),
        ({"plan": {"profiled": {"first_step": 2, "last_step": 3}}}, "some of its steps were traced"),
        ({"values": {metrics.ALLOC_RETRIES: 1.0}}, "the card's memory was short"),
        ({"peak": 2.5}, "its memory was 2.50 of the estimate: something else must have happened"),
        ({"speed": 0.01}, "its speed was 0.01 of the estimate: something else must have happened"),
    ],
)
def test_disturbed_runs_do_not_count(place: Place, changes: dict[str, Any], why: str) -> None:
    paths = place.make(**changes)
    assert find_disturbance(load_record(paths)) == why
    assert remember_run(paths) == f"not counted: {why}"
    assert not place.file.exists()


def test_short_resumed_and_shared_runs_do_not_count(place: Place) -> None:
    record = load_record(place.make())
    assert find_disturbance(record) == ""
    assert record.outcome is not None
    assert find_disturbance(replace(record, rows=record.rows[:6])) == "it has fewer than 8 steps"
    (attempt,) = record.outcome.attempts or ({"started_at": "2026-11-15T10:00:00+00:00"},)
    twice = record.outcome.model_copy(update={"attempts": (attempt, attempt)})
    assert find_disturbance(replace(record, outcome=twice)) == "it was taken up again"
    shared = record.plan.hardware.model_copy(update={"free_vram_mib": 100_000})
    busy = record.plan.model_copy(update={"hardware": shared})
    assert find_disturbance(replace(record, plan=busy)) == "others used the card, too"
    many = record.plan.model_copy(update={"hardware": record.plan.hardware.model_copy(update={"nodes": 2})})
    assert find_disturbance(replace(record, plan=many)).startswith("it ran on many nodes")
    failed = record.outcome.model_copy(update={"observed": {"torch.compile": "failed, the run goes on without it"}})
    assert find_disturbance(replace(record, outcome=failed)) == "it was to be compiled, and could not be"
    other = record.outcome.model_copy(update={"observed": {"attention": "flex (…)"}})
    assert find_disturbance(replace(record, outcome=other)) == "attention was computed otherwise than planned"


def test_other_machines_software_and_the_catalogue_get_nothing(place: Place) -> None:
    paths = place.make()
    remember_run(paths)
    here = hardware_of(paths)
    assert load_calibration(here).runs
    assert not load_calibration(here.model_copy(update={"source": "catalogue"})).runs
    assert not load_calibration(here.model_copy(update={"nodes": 2})).runs, "all nodes must come to the same plan"
    assert here.gpu is not None
    another = here.model_copy(update={"gpu": here.gpu.model_copy(update={"key": "h100"})})
    assert not load_calibration(another).runs
    tree = json.loads(place.file.read_text())
    assert tree["entries"][0]["machine"]["software"]["estimators"] == describe_machine(here).software["estimators"]
    tree["entries"][0]["machine"]["software"]["torch"] = "1.0"
    place.file.write_text(json.dumps(tree))
    assert not load_calibration(here).runs


@pytest.mark.parametrize("text", ["", "{", '{"entries": [{}]}', '{"schema_version": 9}', "\udcff"])
def test_a_file_that_cannot_be_read_is_passed_over_and_put_aside(
    place: Place, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = place.make()
    place.file.parent.mkdir()
    place.file.write_bytes(text.encode(errors="surrogateescape"))
    assert not load_calibration(hardware_of(paths)).runs
    assert "plans go by the estimates alone" in capsys.readouterr().err
    remember_run(paths)
    assert "put aside as calibration.json.unreadable" in capsys.readouterr().err
    assert len(place.read().entries) == 1
    assert place.file.with_name("calibration.json.unreadable").is_file()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="needs a folder that nobody can write")
def test_a_folder_that_cannot_be_written_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_CALIBRATION", "/proc/none/calibration.json")
    assert remember_run(place.make()) == ""
    assert "warning: what this run measured is not kept for later plans" in capsys.readouterr().err


def test_switched_off_nothing_is_read_or_written(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    paths = place.make()
    remember_run(paths)
    before = place.file.read_bytes()
    monkeypatch.setenv("LAUNCHER_CALIBRATION", "off")
    assert remember_run(place.make("b")) == ""
    assert not load_calibration(hardware_of(paths)).runs
    assert place.file.read_bytes() == before


def test_no_calibration_is_part_of_the_request(tmp_path: Path) -> None:
    asked = Request(expert="neo4j", calibrated=False)
    file = tmp_path / "request.json"
    file.write_text(write_request(asked))
    assert not load_request(file).calibrated
    tree = json.loads(file.read_text())
    del tree["calibrated"]
    file.write_text(json.dumps(tree))
    assert load_request(file).calibrated, "requests of before it was thought of"
    assert not merge_requests(load_request(file), asked).calibrated
