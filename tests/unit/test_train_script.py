"""`launcher/train.py`, as accelerate starts it: with its own folder first on sys.path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.cli.main import main
from launcher.core.errors import ExitCode
from launcher.core.metrics import load_metrics
from launcher.core.processes import is_lost_rank
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from launcher.train import is_lost_worker, is_out_of_memory, make_parser
from launcher.train import run as run_training
from tests.conftest import ROOT, WriteManifest
from tests.forked_python import run_python

pytestmark = pytest.mark.process


def train(*arguments: str, needs_torch: bool = False) -> subprocess.CompletedProcess[str]:
    return run_python(["launcher/train.py", *arguments], needs_torch=needs_torch)


def test_a_wrong_manifest_is_reported_first(write_manifest: WriteManifest) -> None:
    command = [sys.executable, "launcher/train.py", "--manifest", str(write_manifest({"training.config.rank": 0}))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == ExitCode.WRONG_INPUT
    assert "training.config.rank: must be at least 1, not 0" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ((), "no expert given: add --manifest EXPERT", "launcher/train.py --manifest json"),
        (("json",), "no expert given: add --manifest EXPERT", "known experts: json, neo4j"),
        (("--manifest", "json", "--gpu", "h100"), "unrecognized arguments: --gpu h100", "by --config_file"),
    ],
)
def test_hints_of_a_wrong_command_line_are_about_accelerate(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(arguments)
    assert ended.value.code == ExitCode.WRONG_INPUT
    message, _, hints = capsys.readouterr().err.partition("hint: ")
    assert said in message
    assert "usage:" not in message
    assert hint in hints


def test_a_broken_plan_is_reported(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for content, said in ((b'{"schema_version": 1}', "is not a plan"), (b"\xff", "it is not UTF-8")):
        plan.write_bytes(content)
        broken = train("--plan", str(plan))
        assert broken.returncode == ExitCode.WRONG_INPUT
        assert said in broken.stderr
    assert "cannot be read" in train("--plan", str(tmp_path / "none.json")).stderr


def test_a_run_with_links_out_of_it_is_not_trained(tmp_path: Path) -> None:
    words = ["train", "json", "--dry-run", "--runs-dir", str(tmp_path), "--run-id", "a"]
    assert main(words) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a/checkpoints").symlink_to(tmp_path / "elsewhere")
    refused = train("--plan", str(tmp_path / "a/plan.json"))
    assert refused.returncode == ExitCode.WRONG_INPUT
    assert "has links that lead outside and need --trust: checkpoints -> " in refused.stderr


def test_the_process_ends_without_the_teardown_of_its_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "class Late:\n"
        "    def __del__(self, write=os.write): write(1, b'torn down')\n"
        "sys.late = Late()\n"
    )
    for num_ranks in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WORLD_SIZE": num_ranks}
        command = [sys.executable, "launcher/train.py", "--plan", str(tmp_path / "none.json")]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (ExitCode.WRONG_INPUT, "")
        assert "cannot be read" in result.stderr


@pytest.mark.parametrize(
    ("code", "leaves"), [(ExitCode.DONE, True), (ExitCode.PREEMPTED, True), (ExitCode.RUN_FAILED, False)]
)
def test_ranks_leave_the_process_group_unless_they_failed(
    monkeypatch: pytest.MonkeyPatch, code: ExitCode, leaves: bool
) -> None:
    """After a failure, other ranks may not answer."""
    calls: list[str] = []

    def destroy() -> None:
        calls.append("destroyed")
        raise RuntimeError("a rank is gone")

    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, destroy_process_group=destroy)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=group))
    monkeypatch.setattr("atexit.register", lambda *_: None)  # it would end this process
    monkeypatch.setattr("launcher.train.main", lambda: int(code))
    with pytest.raises(SystemExit) as ended:
        run_training()
    assert (ended.value.code, calls) == (code, ["destroyed"] if leaves else [])


def test_a_missing_base_is_reported_with_the_searched_folders(tmp_path: Path) -> None:
    assert main(["train", "neo4j", "--gpu", "h100", "--dry-run", "--runs-dir", str(tmp_path), "--run-id", "a"]) == 0
    result = train("--plan", str(tmp_path / "a/plan.json"), needs_torch=True)
    assert result.returncode == ExitCode.WRONG_INPUT
    assert "the tokenizer of Qwen/Qwen3-0.6B is not on this machine" in result.stderr
    assert "LAUNCHER_MODELS_DIR" in result.stderr
    outcome = load_outcome(tmp_path / "a/outcome.json")
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_INPUT)
    assert "is not on this machine" in outcome.error


@pytest.mark.slow
def test_a_bare_launch_plans_and_trains(tmp_path: Path) -> None:
    """As a user starts it: accelerate, our script, a manifest."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    script = ["launcher/train.py", "--manifest", "experts/json/manifest.json", "--max-steps", "2"]
    script += ["--set", "evaluation.task_rows=2"]
    how = ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu"]
    result = subprocess.run(
        [*launch, *how, *script, "--runs-dir", str(tmp_path), "--run-id", "a"],
        cwd=ROOT,
        env={**os.environ, "LAUNCHER_DATA_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    run = RunPaths(tmp_path / "a")
    assert [row.step for row in load_metrics(run.metrics)] == [
        0,
        1,
        2,
        2,
    ]  # the base was asked; the last is the evaluation
    assert (run.adapter / "adapter_model.safetensors").is_file()
    outcome = load_outcome(run.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.steps_done, outcome.exit_code) == ("done", 2, 0)
    rows = load_metrics(run.metrics)
    assert outcome.final_loss == rows[2].values["train/loss"]
    assert (outcome.best_step, outcome.best_metric) == (2, rows[3].values["eval/loss"])
    assert outcome.ended_because == ""
    assert "packed documents equal unpacked ones" in outcome.observed["attention"]
    assert "fused" in outcome.observed["optimizer"]
    assert "imports" in outcome.observed["start-up"]


def test_a_lost_rank_is_distinguished_from_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    assert not is_lost_rank(lost)  # a single process cannot lose a rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost_rank(lost)
    assert not is_lost_rank(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(
    ("error", "is_full", "is_worker"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), True, False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False, True),
        (RuntimeError("shapes do not match"), False, False),
    ],
)
def test_errors_are_classified_by_their_text(error: Exception, is_full: bool, is_worker: bool) -> None:
    assert (is_out_of_memory(error), is_lost_worker(error)) == (is_full, is_worker)
