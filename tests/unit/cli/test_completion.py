"""Completion scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.cli.main import main

pytestmark = pytest.mark.process

# A command line, and the completions of its last word.
COMPLETIONS = [
    ("launcher tra", {"train"}),
    ("launcher train --max-re", {"--max-restarts"}),
    ("launcher train --profile s", {"smoke"}),
    ("launcher plan mine", {"mine-own"}),
    ("launcher plan typ", {"typescript"}),
    ("launcher bench abl", {"ablation"}),
    ("launcher bench ablation --js", {"--json"}),
    ("launcher report mine-", {"mine-1"}),
    ("launcher completion z", {"zsh"}),
    ("launcher validate --se", {"--set"}),
    ("launcher plan mine --gpu rtx4080s", {"rtx4080super"}),
]


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    for file in ("experts/mine-own/manifest.json", "runs/mine-1/plan.json", "runs/other/plan.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    for shell in ("bash", "zsh", "tcsh"):
        assert main(["completion", shell]) == 0
        (tmp_path / f"completion.{shell}").write_text(capsys.readouterr().out)
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_script_is_valid(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    run([shell, "-n", f"completion.{shell}"], folder)


@pytest.mark.parametrize(("line", "completions"), COMPLETIONS)
def test_bash_completes_verbs_flags_experts_and_runs(line: str, completions: set[str], folder: Path) -> None:
    script = (
        'source completion.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_launcher; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(run(["bash", "-c", script, "bash", *line.split()], folder).split()) == completions


def test_hidden_flags_are_not_completed(folder: Path) -> None:
    for shell in ("bash", "zsh"):
        text = (folder / f"completion.{shell}").read_text()
        assert "--max-restarts" in text
        assert "--cpu-ranks" not in text


def test_unknown_shell_is_refused() -> None:
    assert main(["completion", "cmd"]) == 2
