"""Generated pages are current and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.cli.main import main, make_parser
from launcher.core.errors import ExitCode
from launcher.manifest.config import TrainingConfig
from launcher.manifest.ignored_keys import WITHOUT_EFFECT
from launcher.manifest.json_schema import describe_fields, list_models
from launcher.manifest.model import Manifest
from launcher.manifest.strict_model import find_models
from tests.conftest import ROOT
from tools.docs import __main__ as generator
from tools.docs.command_line import EXIT_CODES, VARIABLES
from tools.docs.manifest_format import PLANNED

pytestmark = pytest.mark.long

# Set by the launcher for its own processes, or only for tests.
INTERNAL = {"LAUNCHER_PID", "LAUNCHER_MARK", "LAUNCHER_TERMINAL", "LAUNCHER_BENCHMARK_MARK"}


def test_committed_pages_are_current() -> None:
    assert generator.main(["--check"]) == 0, "run `make docs`"


def test_outdated_page_is_reported_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    monkeypatch.setattr(generator, "PAGES", {"CLI.md": lambda: "new", "images/plan.svg": lambda: "picture"})
    (tmp_path / "CLI.md").write_text("old")
    assert generator.main(["--check"]) == 1
    assert "docs/CLI.md is out of date; run: python -m tools.docs" in capsys.readouterr().err
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    assert (tmp_path / "images/plan.svg").read_text() == "picture"


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    help_texts = make_parser().format_help()
    assert all(f"`launcher {verb}" in text for verb in re.findall(r"^    (\w+) ", help_texts, flags=re.MULTILINE))
    for flag in ("--max-steps", "--on", "--vary", "--against", "--hang-timeout"):
        assert f"`{flag}" in text
    assert "--cpu-ranks" not in text  # for tests and rehearsals


def test_all_exit_codes_are_documented() -> None:
    assert set(EXIT_CODES) == {*ExitCode, 130}


def test_all_environment_variables_are_documented() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "launcher").rglob("*.py"))
    read = set(re.findall(r'"(LAUNCHER_[A-Z_]+)"', code)) - set(VARIABLES)
    assert {name for name in read if not name.startswith("LAUNCHER_TEST_")} - INTERNAL == set()
    assert {name for name in VARIABLES if name.startswith("LAUNCHER_") and f'"{name}"' not in code} == set()


def test_example_of_hardware_json_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "hardware.json").write_text(example)
    monkeypatch.setenv("LAUNCHER_HARDWARE", str(tmp_path / "hardware.json"))
    monkeypatch.chdir(ROOT)
    assert main(["plan", "neo4j", "--gpu", "rtx2080ti"]) == 0


def test_every_used_key_has_a_description() -> None:
    missing = {path for path, model, name in list_fields(Manifest, "") if name not in describe_fields(model)}
    assert missing == {key for keys in WITHOUT_EFFECT.values() for key in keys}


def list_fields(model: type, path: str) -> list[tuple[str, type, str]]:
    fields = []
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        here = f"{path}.{name}" if path else name
        fields.append((here, model, name))
        for inner in find_models(field.annotation):
            fields += list_fields(inner, here)
    return fields


def test_descriptions_belong_to_their_field() -> None:
    assert describe_fields(TrainingConfig)["rank"].startswith("Rank r of the LoRA")
    for model in list_models(Manifest):
        assert set(describe_fields(model)) <= set(model.model_fields)


def test_keys_decided_by_the_plan_are_optional() -> None:
    keys = {path: (model, name) for path, model, name in list_fields(Manifest, "")}
    assert PLANNED - set(keys) == set()
    for model, name in (keys[path] for path in PLANNED):
        assert model.model_fields[name].default in (None, "auto")  # type: ignore[attr-defined]


def test_keys_and_defaults_are_listed() -> None:
    text = (ROOT / "docs/EXPERT_FORMAT.md").read_text(encoding="utf-8")
    assert "| `rank` | whole number ≥ 1, ≤ 1024 | absent | you | " in text
    assert "| `bf16` | true or false | absent | the plan | " in text
    assert "| `max_seq_length` | whole number ≥ 8 | `2048` | you | " in text
    assert "\n| `training.config.use_unsloth` | the launcher has its own" in text
    assert "| `method` | `sft` |  | you, required | " in text  # without rlhf and dpo, which are refused


def test_plan_picture_shows_a_plan_and_no_urls() -> None:
    text = (ROOT / "docs/images/plan.svg").read_text(encoding="utf-8")
    assert "$ launcher plan neo4j --gpu rtx4090" in text
    assert "GeForce RTX 4090" in text
    assert "█" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
