"""`launcher train` as a user types it, with a fake training script."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import train as train_command
from launcher.cli.main import main
from launcher.core.errors import InputError
from launcher.launch.start import check_packages, check_startable
from launcher.manifest import list_experts
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, python_path
from tests.forked_python import run_python
from tests.unit.standins import PREAMBLE

pytestmark = pytest.mark.process

TRAINED = PREAMBLE + 'print("from the training")\nsay("trained")\noutcome("done", 0)\n'
REFUSED = PREAMBLE + 'say("error: not so")\noutcome("failed", 5, "not so")\nsys.exit(5)\n'

_MAIN = """
import sys
from launcher.launch import start as launch
from launcher.cli.main import main
launch.find_train_script = lambda: sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""


def command(folder: Path, script: str, *arguments: str) -> list[str]:
    (folder / "script.py").write_text(script)
    (folder / "main.py").write_text(_MAIN)
    flags = ("train", "neo4j", "--runs-dir", str(folder / "runs"), *arguments)
    return [sys.executable, str(folder / "main.py"), str(folder / "script.py"), *flags]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder in which the rows are prepared once."""
    return tmp_path_factory.mktemp("data")


def environment(data: Path) -> dict[str, str]:
    mine = {"NO_COLOR": "1", "COLUMNS": "140", "PYTHONPATH": python_path(), "LAUNCHER_DATA_DIR": str(data)}
    return {**os.environ, **mine}


def train(folder: Path, data: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(command(folder, script, *arguments)[1:], env=environment(data))


def test_training_runs_from_plan_to_outcome(tmp_path: Path) -> None:
    data = tmp_path / "data"
    result = train(tmp_path, data, TRAINED, "--run-id", "a")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("neo4j on ")
    assert re.search(r"^profile  .*  plan *$", result.stdout, re.MULTILINE)  # every decision has who decided it
    root = f"{tmp_path}/runs/a"
    assert (
        f"from the training\nrun directory: {root}\n\nnext:\n  launcher report {root}  # the results" in result.stdout
    )
    assert f"\n  launcher ask {root}     # its answer to a held-out row\n" in result.stdout
    assert re.search(r"^prepared data: \S+ \(prepared in [\d.]+ s\)\ntrained\n\Z", result.stderr, re.MULTILINE)
    assert json.loads((tmp_path / "runs/a/outcome.json").read_text())["status"] == "done"
    assert "from the training\n" in (tmp_path / "runs/a/logs/console.log").read_text()
    second = train(tmp_path, data, REFUSED, "--run-id", "b")
    assert second.returncode == 5
    assert re.fullmatch(r"prepared data: \S+ \(found\)\nerror: not so\n", second.stderr)


@pytest.mark.parametrize(("script", "code", "status"), [(TRAINED, 0, "done"), (REFUSED, 5, "failed")])
def test_json_output_is_one_object(tmp_path: Path, data: Path, script: str, code: int, status: str) -> None:
    result = train(tmp_path, data, script, "--run-id", "a", "--json")
    assert result.returncode == code
    answer = json.loads(result.stdout)
    assert (answer["run_id"], answer["path"], answer["started"]) == ("a", str(tmp_path / "runs/a"), True)
    assert (answer["exit_code"], answer["outcome"]["status"]) == (code, status)
    assert {"plan.json", "outcome.json", "logs"} <= set(answer["files"])
    assert ("from the training" in result.stderr) == (code == 0)


def test_closed_reader_does_not_change_the_exit_code(tmp_path: Path, data: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        command(tmp_path, REFUSED),
        cwd=ROOT,
        env=environment(data),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert result.returncode == 5
    assert b"Traceback" not in result.stderr


def test_training_knows_about_the_terminal(tmp_path: Path, data: Path) -> None:
    script = PREAMBLE + 'note(os.environ["LAUNCHER_TERMINAL"] + os.environ["COLUMNS"])\noutcome("done", 0)\n'
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "91"], stdin=theirs, check=True)
    result = subprocess.run(
        command(tmp_path, script, "--run-id", "a"),
        cwd=ROOT,
        env=environment(data),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 0
    assert (tmp_path / "runs/a/notes.txt").read_text() == "191\n"


@pytest.mark.parametrize(
    ("flags", "error", "hint"),
    [
        (
            ("--gpu", "rtx4090"),
            "this plan is for 1 x GeForce RTX 4090 (24.0 GiB); this machine is ",
            "--dry-run writes the files to copy to that machine; omit --gpu to plan for this machine",
        ),
        (
            ("--gpu", "h100", "--gpus", "8", "--nodes", "2"),
            "this plan is for 2 nodes of 8 x H100",
            "--dry-run writes the files: submit slurm.sbatch, or run command.txt on every node",
        ),
        (("--run-id", "../x"), "a run id has 1 to 100 letters", ""),
        (("--run-id", "taken"), "taken already exists", "choose another --run-id"),
    ],
)
def test_unstartable_plan_is_refused_before_data_is_prepared(
    tmp_path: Path, flags: tuple[str, ...], error: str, hint: str
) -> None:
    (tmp_path / "runs/taken").mkdir(parents=True)
    result = train(tmp_path, tmp_path / "data", TRAINED, *flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert error in result.stderr
    assert hint in result.stderr
    assert not (tmp_path / "data").exists()
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["taken"]


@pytest.mark.parametrize("command", ["train json", "rehearse json --gpu h100", "regression json"])
def test_unusable_runs_folder_is_refused_before_data_is_prepared(command: str, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    result = run_python(["-m", "launcher", *command.split()], cwd=tmp_path, env=environment(tmp_path / "data"))
    assert result.returncode == 2
    assert result.stderr == "error: --runs-dir runs: runs is not a folder\nhint: pass another --runs-dir\n"
    assert not (tmp_path / "data").exists()


def test_plan_for_a_gpu_of_this_machine_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = (plan_request(Request(expert="neo4j", gpu="rtx4090", gpus_per_node=gpus)).plan for gpus in (2, 4))
    monkeypatch.setattr("launcher.launch.start.probe_hardware", lambda: two.hardware)
    check_startable(two)
    with pytest.raises(InputError, match=r"is for 4 x GeForce RTX 4090 .* is 2 x GeForce RTX 4090"):
        check_startable(four)


def test_missing_packages_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    absent = {"torch", "peft", "deepspeed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    plan = plan_request(Request(expert="neo4j", profile="smoke")).plan
    with pytest.raises(InputError, match="not installed: peft, torch\n") as caught:
        check_packages(plan)
    assert caught.value.hint == "pip install 'expert-launcher[train]', or `make train`, which installs them"
    with pytest.raises(InputError, match="not installed: peft, torch, deepspeed\n"):
        check_packages(plan.model_copy(update={"strategy": "zero2"}))


@pytest.mark.parametrize(
    ("program", "found", "expected"),
    [
        ("x/.venv/bin/launcher", None, "x/.venv/bin/launcher"),
        ("x/.venv/bin/launcher", "/usr/bin/launcher", "launcher"),
        ("x/launcher/__main__.py", None, "launcher"),
    ],
)
def test_printed_commands_can_be_run_in_this_shell(
    program: str, found: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / program)])
    monkeypatch.setattr("shutil.which", lambda _name: found)
    assert train_command._find_program() == expected


def test_resumed_run_needs_no_expert(tmp_path: Path, data: Path) -> None:
    assert train(tmp_path, data, TRAINED, "--run-id", "a").returncode == 0
    words = [word for word in command(tmp_path, TRAINED, "--resume", "a")[1:] if word != "neo4j"]
    result = run_python(words, env=environment(data))
    assert (result.returncode, result.stdout) == (
        0,
        f"{tmp_path}/runs/a: this run is done; its adapter: {tmp_path}/runs/a/adapter\n",
    )
    refused = run_python([*words, "--verify", "3"], env=environment(data))
    assert refused.returncode == 2
    assert f"before a run continues, and {tmp_path}/runs/a is done" in refused.stderr


@pytest.mark.parametrize("flags", [("--max-steps", "9"), ("--set", "training.config.learning_rate=1e-5")])
def test_changed_settings_of_a_finished_run_are_not_ignored(tmp_path: Path, data: Path, flags: tuple[str, ...]) -> None:
    assert train(tmp_path, data, TRAINED, "--run-id", "a").returncode == 0
    refused = train(tmp_path, data, TRAINED, "--resume", "a", *flags)
    assert refused.returncode == 2
    assert "--allow-changed-inputs resumes anyway" in refused.stderr
    assert train(tmp_path, data, TRAINED, "--resume", "a", "--wandb", "disabled").returncode == 0


def test_json_output_of_a_resume_that_starts_nothing(tmp_path: Path, data: Path) -> None:
    assert train(tmp_path, data, TRAINED, "--run-id", "a").returncode == 0
    done = train(tmp_path, data, TRAINED, "--resume", "a", "--json")
    assert (json.loads(done.stdout)["run_id"], json.loads(done.stdout)["started"]) == ("a", False)
    assert "this run is done" in done.stderr
    outcome = tmp_path / "runs/a/outcome.json"
    outcome.write_text(outcome.read_text().replace('"done"', '"stopped"'))
    dry = train(tmp_path, data, TRAINED, "--resume", "a", "--json", "--dry-run")
    assert (dry.returncode, json.loads(dry.stdout)["started"]) == (0, False)


def test_resume_of_two_runs_is_refused(tmp_path: Path, data: Path) -> None:
    result = train(tmp_path, data, TRAINED, "--resume", "a", "--run-id", "b")
    assert result.returncode == 2
    assert "--resume a and --run-id b name different runs" in result.stderr


def test_record_of_another_training_is_kept(tmp_path: Path, data: Path) -> None:
    """Of two commands that start at once, one finds the run locked, and must not say that the other has failed."""
    locked = PREAMBLE + (
        'import fcntl\noutcome("running")\nlock = open(paths.lock, "w")\nfcntl.flock(lock, fcntl.LOCK_EX)\n'
        'other = [sys.executable, "-c", "import time; time.sleep(5)"]\nnowhere = subprocess.DEVNULL\n'
        "subprocess.Popen(other, env={}, pass_fds=[lock.fileno()], stdout=nowhere, stderr=nowhere)\n"
        'say("error: another process is training this run")\nsys.exit(2)\n'
    )
    result = train(tmp_path, data, locked, "--run-id", "a")
    assert result.returncode == 2
    assert json.loads((tmp_path / "runs/a/outcome.json").read_text())["status"] == "running"


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--run-id", "a")])
def test_new_run_needs_an_expert(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags]) == 2
    assert capsys.readouterr().err == (
        f"error: no expert given\nhint: known experts: {', '.join(list_experts())}; --resume RUN needs none\n"
    )
