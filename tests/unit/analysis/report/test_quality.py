"""The report's quality section: rates with confidence intervals, gain, worst answers, missing evaluations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.analysis.report import load_facts, render_report
from launcher.core.run_paths import RunPaths
from launcher.judges.results import AnswerResult, EvalResult
from launcher.runs.evaluations import Evaluation, RunEvaluations
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_evaluation, write_run
from tests.unit.analysis.report.made_run import RATES, make_evaluations, make_facts, make_outcome, make_plan

EVIL = "`x` | <script>alert(1)</script>\n## head \x1b[31m hf_abcdefghijklmnopqrstuvwxyz"


def quality(evaluations: RunEvaluations | None = None, **changes: object) -> str:
    evaluations = make_evaluations() if evaluations is None else evaluations
    report = render_report(make_facts(outcome=make_outcome(), evaluations=evaluations, **changes))  # type: ignore[arg-type]
    return report.split("\n## Quality\n")[1].split("\n## ")[0]


def with_answers(result: EvalResult, **changes: object) -> EvalResult:
    answers = tuple(AnswerResult(**{**answer.model_dump(), **changes}) for answer in result.answers)
    return result.model_copy(update={"answers": answers})


def test_each_check_shows_rate_and_interval_for_base_and_adapter() -> None:
    text = quality()
    assert "| check | base | adapter, step 4 | adapter, `launcher eval` | judged by |" in text
    assert "| rows | 40 of 480 validation | 40 of 480 validation | 100 of 480 test |  |" in text
    assert (
        "| **`matches` same query or same result** | 10.0 % (4.0 to 23.1) | 50.0 % (35.2 to 64.8) | "
        "50.0 % (40.4 to 59.6) | made 1.0 |" in text
    )
    assert "| `parses` parses as Cypher | 40.0 % (26.3 to 55.4) |" in text


def test_gain_shows_interval_and_trend() -> None:
    text = quality()
    assert (
        "On the 40 rows judged for both, `matches` changed by +40.0 points (+22.7 to +53.5, 95 % confidence): "
        "16 won, 0 lost." in text
    )
    assert "chance" not in text
    assert "`eval/matches`, step 0 to 4: ▁▃█ from 10.0 % to 50.0 %, best 50.0 %." in text


def test_gain_that_may_be_chance_is_marked() -> None:
    trained = Evaluation(result=make_evaluation({"parses": 0.4, "matches": 0.125}, seed="x"), step=4)
    assert "The interval includes 0: the difference may be chance." in quality(make_evaluations(trained=trained))


def test_changed_judge_is_noted() -> None:
    trained = Evaluation(result=make_evaluation(RATES[4], checker="made 2.0"), step=4)
    text = quality(make_evaluations(trained=trained))
    assert "Note: judged by made 1.0 before, by made 2.0 now." in text
    assert text.count("| made 1.0 |") == 2  # that of the last column, launcher eval


def test_ungraded_and_partly_judged_checks_are_shown() -> None:
    result = make_evaluation(RATES[4])
    parses, matches = result.checks
    none = parses.model_copy(update={"num_judged": 0, "num_passed": 0})
    few = matches.model_copy(update={"num_judged": 30, "num_passed": 15})
    trained = Evaluation(result=result.model_copy(update={"checks": (none, few)}), step=4)
    text = quality(make_evaluations(trained=trained))
    assert "| `parses` parses as Cypher | 40.0 % (26.3 to 55.4) | not checked: no rows |" in text
    assert "50.0 % (35.2 to 64.8, 30 judged)" in text


def test_worst_answers_fail_the_first_check() -> None:
    result = make_evaluation({"parses": 0.95, "matches": 0.5})
    text = quality(RunEvaluations(trained=Evaluation(result=result, step=4), kept_step=4))
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert "The worst of 20 wrong answers:" in text
    assert [line.rpartition(": ")[2] for line in lines] == ["parses", "parses", "matches"]
    assert lines[0].startswith("- question `What is asked in row-00")
    cut = with_answers(result, answer="x" * 900, end="length")
    text = quality(RunEvaluations(trained=Evaluation(result=cut, step=4), kept_step=4))
    assert f"answer `{'x' * 159}…`, cut off at the length limit: it does not pass: parses" in text
    silent = with_answers(result, answer=" \n", reason="")
    assert "answer nothing\n" in quality(RunEvaluations(trained=Evaluation(result=silent, step=4), kept_step=4))


def test_no_answer_is_shown_if_all_are_correct() -> None:
    result = make_evaluation({"parses": 1.0, "matches": 1.0})
    assert "wrong answers" not in quality(make_evaluations(full_eval=Evaluation(result=result, step=None)))


def test_foreign_text_is_escaped_and_redacted() -> None:
    result = with_answers(make_evaluation(RATES[4]), instruction=EVIL, answer=EVIL, reason=EVIL)
    check = result.checks[1].model_copy(update={"title": EVIL, "checker": EVIL})
    evil = result.model_copy(update={"checks": (result.checks[0], check), "split": EVIL})
    text = quality(make_evaluations(base=None, full_eval=None, trained=Evaluation(result=evil, step=4)))
    outside = re.sub(r"(?ms)^```sh\n.*?^```$", "", text)
    bare = re.sub(r"(?<!\\)`[^`\n]*`", "", outside)
    assert "<script" not in bare
    assert "\x1b" not in text
    assert "hf_abc" not in text
    assert not re.search(r"(?m)^#", outside)
    table = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}


def test_rates_without_saved_answers_are_marked() -> None:
    text = quality(RunEvaluations(kept_step=4))
    assert "| `eval/matches` | 0.5 | 4 |" in text
    assert "the judge are unknown" in text
    assert "```sh\nlauncher eval --run made " in text


def test_missing_evaluations_come_with_their_command() -> None:
    assert "launcher eval" not in quality().replace("`launcher eval`", "")  # nothing is missing
    no_base = quality(make_evaluations(base=None))
    assert "The base model was not evaluated without the adapter." in no_base
    assert "```sh\nlauncher eval neo4j --base\n```" in no_base
    no_full_eval = quality(make_evaluations(full_eval=None))
    assert "```sh\nlauncher eval --run made " in no_full_eval
    broken = quality(make_evaluations(base=None, unreadable=("evaluations/step-000000.json",)))
    assert "`evaluations/step-000000.json` cannot be read" in broken
    outdated = quality(make_evaluations(full_eval=None, is_outdated=True))
    assert "The results of `launcher eval` are older than the last resume" in outdated
    other_step = quality(make_evaluations(kept_step=2))
    assert "The adapter has the weights of step 2; training evaluated another step." in other_step


@pytest.mark.parametrize("status", ["stopped", "crashed", "running"])
def test_unfinished_run_gets_no_eval_command(status: str) -> None:
    facts = make_facts(outcome=make_outcome(status=status), evaluations=make_evaluations(full_eval=None))
    assert "launcher eval" not in render_report(facts)


def test_random_weights_get_no_eval_command() -> None:
    text = quality(RunEvaluations(kept_step=4), plan=make_plan(random_weights=True))
    assert "launcher eval" not in text


def test_evaluations_of_a_run_directory_are_loaded(tmp_path: Path) -> None:
    made = MadeRun(run_id="made", num_steps=30, task_rates=(0.1, 0.6))
    paths: RunPaths = write_run(tmp_path, made)
    write_evaluation(paths.evaluation, make_evaluation(RATES[4], num_rows=100, split="test"))
    paths.evaluation_at(0).write_text("torn")
    report = render_report(load_facts(paths))
    assert "| check | adapter, step 30 | adapter, `launcher eval` | judged by |" in report
    assert "`evaluations/step-000000.json` cannot be read" in report
    assert "| `evaluations/` | judged answers to held-out rows during training" in report
    assert "| `eval.json` | judged answers of `launcher eval`" in report


def test_logged_rates_are_shown_if_the_answers_were_not_saved() -> None:
    report = render_report(make_facts(outcome=make_outcome(), evaluations=RunEvaluations()))
    assert "| `eval/matches` | 0.5 | 4 |" in report
    assert "The answers were not saved" in report
