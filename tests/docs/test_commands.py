"""Every command in the docs is run or listed with the reason why not, and its flags exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.cli import bench
from launcher.cli.main import main, make_parser
from launcher.train import make_parser as make_train_parser
from tests.conftest import EXPERTS, ROOT, outside_make, python_path
from tests.docs.commands import all_commands, find_parser, find_verbs, is_quick, split
from tests.docs.markdown import COMMAND_BLOCKS, OTHER_BLOCKS, PAGES, Piece, list_blocks, list_commands, list_spans
from tests.docs.pinned import FOREIGN, PINNED, PLACEHOLDERS, SLOW, WALK_THROUGH
from tests.made_runs import MadeRun, write_run

COMMANDS = all_commands()
QUICK = [piece for piece in COMMANDS if is_quick(piece.text)]
NOT_QUICK = [piece for piece in COMMANDS if not is_quick(piece.text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_name_their_language(page: Path) -> None:
    unknown = [block.language for block in list_blocks(page) if block.language not in (*COMMAND_BLOCKS, *OTHER_BLOCKS)]
    assert unknown == [], "sh for commands, console with output, text or json for the rest"


@pytest.mark.parametrize("piece", NOT_QUICK, ids=str)
def test_slow_commands_are_listed(piece: Piece) -> None:
    lists = [
        name
        for name, held in (("WALK_THROUGH", WALK_THROUGH), ("SLOW", SLOW), ("PINNED", PINNED))
        if piece.text in held
    ]
    if split(piece.text)[0] not in ("pip", "git", *FOREIGN):
        assert len(lists) == 1, f"{piece}: run it in tests/docs/pinned.py (SLOW), or pin it with the reason"


def test_listed_commands_are_in_the_docs() -> None:
    documented = {piece.text for piece in COMMANDS}
    assert [text for text in (*WALK_THROUGH, *SLOW, *PINNED) if text not in documented] == []


@pytest.mark.parametrize("piece", COMMANDS, ids=str)
def test_flags_of_every_command_exist(piece: Piece) -> None:
    words = split(piece.text)
    if words[0] == "launcher":
        make_parser().parse_args(bench.complete(words[1:]))
    elif words[:2] == ["accelerate", "launch"]:
        check_accelerate(words[2:])
    elif words[0] == "make":
        check_make(words[1:])
    elif words[0] == "python":
        check_python(words[1:])
    else:
        assert words[0] in ("source", "head", *FOREIGN), f"{piece}: an unknown program"


def check_accelerate(words: list[str]) -> None:
    script = words.index("launcher/train.py")
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    make_train_parser().parse_args(words[script + 1 :])


def check_make(words: list[str]) -> None:
    """Check that make knows the target and that its launcher command parses."""
    shown = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        ran = split(line)
        if ran and ran[0].endswith("/launcher"):
            make_parser().parse_args(bench.complete(ran[1:]))


def mentions() -> list[Piece]:
    found = {piece.text: piece for page in PAGES for piece in list_spans(page)}
    return [piece for piece in found.values() if split(piece.text)[:1] and is_command(split(piece.text))]


def is_command(words: list[str]) -> bool:
    return words[0] in ("launcher", "make", "python", "pip") or "pytest" in words


@pytest.mark.parametrize("piece", mentions(), ids=str)
def test_mentioned_commands_exist(piece: Piece) -> None:
    words = [word for word in split(piece.text) if not re.match(r"^[A-Z_]+=", word)]
    if words[0] == "launcher":
        check_mention(words[1:])
    elif words[0] == "make":
        assert words[1:] == [] or words[1] in make_targets(), f"{piece}: no such target"
    elif words[0] == "python":
        check_python(words[1:])
    elif words[0] == "pip":
        check_extras(piece.text)
    else:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def check_mention(words: list[str]) -> None:
    """Check verb and flags of an incomplete command."""
    if "COMMAND" in words:
        return
    parser, rest = find_parser(words)
    if find_verbs(parser):
        assert [word for word in rest if not word.startswith("-")] == [], "no such verb"
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert [word for word in rest if word.startswith("-") and word not in flags] == []


def check_python(words: list[str]) -> None:
    """Check that a module exists, or that a script (or a module it imports) knows the flags."""
    if words[0] == "-m":
        assert "<" in words[1] or importlib.util.find_spec(words[1]) is not None
        return
    script = ROOT / words[0]
    text = script.read_text(encoding="utf-8")
    imported = re.findall(r"^from (\w+) import", text, flags=re.MULTILINE)
    files = [script.with_name(f"{name}.py") for name in imported]
    text += "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    assert [flag for flag in words if flag.startswith("--") and f'"{flag}"' not in text] == []


def check_extras(text: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r"(?:expert-launcher|\.)\[([\w,]+)\]", text) for name in group.split(",")}
    assert named - set(extras) == set()


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=True)
    assert [target for target in make_targets() if f"  make {target} " not in shown.stdout] == []


def copy_experts(folder: Path) -> None:
    for name in EXPERTS:
        shutil.copytree(ROOT / "experts" / name, folder / "experts" / name)
    shutil.copy(ROOT / "experts/manifest.schema.json", folder / "experts")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the experts, rows, two recorded runs, and the guide's expert."""
    folder = tmp_path_factory.mktemp("docs")
    copy_experts(folder)
    shutil.copy(ROOT / "experts/sql/sample/train.jsonl", folder / "rows.jsonl")  # what the docs call a user's rows
    for name, seed in (("first", 1), ("second", 2)):
        write_run(folder / "runs", MadeRun(run_id=name, seed=seed, num_steps=20))
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(split(WALK_THROUGH[1])[1:]) == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize("piece", QUICK, ids=str)
def test_quick_commands_run(piece: Piece, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    words = [PLACEHOLDERS.get(word, word) for word in split(piece.text)[1:]]
    if words[0] == "sweep":
        pytest.importorskip("optuna", reason="pip install 'expert-launcher[sweep]'")
    if words[0] == "new":
        words.append("--force")
    if words[0] == "validate" and "/" in words[1]:
        words[1] = str(ROOT / "experts/neo4j/manifest.json")
    assert main(words) == 0


def run(text: str, folder: Path, steps: int | None = None) -> str:
    """Run a command as a user types it, in a new shell."""
    for word, meant in PLACEHOLDERS.items():
        text = re.sub(rf"\b{word}\b", meant, text)
    command = (
        text.replace("launcher", f"{shlex.quote(sys.executable)} -m launcher", 1)
        if text.startswith("launcher")
        else text
    )
    if steps is not None:
        command += f" --max-steps {steps}"
    environment = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_guide_works_as_written(tmp_path: Path) -> None:
    """Run the guide's walk-through, then the other slow commands of the docs in the same folder."""
    copy_experts(tmp_path)
    for text in WALK_THROUGH:
        run(text, tmp_path)
    assert (tmp_path / "runs/first/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "runs/first/merged/model.safetensors").is_file()
    assert (tmp_path / "compare.html").is_file()
    for text, steps in SLOW.items():
        run(text, tmp_path, steps)


def json_blocks() -> list[Piece]:
    """Return the JSON blocks of all pages."""
    return [
        Piece(page=page, line=block.line, text="\n".join(block.lines))
        for page in PAGES
        for block in list_blocks(page)
        if block.language == "json"
    ]


@pytest.mark.parametrize("piece", json_blocks(), ids=lambda piece: f"{piece.page.name}:{piece.line}")
def test_json_examples_are_valid(piece: Piece, tmp_path: Path) -> None:
    text = piece.text
    tree = json.loads(text)
    if "base_models" in tree and "training" in tree:
        (tmp_path / "manifest.json").write_text(text)
        (tmp_path / "rows.jsonl").write_text('{"question": "q", "schema": "s", "sql": "SELECT 1"}\n' * 50)
        assert main(["validate", str(tmp_path)]) == 0
        assert main(["plan", str(tmp_path), "--gpu", "rtx4090"]) == 0


def test_the_walk_through_follows_the_guide() -> None:
    guide = [piece.text for piece in list_commands(ROOT / "docs/TRAINING_GUIDE.md")]
    positions = [guide.index(text) for text in WALK_THROUGH]
    assert positions == sorted(positions)
