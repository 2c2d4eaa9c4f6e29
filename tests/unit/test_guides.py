"""Pages made from the code say what the code says, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.cli.main import main, make_parser
from launcher.errors import ExitCode
from launcher.guides import __main__ as guides
from launcher.guides.command_line import EXIT_CODES, VARIABLES
from launcher.guides.manifest_format import PLANNED
from launcher.manifest.config import TrainingConfig
from launcher.manifest.described import describe_fields, find_models, list_models
from launcher.manifest.model import Manifest
from launcher.manifest.unused import NOT_USED
from tests.conftest import ROOT

# Told to the processes of a run by the launcher itself, or only for tests.
INTERNAL = {"LAUNCHER_PID", "LAUNCHER_MARK", "LAUNCHER_TERMINAL", "LAUNCHER_BENCHMARK_MARK"}


def test_the_committed_pages_are_current() -> None:
    assert guides.main(["--check"]) == 0, "run `make docs`"


def test_an_old_page_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guides, "DOCS", tmp_path)
    monkeypatch.setattr(guides, "PAGES", {"CLI.md": lambda: "new", "images/plan.svg": lambda: "picture"})
    (tmp_path / "CLI.md").write_text("old")
    assert guides.main(["--check"]) == 1
    assert "docs/CLI.md is not what the code says: python -m launcher.guides" in capsys.readouterr().err
    assert guides.main([]) == 0
    assert guides.main(["--check"]) == 0
    assert (tmp_path / "images/plan.svg").read_text() == "picture"


def test_every_flag_of_every_verb_is_told() -> None:
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    help_texts = make_parser().format_help()
    assert all(f"`launcher {verb}" in text for verb in re.findall(r"^    (\w+) ", help_texts, flags=re.MULTILINE))
    for flag in ("--max-steps", "--slurm", "--vary", "--against", "--hang-timeout"):
        assert f"`{flag}" in text
    assert "--cpu-ranks" not in text  # for tests and rehearsals


def test_exit_codes_are_all_told() -> None:
    assert set(EXIT_CODES) == {*ExitCode, 130}


def test_environment_variables_are_all_told() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "launcher").rglob("*.py"))
    read = set(re.findall(r'"(LAUNCHER_[A-Z_]+)"', code)) - set(VARIABLES)
    assert {name for name in read if not name.startswith("LAUNCHER_TEST_")} - INTERNAL == set()
    assert {name for name in VARIABLES if name.startswith("LAUNCHER_") and f'"{name}"' not in code} == set()


def test_the_hardware_that_is_shown_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "hardware.json").write_text(example)
    monkeypatch.setenv("LAUNCHER_HARDWARE", str(tmp_path / "hardware.json"))
    monkeypatch.chdir(ROOT)
    assert main(["plan", "neo4j", "--gpu", "rtx4070laptop"]) == 0


def test_every_key_that_is_read_has_a_text() -> None:
    missing = [path for path, model, name in every_field(Manifest, "") if name not in describe_fields(model)]
    assert [path for path in missing if path not in NOT_USED] == []


def every_field(model: type, path: str) -> list[tuple[str, type, str]]:
    found = []
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        here = f"{path}.{name}" if path else name
        found.append((here, model, name))
        if here not in NOT_USED or here == "training.decoding":
            for inner in find_models(field.annotation):
                found += every_field(inner, here)
    return found


def test_texts_stand_below_their_own_field() -> None:
    assert describe_fields(TrainingConfig)["rank"].startswith("Size of LoRA's")
    for model in list_models(Manifest):
        assert set(describe_fields(model)) <= set(model.model_fields)


def test_what_the_plan_decides_may_be_absent() -> None:
    keys = {path: (model, name) for path, model, name in every_field(Manifest, "")}
    assert PLANNED - set(keys) == set()
    for model, name in (keys[path] for path in PLANNED):
        assert model.model_fields[name].default in (None, "auto")  # type: ignore[attr-defined]


def test_keys_and_defaults_are_on_the_page() -> None:
    text = (ROOT / "docs/EXPERT_FORMAT.md").read_text(encoding="utf-8")
    assert "| `rank` | whole number ≥ 1, ≤ 1024 | absent | you | " in text
    assert "| `bf16` | true or false | absent | the plan | " in text
    assert "| `max_seq_length` | whole number ≥ 8 | `2048` | you | " in text
    assert "| `use_unsloth` | true or false | absent | nobody | " in text
    assert "| `method` | `sft` |  | you, required | " in text  # not rlhf and dpo, which are refused


def test_the_picture_shows_a_plan_and_no_machine() -> None:
    text = (ROOT / "docs/images/plan.svg").read_text(encoding="utf-8")
    assert "$ launcher plan neo4j --gpu rtx4090" in text
    assert "GeForce RTX 4090" in text
    assert "█" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
