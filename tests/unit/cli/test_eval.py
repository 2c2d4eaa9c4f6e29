"""`launcher eval`: which run is evaluated, and which evaluation is kept."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.cli.eval import _find_target_run, _save, apply_gate, print_gate, print_result
from launcher.cli.main import main
from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.judges.results import EvalResult, load_result
from tests.conftest import ROOT
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_run

RATES = {"parses": 0.9, "matches": 0.8}


def make_unjudged() -> EvalResult:
    result = make_evaluation(RATES)
    checks = tuple(check.model_copy(update={"num_judged": 0, "num_passed": 0}) for check in result.checks)
    return result.model_copy(update={"checks": checks})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path, MadeRun(run_id="first"))


def find_run(runs_dir: Path, expert: str | None = None, run: str | None = None) -> RunPaths | None:
    return _find_target_run(
        argparse.Namespace(expert=expert, run=run, adapter=None, base=False, runs_dir=str(runs_dir), output=None)
    )


@pytest.mark.parametrize("expert", ["neo4j", str(ROOT / "experts/neo4j"), str(ROOT / "experts/neo4j/manifest.json")])
def test_expert_is_found_by_name_folder_and_file(paths: RunPaths, tmp_path: Path, expert: str) -> None:
    assert find_run(tmp_path, expert) == paths


def test_run_of_another_expert_is_refused(paths: RunPaths, tmp_path: Path) -> None:
    assert find_run(tmp_path, run="first") == paths
    assert find_run(tmp_path, "neo4j", "first") == paths
    with pytest.raises(InputError, match="first is a run of neo4j, not of sql"):
        find_run(tmp_path, "sql", "first")
    with pytest.raises(InputError, match="no finished run of sql in"):
        find_run(tmp_path, "sql")
    with pytest.raises(InputError, match="no expert called 'neo4jj'; did you mean neo4j"):
        find_run(tmp_path, "neo4jj")


def test_profile_of_a_run_cannot_be_chosen(paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paths.root.is_dir()
    assert main(["eval", "--run", "first", "--runs-dir", str(tmp_path), "--profile", "full"]) == 2
    assert "--profile full has no effect" in capsys.readouterr().err


WEAKER = {
    "rows": (make_evaluation(RATES, num_rows=2), "40 answers instead of 2"),
    "tokens": (make_evaluation(RATES).model_copy(update={"max_new_tokens": 16}), "128 new tokens instead of 16"),
    "more rows, fewer tokens": (
        make_evaluation(RATES, num_rows=50).model_copy(update={"max_new_tokens": 16}),
        "128 new tokens instead of 16\n",
    ),
    "judge": (make_unjudged(), "40 answers judged by matches instead of 0"),
    "part of another split": (make_evaluation(RATES, num_rows=30, split="test"), "40 answers instead of 30"),
}


@pytest.mark.parametrize("name", WEAKER)
def test_weaker_evaluation_does_not_replace_a_fuller_one(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    full = make_evaluation(RATES)
    weak, why = WEAKER[name]
    _save(full, None, paths)
    _save(weak, None, paths)
    assert load_result(paths.evaluation) == full
    assert load_result(paths.partial_evaluation) == weak
    message = capsys.readouterr().err.replace(";", "\n")
    assert f"{paths.evaluation} was kept, because it covers more: " in message
    assert why in message
    command = message.partition("hint: ")[2].partition(" replaces it")[0]
    subprocess.run(shlex.split(command), check=True)
    assert load_result(paths.evaluation) == weak


FULLER = {
    "equal": make_evaluation(RATES, seed="again"),
    "more rows": make_evaluation(RATES, num_rows=41),
    "more tokens": make_evaluation(RATES).model_copy(update={"max_new_tokens": 129}),
    "another split": make_evaluation(RATES, num_rows=30, split="test").model_copy(update={"num_rows": 30}),
    "another judge": make_evaluation({"exact": 0.5}, main_check="exact"),
}


@pytest.mark.parametrize("name", FULLER)
def test_evaluation_that_covers_as_much_replaces_an_earlier_one(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _save(make_evaluation(RATES), None, paths)
    _save(FULLER[name], None, paths)
    assert load_result(paths.evaluation) == FULLER[name]
    assert not paths.partial_evaluation.exists()
    assert capsys.readouterr().err == ""


def test_evaluation_of_earlier_weights_is_replaced_by_a_weaker_one(paths: RunPaths) -> None:
    _save(make_evaluation(RATES, made_at="2026-11-15T09:00:00+00:00"), None, paths)
    small = make_evaluation(RATES, num_rows=2)
    _save(small, None, paths)
    assert load_result(paths.evaluation) == small


def test_output_flag_replaces_the_evaluation_of_a_run(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    _save(make_evaluation(RATES), None, paths)
    small = make_evaluation(RATES, num_rows=2)
    _save(small, paths.root / "logs/../eval.json", paths)
    assert load_result(paths.evaluation) == small
    assert not paths.partial_evaluation.exists()
    assert capsys.readouterr().err == ""


def test_damaged_evaluation_is_replaced(paths: RunPaths) -> None:
    paths.evaluation.write_text("{")
    result = make_evaluation({"parses": 0.9, "matches": 0.8})
    _save(result, None, paths)
    assert load_result(paths.evaluation) == result


@pytest.mark.parametrize(("name", "what"), [("", "it is a folder"), ("no/a.json", "does not exist")])
def test_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, what: str
) -> None:
    assert main(["eval", "neo4j", "--base", "-o", str(tmp_path / name)]) == 2
    assert f"--output {tmp_path / name}: " in (message := capsys.readouterr().err)
    assert what in message


def test_gate_is_printed_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make_evaluation({"matches": 0.9}), make_evaluation({"matches": 0.1})
    for now, is_open, text in ((good, True, "passed: "), (bad, False, "FAILED: worse by more than 5.0 %")):
        gate, warnings = apply_gate(now, good, 0.05)
        assert gate is not None
        print_gate(now, good, gate, warnings)
        assert gate.is_open == is_open
        assert f"  quality gate {text}" in capsys.readouterr().out


def test_check_that_applies_to_no_row_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(make_unjudged(), 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not checked: no rows" in line]
    assert len(lines) == 2
    assert "%" not in "".join(lines)


def test_chats_with_several_answers_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    result = make_evaluation({"parses": 0.9, "matches": 0.8})
    print_result(result, 1)
    assert "chats" not in capsys.readouterr().out
    print_result(result.model_copy(update={"num_chats": 3}), 1)
    assert (
        "note: 3 of the rows are chats with several answers: only the first answer is judged" in capsys.readouterr().out
    )
