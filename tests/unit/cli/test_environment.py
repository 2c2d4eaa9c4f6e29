"""LAUNCHER_<FLAG> sets the default of a flag; the command line wins; exit codes and --json are where they are told."""

from __future__ import annotations

import argparse
import json

import pytest

from launcher.cli.completion_words import list_verbs
from launcher.cli.environment import FLAGS, OTHERS, apply_environment, find_misspelt, name_variable
from launcher.cli.main import main, make_parser
from launcher.errors import ExitCode, InputError
from launcher.guides.command_line import VARIABLES
from tests.conftest import ROOT

# Verbs that print a file format of their own, or none: JSON would be a second one.
WITHOUT_JSON = {"schema", "completion", "bench memory"}


def parse(words: list[str], **variables: str) -> argparse.Namespace:
    parser = make_parser()
    apply_environment(parser, words, variables)
    return parser.parse_args(words)


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
def test_a_variable_is_the_default_and_the_flag_wins(flag: str, value: str, words: list[str]) -> None:
    dest = {"--on-save-error": "save_errors"}.get(flag, flag[2:].replace("-", "_"))
    variables = {name_variable(flag): value}
    assert getattr(parse(words, **variables), dest) == value
    assert getattr(parse(words), dest) != value
    other = {"--strategy": "ddp", "--profile": "full", "--on-save-error": "stop"}.get(flag, "given")
    assert getattr(parse([*words, flag, other], **variables), dest) == other


def test_values_are_read_as_the_flag_reads_them() -> None:
    variables = {"LAUNCHER_PRICE": "0.40/h", "LAUNCHER_MAX_RESTARTS": "3", "LAUNCHER_TIME_LIMIT": "01:00:00"}
    made = parse(["train", "neo4j"], **variables)
    assert (made.price, made.max_restarts, made.time_limit) == (0.4, 3, 3600)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LAUNCHER_PROFILE": "fast"}, "LAUNCHER_PROFILE: 'fast' is not one of auto, full, smoke"),
        ({"LAUNCHER_PRICE": "much"}, "LAUNCHER_PRICE: 'much' is not a price an hour"),
    ],
)
def test_a_value_that_the_flag_refuses_is_refused_by_its_name(variables: dict[str, str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(["plan", "neo4j"], **variables)
    assert words in str(caught.value)
    parse(["schema"], **variables)  # of a verb without that flag it is no matter


def test_the_process_tells_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_PROFILE", "fast")
    assert main(["plan", "neo4j"]) == 2
    assert "error: the environment has a default" in capsys.readouterr().err
    monkeypatch.setenv("LAUNCHER_PROFILE", "smoke")
    monkeypatch.setenv("LAUNCHER_BASE", "")  # empty is unset
    assert main(["plan", "neo4j", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == "smoke"


def test_a_flag_that_is_a_switch_takes_no_variable() -> None:
    assert parse(["eval", "neo4j"], LAUNCHER_BASE="Qwen/Qwen3-8B").base is False


def test_a_run_that_is_resumed_is_what_it_was() -> None:
    variables = {"LAUNCHER_BASE": "Qwen/Qwen3-8B", "LAUNCHER_RUNS_DIR": "elsewhere"}
    made = parse(["train", "neo4j", "--resume"], **variables)
    assert (made.base, made.runs_dir) == (None, "elsewhere")


def test_every_variable_is_of_a_flag_and_documented() -> None:
    flags = {name for verb in list_verbs(make_parser()) for flag in verb.flags for name in flag.names}
    assert set(FLAGS) <= flags
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    assert [flag for flag in FLAGS if f"`{name_variable(flag)}`" not in text] == []
    assert "`LAUNCHER_HARDWARE`" in text


def test_every_verb_speaks_json_where_a_script_may_want_it() -> None:
    silent = {verb.name for verb in list_verbs(make_parser()) if not any("--json" in flag.names for flag in verb.flags)}
    assert silent == WITHOUT_JSON


def test_help_and_docs_know_every_exit_code() -> None:
    told = make_parser().format_help()
    docs = (ROOT / "docs/CLI.md").read_text(encoding="utf-8")
    for code in (*ExitCode, 130):
        assert f"{int(code)} " in told
        assert f"| {int(code)} |" in docs


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("expert-launcher 0.")


def test_a_misspelt_variable_is_told() -> None:
    fine = ("LAUNCHER_RUNS_DIR", "LAUNCHER_PID", "LAUNCHER_TERMINAL", "LAUNCHER_TEST_ALL", "LAUNCHER_TSC", "RUNDIR")
    environ = {"LAUNCHER_RUNDIR": "x", **dict.fromkeys(fine, "y")}
    assert list(find_misspelt(environ)) == [("LAUNCHER_RUNDIR", "LAUNCHER_RUNS_DIR")]


def test_variables_that_are_no_flags_are_documented() -> None:
    assert {name for name in VARIABLES if name.startswith("LAUNCHER_")} == set(OTHERS)


@pytest.mark.parametrize("words", [["plan", "--json"], ["plan", "neo4j", "--json", "--gpus", "0"]])
def test_a_wrong_flag_is_json_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["hint"] == "launcher plan --help lists what it takes"
    assert told.err.startswith("error: launcher plan: ")
    assert "usage:" not in told.err
