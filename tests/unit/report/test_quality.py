"""What the report says of the answers: rates with their reach, the gain, the worst ones, and what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.evaluations import Evaluation, RunEvaluations
from launcher.paths import RunPaths
from launcher.quality.results import AnswerResult, EvalResult
from launcher.report import load_facts, render_report
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_evaluation, write_run
from tests.unit.report.made_run import RATES, make_evaluations, make_facts, make_outcome, make_plan

EVIL = "`x` | <script>alert(1)</script>\n## head \x1b[31m hf_abcdefghijklmnopqrstuvwxyz"


def quality(evaluations: RunEvaluations | None = None, **changes: object) -> str:
    found = make_evaluations() if evaluations is None else evaluations
    report = render_report(make_facts(outcome=make_outcome(), evaluations=found, **changes))  # type: ignore[arg-type]
    return report.split("\n## Quality\n")[1].split("\n## ")[0]


def with_answers(result: EvalResult, **changes: object) -> EvalResult:
    answers = tuple(AnswerResult(**{**answer.model_dump(), **changes}) for answer in result.answers)
    return result.model_copy(update={"answers": answers})


def test_each_check_has_a_rate_and_its_reach_for_base_and_adapter() -> None:
    told = quality()
    assert "| check | base | adapter, step 4 | adapter, `launcher eval` | judged by |" in told
    assert "| rows | 40 of 480 validation | 40 of 480 validation | 100 of 480 test |  |" in told
    assert (
        "| **`matches` same query or same result** | 10.0 % (4.0 to 23.1) | 50.0 % (35.2 to 64.8) | "
        "50.0 % (40.4 to 59.6) | made 1.0 |" in told
    )
    assert "| `parses` parses as Cypher | 40.0 % (26.3 to 55.4) |" in told


def test_the_gain_is_told_with_its_reach_and_the_course() -> None:
    told = quality()
    assert (
        "On the 40 rows that both were judged on, `matches` changed by +40.0 points (+22.7 to +53.5 with 95 %): "
        "16 won, 0 lost." in told
    )
    assert "chance" not in told
    assert "`eval/matches`, step 0 to 4: ▁▃█ from 10.0 % to 50.0 %, best 50.0 %." in told


def test_a_gain_that_may_be_chance_is_called_so() -> None:
    trained = Evaluation(result=make_evaluation({"parses": 0.4, "matches": 0.125}, seed="x"), step=4)
    assert "No change lies within that: it may be chance." in quality(make_evaluations(trained=trained))


def test_another_checker_is_told() -> None:
    trained = Evaluation(result=make_evaluation(RATES[4], checker="made 2.0"), step=4)
    told = quality(make_evaluations(trained=trained))
    assert "Note: judged by made 1.0 before, by made 2.0 now." in told
    assert told.count("| made 1.0 |") == 2  # the last column tells: launcher eval's


def test_a_check_that_nobody_could_make_and_one_that_few_could() -> None:
    result = make_evaluation(RATES[4])
    parses, matches = result.checks
    none = parses.model_copy(update={"num_judged": 0, "num_passed": 0})
    few = matches.model_copy(update={"num_judged": 30, "num_passed": 15})
    trained = Evaluation(result=result.model_copy(update={"checks": (none, few)}), step=4)
    told = quality(make_evaluations(trained=trained))
    assert "| `parses` parses as Cypher | 40.0 % (26.3 to 55.4) | not judged |" in told
    assert "50.0 % (35.2 to 64.8, 30 judged)" in told


def test_the_worst_answers_are_those_that_fail_the_first_check() -> None:
    result = make_evaluation({"parses": 0.95, "matches": 0.5})
    told = quality(RunEvaluations(trained=Evaluation(result=result, step=4), kept_step=4))
    lines = [line for line in told.splitlines() if line.startswith("- ")]
    assert "The worst of 20 wrong answers:" in told
    assert [line.rpartition(": ")[2] for line in lines] == ["parses", "parses", "matches"]
    assert lines[0].startswith("- asked `What is asked in row-00")
    cut = with_answers(result, answer="x" * 900, end="length")
    told = quality(RunEvaluations(trained=Evaluation(result=cut, step=4), kept_step=4))
    assert f"it answered `{'x' * 159}…`, and was cut off there: it does not pass: parses" in told
    silent = with_answers(result, answer=" \n", reason="")
    assert "it answered nothing\n" in quality(RunEvaluations(trained=Evaluation(result=silent, step=4), kept_step=4))


def test_where_all_is_right_no_answer_is_shown() -> None:
    result = make_evaluation({"parses": 1.0, "matches": 1.0})
    assert "wrong answers" not in quality(make_evaluations(whole=Evaluation(result=result, step=None)))


def test_foreign_text_is_neither_markup_nor_a_secret() -> None:
    result = with_answers(make_evaluation(RATES[4]), instruction=EVIL, answer=EVIL, reason=EVIL)
    check = result.checks[1].model_copy(update={"title": EVIL, "checker": EVIL})
    evil = result.model_copy(update={"checks": (result.checks[0], check), "split": EVIL})
    told = quality(make_evaluations(base=None, whole=None, trained=Evaluation(result=evil, step=4)))
    outside = re.sub(r"(?ms)^```sh\n.*?^```$", "", told)
    bare = re.sub(r"(?<!\\)`[^`\n]*`", "", outside)
    assert "<script" not in bare
    assert "\x1b" not in told
    assert "hf_abc" not in told
    assert not re.search(r"(?m)^#", outside)
    table = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}


def test_rates_without_answers_are_told_as_such() -> None:
    told = quality(RunEvaluations(kept_step=4))
    assert "| `eval/matches` | 0.5 | 4 |" in told
    assert "who judged, is not known" in told
    assert "```sh\nlauncher eval neo4j --run made " in told


def test_what_is_missing_is_said_with_the_command_that_makes_it() -> None:
    assert "launcher eval" not in quality().replace("`launcher eval`", "")  # nothing is
    no_base = quality(make_evaluations(base=None))
    assert "How good the base is without the adapter is not known." in no_base
    assert "```sh\nlauncher eval neo4j --base\n```" in no_base
    no_whole = quality(make_evaluations(whole=None))
    assert "```sh\nlauncher eval neo4j --run made " in no_whole
    broken = quality(make_evaluations(base=None, unreadable=("evaluations/step-000000.json",)))
    assert "`evaluations/step-000000.json` cannot be read" in broken
    outdated = quality(make_evaluations(whole=None, is_outdated=True))
    assert "What `launcher eval` found was before the run went on" in outdated
    other_step = quality(make_evaluations(kept_step=2))
    assert "The adapter has the weights of step 2: while it trained, others were asked." in other_step


@pytest.mark.parametrize("status", ["stopped", "crashed", "running"])
def test_a_run_that_is_not_done_is_not_asked(status: str) -> None:
    facts = make_facts(outcome=make_outcome(status=status), evaluations=make_evaluations(whole=None))
    assert "launcher eval" not in render_report(facts)


def test_random_weights_are_not_asked() -> None:
    told = quality(RunEvaluations(kept_step=4), plan=make_plan(random_weights=True))
    assert "launcher eval" not in told


def test_a_run_directory_is_read(tmp_path: Path) -> None:
    made = MadeRun(run_id="made", num_steps=30, task_rates=(0.1, 0.6))
    paths: RunPaths = write_run(tmp_path, made)
    write_evaluation(paths.evaluation, make_evaluation(RATES[4], num_rows=100, split="test"))
    paths.evaluation_at(0).write_text("torn")
    report = render_report(load_facts(paths))
    assert "| check | adapter, step 30 | adapter, `launcher eval` | judged by |" in report
    assert "`evaluations/step-000000.json` cannot be read" in report
    assert "| `evaluations/` | answers to held-out rows while it trained" in report
    assert "| `eval.json` | what `launcher eval` found" in report
