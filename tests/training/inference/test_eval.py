"""`launcher eval` on a trained run: generation, judging, the saved result, and the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.heldout import HeldOutRow, HeldOutRows
from launcher.judges.exact_match import ExactMatchJudge
from launcher.judges.results import EvalResult, compare_results, load_result
from launcher.training.inference.generate import Answer
from launcher.training.inference.grade import GeneratedAnswers, grade
from launcher.training.inference.trained_run import check_adapter, load_trained_run
from tests.training.trained_run import Trained, launcher, trained  # noqa: F401  (a fixture)

pytest.importorskip("graphglot", reason="pip install 'expert-launcher[quality]'")
ROWS = ("--rows", "6", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def evaluated(trained: Trained) -> EvalResult:  # noqa: F811
    result = launcher(trained, "eval", "neo4j", *ROWS)
    assert result.returncode == 0, result.stderr
    assert "neo4j, run a: 6 of 200 test rows (test.jsonl)" in result.stdout
    assert "answers fail a check; the worst:" in result.stdout
    return load_result(trained.paths.evaluation)


def test_answers_are_saved_with_their_verdicts(evaluated: EvalResult) -> None:
    assert (evaluated.expert, evaluated.subject, evaluated.split) == ("neo4j", "run a", "test")
    assert len(evaluated.answers) == 6
    names = [check.name for check in evaluated.checks]
    assert evaluated.main_check in names
    for answer in evaluated.answers:
        assert list(answer.checks) == names
        assert answer.num_tokens <= 8
        assert answer.reason
    assert all(check.num_judged == 6 for check in evaluated.checks if check.name == evaluated.main_check)


def test_gate_closes_on_a_significant_drop(
    trained: Trained,  # noqa: F811
    evaluated: EvalResult,
    tmp_path: Path,
) -> None:
    """Compared with a perfect expert: losing six of six by chance has a probability of 1/64."""
    knew = [answer.model_copy(update={"checks": dict.fromkeys(answer.checks, True)}) for answer in evaluated.answers]
    better = evaluated.model_copy(update={"answers": tuple(knew), "subject": "run better"})
    change, warnings = compare_results(better, evaluated)
    assert (change.num_rows, change.num_lost, warnings) == (6, 6, ())
    file = tmp_path / "better.json"
    file.write_text(better.model_dump_json())
    result = launcher(trained, "eval", "neo4j", *ROWS, "--against", str(file))
    assert result.returncode == 6, result.stderr
    assert (
        "quality gate FAILED: worse by more than 5.0 %: 6 of 6 rows newly wrong, 0 newly right: -100.0 points"
        in result.stdout
    )
    allowed = launcher(trained, "eval", "neo4j", *ROWS, "--against", str(file), "--max-regression", "100%")
    assert allowed.returncode == 0


@pytest.mark.slow
def test_gate_is_open_against_the_same_run(trained: Trained, evaluated: EvalResult) -> None:  # noqa: F811
    result = launcher(trained, "eval", "--run", "a", *ROWS, "--against", "a", "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["gate"]["is_open"]
    assert [answer["answer"] for answer in output["answers"]] == [answer.answer for answer in evaluated.answers]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no expert and no run given"),
        (("sql",), "no finished run of sql in"),
        (("--run", "nothing"), "no run called 'nothing'"),
        (("neo4j", "--max-regression", "5%"), "--max-regression requires --against"),
        (("neo4j", "--against", "nothing"), "no run called 'nothing'"),
        (("neo4j", "-o", "nowhere/out.json"), "--output nowhere/out.json: the folder nowhere does not exist"),
        (("neo4j", "--adapter", "."), "is not a PEFT adapter"),
    ],
)
def test_input_errors_are_reported(trained: Trained, arguments: tuple[str, ...], words: str) -> None:  # noqa: F811
    result = launcher(trained, "eval", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_error_of_the_evaluation_is_printed_as_json(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "eval", "neo4j", "--adapter", ".", "--profile", "smoke", "--json")
    assert result.returncode == 2
    assert "is not a PEFT adapter" in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_model.safetensors", None, "is not a PEFT adapter: it has no adapter_model.safetensors"),  # but .bin
        ("adapter_config.json", '{"target_modules": ["(.*)*(.*)*x$"]}', "not a valid adapter config"),
        ("adapter_config.json", '{"rank_pattern": {"(.*)*(.*)*x$": 1}}', "not a valid adapter config"),
        ("adapter_config.json", '{"megatron_config": {"a": 1}, "megatron_core": "x"}', "not a valid adapter config"),
    ],
)
def test_hostile_adapter_is_not_loaded(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_model.bin").touch()
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=words):
        check_adapter(tmp_path)


@pytest.mark.slow
def test_base_and_external_adapter_can_be_evaluated(
    trained: Trained,  # noqa: F811
    evaluated: EvalResult,
    tmp_path: Path,
) -> None:
    out = tmp_path / "base.json"
    base = launcher(trained, "eval", "neo4j", "--base", "--profile", "smoke", *ROWS, "-o", str(out))
    assert base.returncode == 0, base.stderr
    assert load_result(out).subject == "base launcher/tiny"
    adapter = launcher(
        trained, "eval", "neo4j", "--adapter", str(trained.paths.adapter), "--profile", "smoke", *ROWS, "-o", str(out)
    )
    assert adapter.returncode == 0, adapter.stderr
    assert [answer.answer for answer in load_result(out).answers] == [answer.answer for answer in evaluated.answers]


def test_chats_with_several_answers_are_counted(trained: Trained) -> None:  # noqa: F811
    run = load_trained_run(trained.paths.root)
    rows = tuple(
        HeldOutRow(key=str(number), prompt="Q", instruction="Q", context="", answer="A", num_answers=number)
        for number in (1, 2, 3)
    )
    answers = [Answer(text="A", prompt="Q", num_prompt_tokens=1, num_tokens=1, end="end token") for _ in rows]
    result = grade(
        ExactMatchJudge(),
        HeldOutRows(split="test", source="test.jsonl", rows=rows, num_rows=3),
        GeneratedAnswers(answers=answers, max_new_tokens=1, seconds=1.0),
        title="run a",
        plan=run.plan,
        manifest=run.manifest,
    )
    assert result.num_chats == 2
