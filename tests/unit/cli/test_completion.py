"""The scripts are asked by the shells themselves, where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launcher.cli.completion_scripts import SCRIPTS
from launcher.cli.completion_words import list_verbs
from launcher.cli.main import _VERBS, main, make_parser

# What is typed, and what is offered: one of several, or the only one.
ASKED = [
    ("launcher tra", {"train"}),
    ("launcher train --max-re", {"--max-restarts"}),
    ("launcher train --profile s", {"smoke"}),
    ("launcher plan mine", {"mine-own"}),
    ("launcher plan typ", {"typescript"}),
    ("launcher bench lad", {"ladder"}),
    ("launcher bench ladder --js", {"--json"}),
    ("launcher bench mine --va", {"--vary"}),
    ("launcher report mine-", {"mine-1"}),
    ("launcher completion z", {"zsh"}),
    ("launcher validate --se", {"--set"}),
    ("launcher plan mine --gpu rtx4080s", {"rtx4080super"}),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for file in ("experts/mine-own/manifest.json", "runs/mine-1/plan.json", "runs/other/plan.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    for shell, render in SCRIPTS.items():
        (tmp_path / f"completion.{shell}").write_text(render(list_verbs(make_parser())))
    return tmp_path


def ask(command: list[str], place: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shell_takes_the_script(shell: str, place: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ask([shell, "-n", f"completion.{shell}"], place)


@pytest.mark.parametrize(("typed", "offered"), ASKED)
def test_bash(typed: str, offered: set[str], place: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = (
        'source completion.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _launcher; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(ask(["bash", "-c", script, "bash", *typed.split()], place).split()) == offered


@pytest.mark.parametrize(("typed", "offered"), ASKED)
def test_fish(typed: str, offered: set[str], place: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    told = ask(["fish", "-N", "-c", f"source completion.fish; complete -C '{typed}'"], place)
    assert {line.split("\t")[0] for line in told.splitlines()} == offered


@pytest.mark.parametrize(("typed", "offered"), ASKED)
def test_zsh(typed: str, offered: set[str], place: Path) -> None:
    """It completes on a terminal only: the rest of the only word is written there."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (rest,) = offered
    shown = _type_into_zsh(place, typed, wanted=rest)
    assert rest in shown.replace("\x07", "").rpartition("launcher")[2]


def _type_into_zsh(place: Path, typed: str, wanted: str) -> str:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(place)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "> ", "LC_ALL": "C.UTF-8"})
    try:
        _read_until(terminal, "> ")
        os.write(terminal, b"autoload -Uz compinit; compinit -u -D; source completion.zsh; echo read''y\n")
        _read_until(terminal, "ready")
        os.write(terminal, typed.encode() + b"\t")
        return _read_until(terminal, wanted)
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def _read_until(terminal: int, wanted: str, seconds: float = 20) -> str:
    text, end = "", time.monotonic() + seconds
    while wanted not in text.replace("\x07", "") and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


def test_every_verb_and_shown_flag_is_known() -> None:
    verbs = list_verbs(make_parser())
    assert {verb.name.partition(" ")[0] for verb in verbs} == set(_VERBS)
    train = next(verb for verb in verbs if verb.name == "train")
    names = {name for flag in train.flags for name in flag.names}
    assert {"--profile", "--json", "--help"} <= names
    assert "--cpu-ranks" not in names  # hidden in --help, and here


def test_the_verb_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out.startswith("# fish completion of launcher")
    assert main(["completion", "cmd"]) == 2
