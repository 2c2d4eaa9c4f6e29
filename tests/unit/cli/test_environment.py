"""Flag defaults from environment variables, documented exit codes, and --json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.environment import FLAGS, OTHERS, apply_environment, find_misspelt, name_variable
from launcher.cli.main import main, make_parser
from launcher.core.errors import ExitCode, InputError
from tests.conftest import ROOT
from tools.docs.command_line import VARIABLES

# These verbs print another file format.
WITHOUT_JSON = {"schema", "completion"}


def list_flags() -> dict[str, set[str]]:
    """Flags of every verb and sub-verb."""
    flags: dict[str, set[str]] = {}

    def walk(parser: argparse.ArgumentParser, name: str) -> None:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            flags[name] = {flag for action in parser._actions for flag in action.option_strings}
        for verb, below in inner[0].choices.items() if inner else ():
            walk(below, f"{name} {verb}".strip())

    walk(make_parser(), "")
    return flags


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of every verb and sub-verb."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from list_actions(inner)
        else:
            yield action


def parse(words: list[str], **variables: str) -> argparse.Namespace:
    parser = make_parser()
    apply_environment(parser, words, variables)
    return parser.parse_args(words)


def test_every_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ~ in quotes and after --flag=, and does not see environment files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kinds = {"FILE", "DIR", "FOLDER", "RUN", "RUN|FILE", "EXPERT"}
    named = [action for action in list_actions(make_parser()) if action.metavar in kinds and action.dest != "name"]
    assert len(named) > 40
    for action in named:
        assert callable(action.type), action
        assert action.type("~/x") == f"{tmp_path}/x", action
    arguments = parse(["plan", "~/expert", "--base=~/base"])
    assert (arguments.expert, arguments.base) == (f"{tmp_path}/expert", f"{tmp_path}/base")
    assert parse(["train", "neo4j", "--resume"], LAUNCHER_RUNS_DIR="~/runs").runs_dir == f"{tmp_path}/runs"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--runs-dir", "elsewhere", ["train", "neo4j"]),
        ("--runs-dir", "elsewhere", ["compare", "--all"]),
        ("--runs-dir", "elsewhere", ["export", "some-run"]),
        ("--profile", "smoke", ["plan", "neo4j"]),
        ("--base", "Qwen/Qwen3-8B", ["plan", "neo4j"]),
        ("--base", "Qwen/Qwen3-8B", ["new", "sales", "--data", "x"]),
        ("--strategy", "zero2", ["train", "neo4j"]),
        ("--on-save-error", "continue", ["train", "neo4j"]),
        ("--partition", "gpu", ["train", "neo4j"]),
        ("--account", "me", ["train", "neo4j"]),
    ],
)
def test_flag_takes_precedence_over_its_variable(flag: str, value: str, words: list[str]) -> None:
    dest = {"--on-save-error": "save_errors"}.get(flag, flag[2:].replace("-", "_"))
    variables = {name_variable(flag): value}
    assert getattr(parse(words, **variables), dest) == value
    assert getattr(parse(words), dest) != value
    other = {"--strategy": "ddp", "--profile": "full", "--on-save-error": "stop"}.get(flag, "given")
    assert getattr(parse([*words, flag, other], **variables), dest) == other


def test_variables_are_parsed_like_flags() -> None:
    variables = {"LAUNCHER_PRICE": "0.40/h", "LAUNCHER_MAX_RESTARTS": "3", "LAUNCHER_TIME_LIMIT": "01:00:00"}
    made = parse(["train", "neo4j"], **variables)
    assert (made.price.amount, made.max_restarts, made.time_limit) == (0.4, 3, 3600)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LAUNCHER_PROFILE": "fast"}, "LAUNCHER_PROFILE: 'fast' is not one of auto, full, smoke"),
        ({"LAUNCHER_PRICE": "much"}, "LAUNCHER_PRICE: 'much' is not a price per hour"),
    ],
)
def test_invalid_value_names_the_variable(variables: dict[str, str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(["plan", "neo4j"], **variables)
    assert words in str(caught.value)
    parse(["schema"], **variables)  # a verb without that flag ignores it


def test_invalid_variable_is_exit_code_2_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_PROFILE", "fast")
    assert main(["plan", "neo4j"]) == 2
    assert "error: invalid value in an environment variable" in capsys.readouterr().err
    monkeypatch.setenv("LAUNCHER_PROFILE", "smoke")
    monkeypatch.setenv("LAUNCHER_BASE", "")  # empty is unset
    assert main(["plan", "neo4j", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == "smoke"


def test_switches_have_no_variable() -> None:
    assert parse(["eval", "neo4j"], LAUNCHER_BASE="Qwen/Qwen3-8B").base is False


def test_resume_ignores_variables_that_change_the_run() -> None:
    variables = {"LAUNCHER_BASE": "Qwen/Qwen3-8B", "LAUNCHER_RUNS_DIR": "elsewhere"}
    made = parse(["train", "neo4j", "--resume"], **variables)
    assert (made.base, made.runs_dir) == (None, "elsewhere")


def test_every_variable_has_a_flag_and_is_documented() -> None:
    assert set(FLAGS) <= set.union(*list_flags().values())
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    assert [flag for flag in FLAGS if f"`{name_variable(flag)}`" not in text] == []
    assert "`LAUNCHER_HARDWARE`" in text


def test_every_verb_has_json_output() -> None:
    assert {verb for verb, flags in list_flags().items() if "--json" not in flags} == WITHOUT_JSON


def test_help_and_docs_list_every_exit_code() -> None:
    shown = make_parser().format_help()
    docs = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    for code in (*ExitCode, 130):
        assert f"{int(code)} " in shown
        assert f"| {int(code)} |" in docs


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("expert-launcher 0.")


def test_misspelt_variable_gets_a_suggestion() -> None:
    fine = ("LAUNCHER_RUNS_DIR", "LAUNCHER_PID", "LAUNCHER_TERMINAL", "LAUNCHER_TEST_ALL", "LAUNCHER_TSC", "RUNDIR")
    environ = {"LAUNCHER_RUNDIR": "x", **dict.fromkeys(fine, "y")}
    assert list(find_misspelt(environ)) == [("LAUNCHER_RUNDIR", "LAUNCHER_RUNS_DIR")]


def test_variables_without_a_flag_are_documented() -> None:
    assert {name for name in VARIABLES if name.startswith("LAUNCHER_")} == set(OTHERS)


@pytest.mark.parametrize("words", [["plan", "--json"], ["plan", "neo4j", "--json", "--gpus", "0"]])
def test_usage_error_is_json_with_json_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["hint"] == "launcher plan --help lists its arguments"
    assert printed.err.startswith("error: launcher plan: ")
    assert "usage:" not in printed.err


def test_a_variable_of_the_first_version_is_answered_with_the_new_name() -> None:
    assert list(find_misspelt({"LAUNCHER_MAX_BAD_STEPS": "3"})) == [
        ("LAUNCHER_MAX_BAD_STEPS", "LAUNCHER_MAX_NONFINITE_STEPS")
    ]


@pytest.mark.parametrize(("words", "is_named"), [([], True), (["--strategy", "zero2"], False)])
def test_error_of_a_flag_names_the_variable_that_set_it(
    words: list[str], is_named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_STRATEGY", "zero2")
    assert main(["plan", "json", "--json", "--gpu", "h100", "--set", "training.config.offload=none", *words]) == 0
    capsys.readouterr()
    wrong = ["--set", 'training.config.new_tokens=["<a>"]']
    assert main(["plan", "json", "--json", "--gpu", "h100", *wrong, *words]) == 2
    hint = json.loads(capsys.readouterr().out)["hint"]
    assert hint.endswith("--strategy is set by the environment variable LAUNCHER_STRATEGY") == is_named
