"""Runs of W&B's offline mode: a real one, written by wandb itself; what its log may tell; and what goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.analysis.compare.load_run import make_columns
from launcher.analysis.compare.summary_metrics import make_figures
from launcher.analysis.compare.wandb_runs import _make_row, _parse, find_wandb_log, load_wandb_run
from launcher.core import metrics
from launcher.core.errors import InputError

WRITE = """
import wandb
config = {"lr": 1e-3, "data_key": "k", "model": {"global_batch_size": 16}}
run = wandb.init(project="p", name="<b>foreign</b>", config=config)
run.log({"eval/matches": 0.125, "eval/parses": 0.5, "train/step": 0})
for step in range(1, 41):
    run.log({"train/loss": 4.0 - step / 20, "tokens_per_second": 100.0 + step, "train/step": step * 10, "x": {"y": 2}})
    if step % 20 == 0:
        rates = {"eval/matches": step / 80, "eval/parses": 0.75, "eval/runtime": 0.5, "eval/score": 7.0}
        run.log({"eval_loss": 5.0 - step / 20, "train/step": step * 10, **rates})
run.finish()
"""


def is_wandb_installed() -> bool:
    spec = find_spec("wandb")
    return spec is not None and spec.origin is not None


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not is_wandb_installed():
        pytest.skip("wandb is not installed")
    folder = tmp_path_factory.mktemp("offline")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    environment["WANDB_ERROR_REPORTING"] = "false"
    subprocess.run([sys.executable, "-c", WRITE], cwd=folder, env=environment, check=True, timeout=120)
    (run,) = (folder / "wandb").glob("offline-run-*")
    return run


@pytest.mark.process
def test_real_offline_run_is_loaded(offline_run: Path) -> None:
    log = find_wandb_log(offline_run)
    assert log is not None
    assert find_wandb_log(log) == log
    run = load_wandb_run(log)
    assert (run.name, run.kind, run.status, run.steps_done) == ("<b>foreign</b>", "wandb", "done", 400)
    loss = run.column(metrics.TRAIN_LOSS)
    assert tuple(loss.steps) == tuple(range(10, 401, 10))
    assert tuple(loss.values) == pytest.approx([4.0 - step / 20 for step in range(1, 41)])
    assert tuple(run.column(metrics.EVAL_LOSS).steps) == (200, 400)
    assert len(run.column(metrics.TOKENS_PER_SECOND).values) == 40
    assert run.column(metrics.TOTAL_SECONDS).has_values  # W&B's own clock
    assert (run.traits.data_key, run.traits.global_batch_size) == ("k", 16)
    assert tuple(run.column("eval/matches").steps) == (0, 200, 400)
    assert tuple(run.column("eval/matches").values) == (0.125, 0.25, 0.5)
    assert {name for name in run.columns if name.startswith("eval/")} == {"eval/loss", "eval/matches", "eval/parses"}
    figures = {figure.title: figure.values for figure in make_figures([run])}
    assert (figures["eval/matches"], figures["eval/matches, gain"]) == ((0.5,), (0.375,))
    assert run.settings["W&B config", "lr"] == "0.001"
    assert [file.name for file in offline_run.iterdir() if "cli" in file.name] == []  # reading writes no files there


def test_invalid_log_is_reported_by_name(tmp_path: Path) -> None:
    if not is_wandb_installed():
        pytest.skip("wandb is not installed")
    log = tmp_path / "run-x.wandb"
    log.write_bytes(b"this is not a log")
    with pytest.raises(InputError, match=r"run-x\.wandb"):
        load_wandb_run(log)


def test_missing_wandb_is_reported_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.analysis.compare.wandb_runs.find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    log = tmp_path / "run-x.wandb"
    log.touch()
    with pytest.raises(InputError, match="needs wandb, which is not installed") as caught:
        load_wandb_run(log)
    assert "pip install" in caught.value.hint


def test_other_folders_are_not_offline_runs(tmp_path: Path) -> None:
    assert find_wandb_log(tmp_path) is None
    assert find_wandb_log(tmp_path / "missing") is None
    assert find_wandb_log(Path("x" * 5000)) is None


def test_status_comes_from_the_exit_record() -> None:
    run = '{"type":"run","run":{"run_id":"abc","config":{"update":{"_wandb":{},"a":1}}}}'
    later = '{"type":"config","config":{"update":{"a":2,"b":3}}}'
    parsed = _parse(Path("x"), [run, later, '{"type":"header","header":{}}'])
    assert (parsed.name, parsed.exit_code, parsed.config) == ("abc", None, {"a": 2, "b": 3})
    assert _parse(Path("x"), [run, '{"type":"exit","exit":{"exit_code":3}}']).exit_code == 3


def test_gpu_utilization_is_assigned_to_steps() -> None:
    def row(step: int, when: float, **more: float) -> str:
        return json.dumps(
            {"type": "history", "history": {"item": {"loss": 1, "_step": step, "_timestamp": when, **more}}}
        )

    def stats(second: int, *busy: float) -> str:
        item = {"cpu": 5, **{f"gpu.{at}.gpu": share for at, share in enumerate(busy)}, "gpu.0.memory": 9}
        return json.dumps({"type": "stats", "stats": {"item": item, "timestamp": f"1970-01-01T00:00:{second:02}.5Z"}})

    lines = [stats(1, 99), row(1, 10), row(2, 20), stats(12, 80), stats(15, 90, 100), stats(30, 50), stats(31)]
    parsed = make_columns(_parse(Path("x"), lines).rows)
    assert tuple(parsed[metrics.GPU_UTILIZATION].steps) == (1, 2)
    assert tuple(parsed[metrics.GPU_UTILIZATION].values) == pytest.approx((0.875, 0.5))
    own = make_columns(_parse(Path("x"), [*lines, row(3, 40, **{metrics.GPU_UTILIZATION: 0.7})]).rows)
    assert tuple(own[metrics.GPU_UTILIZATION].values) == (0.7,)  # the run's own word


@pytest.mark.parametrize("line", ["not json", "[1]", '"x"', '{"type":"exit","exit":{"exit_code":"?"}}'])
def test_unexpected_output_is_reported(line: str) -> None:
    with pytest.raises(InputError, match="unexpected output of wandb"):
        _parse(Path("x"), [line])


def test_empty_log_is_rejected() -> None:
    with pytest.raises(InputError, match="contains no run"):
        _parse(Path("x"), [])


def test_metric_names_of_other_trainers_are_mapped() -> None:
    row = _make_row({"loss": 2, "val/loss": "NaN", "lr": 1e-4, "_step": 7, "_runtime": 3.5, "other": 1, "text": "x"}, 0)
    assert row is not None
    assert row.step == 7
    assert math.isnan(row.values.pop(metrics.EVAL_LOSS))
    assert row.values == {metrics.TRAIN_LOSS: 2, metrics.LEARNING_RATE: 1e-4, metrics.TOTAL_SECONDS: 3.5}
    own = _make_row({"train/loss": 2, "_runtime": 3.5, "time/total": 60.0, "_step": 1}, 0)
    assert own is not None
    assert own.values[metrics.TOTAL_SECONDS] == 60.0
    assert _make_row({"_runtime": 3.5, "_step": 1}, 0) is None
    rates = _make_row({"eval/matches": 0.5, "eval/\x1b[31m": 0.5, "eval/ä": 0.5, "train/step": 0}, 0)
    assert rates is not None
    assert (rates.step, rates.values) == (0, {"eval/matches": 0.5})
    assert _make_row("text", 0) is None
