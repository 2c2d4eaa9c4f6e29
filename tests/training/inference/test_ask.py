"""`launcher ask`: the prompt is the training's, and stdout holds only the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from launcher.core.errors import InputError
from launcher.corpus.documents import make_template
from launcher.corpus.spec import get_expert_stores_dir
from launcher.corpus.store import find_store
from launcher.corpus.tokenizer import load_tokenizer
from launcher.manifest import load_manifest
from launcher.manifest.model import Decoding
from launcher.training.inference import ask, generate
from launcher.training.inference.generate import answer_question, build_generation_config
from launcher.training.inference.load import load_trained_model
from launcher.training.inference.prompt import render_prompt
from launcher.training.inference.trained_run import load_trained_run
from tests.conftest import ROOT
from tests.training.trained_run import Trained, copy_run, data_dir, launcher, load_plan, trained  # noqa: F401

QUESTION, SCHEMA = "Who acted in most films?", "Node properties:\nActor {name: STRING}"
PROMPT = f"<|im_start|>user\n{QUESTION}\n\n{SCHEMA}<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 4  # fewer than an answer has


def greedy_by_hand(trained: Trained, num_tokens: int = NUM_TOKENS) -> list[int]:  # noqa: F811
    """Generate token by token, with PEFT alone."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained.base), str(trained.paths.adapter))
    model.eval()
    ids = load_tokenizer("launcher/tiny", ()).backend.encode(PROMPT, add_special_tokens=False).ids
    start = len(ids)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def decode(tokens: list[int]) -> str:
    return load_tokenizer("launcher/tiny", ()).backend.decode(tokens)


def answer_here(paths: Any, max_new_tokens: int = NUM_TOKENS) -> generate.Answer:
    return answer_question(load_trained_run(paths.root), QUESTION, SCHEMA, max_new_tokens=max_new_tokens)


def test_stdout_holds_only_the_answer(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "a", QUESTION, "--input", SCHEMA, "--max-new-tokens", str(NUM_TOKENS))
    assert result.returncode == 0, result.stderr
    assert result.stdout == decode(greedy_by_hand(trained)) + "\n"
    notes = [line for line in result.stderr.splitlines() if "a smoke run" in line]
    assert len(notes) == 1
    assert f"cut off after {NUM_TOKENS} tokens" in result.stderr
    assert "parse" not in result.stderr  # only JSON is checked


@pytest.mark.slow
def test_held_out_row_is_asked_if_there_is_no_question(trained: Trained) -> None:  # noqa: F811
    """The command that a training prints at its end can be copied as it is."""
    result = launcher(trained, "ask", "a", "--max-new-tokens", str(NUM_TOKENS), "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["question"] in answer["prompt"]
    assert answer["input"] in answer["prompt"]
    assert f"expected: {answer['expected']}\n" in result.stderr
    assert " 'your question' --input 'its schema'\n" in result.stderr
    refused = launcher(trained, "ask", "a", "--input", SCHEMA)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--input and --system need a question" in refused.stderr


def test_json_output(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "a", QUESTION, "--input", SCHEMA, "--max-new-tokens", str(NUM_TOKENS), "--json")
    values = json.loads(result.stdout)
    assert values["answer"] == decode(greedy_by_hand(trained))
    assert values["prompt"] == PROMPT
    assert (values["num_answer_tokens"], values["end"], values["check"]) == (NUM_TOKENS, "length", None)


def test_prompt_equals_the_training_prompt(trained: Trained, data_dir: Path) -> None:  # noqa: ARG001, F811
    run, tokenizer = load_trained_run(trained.paths.root), load_tokenizer("launcher/tiny", ())
    assert run.outcome is not None
    assert run.outcome.data_key is not None
    store = find_store(get_expert_stores_dir(run.plan), run.outcome.data_key)
    assert store is not None
    pack = store.open_split("validation")[0]
    rows = (ROOT / "experts/neo4j/sample/validation.jsonl").read_text().splitlines()
    row = json.loads(rows[int(pack.rows[0]) - 1])
    template = make_template(run.plan.data.prompt_template, tokenizer)
    prompt = render_prompt(template, row["question"], context=row["schema"])
    ids = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    num_prompt_tokens = int(pack.trained.argmax())
    assert pack.input_ids[:num_prompt_tokens].tolist() == ids


@pytest.mark.usefixtures("data_dir")
def test_answer_ends_at_the_end_token(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The first generated token is declared the end token."""
    tokens = greedy_by_hand(trained)
    monkeypatch.setattr(generate, "_collect_eos_ids", lambda *_: [tokens[0]])
    answer = answer_here(trained.paths)
    assert (answer.num_tokens, answer.end) == (1, "end token")


def test_eos_ids_are_those_of_template_and_base() -> None:
    tokenizer = load_tokenizer("launcher/tiny", ())
    end = tokenizer.backend.token_to_id("<|im_end|>")
    start = tokenizer.backend.token_to_id("<|im_start|>")
    assert start in generate._collect_eos_ids(tokenizer, "<|im_end|>", ("x", "<|im_start|>")), (
        "text has no special token"
    )
    assert generate._collect_eos_ids(tokenizer, "<|im_end|>")[0] == end
    assert set(generate._collect_eos_ids(tokenizer, "<|endoftext|>")) == {0, end}


@pytest.mark.usefixtures("data_dir")
def test_answer_stops_before_a_stop_sequence(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    full_text = decode(greedy_by_hand(trained))
    stop = full_text[4:6]
    paths = copy_run(trained, tmp_path, manifest={"training.decoding": {"stop_sequences": [stop]}})
    answer = answer_here(paths)
    assert answer.text == full_text[: full_text.index(stop)]
    assert answer.end == "stop sequence"
    assert answer.num_tokens < NUM_TOKENS


@pytest.mark.usefixtures("data_dir")
def test_generation_config_of_the_base_is_ignored(
    trained: Trained,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, right = greedy_by_hand(trained), load_trained_model

    def load(*arguments: Any, **options: Any) -> Any:
        model: Any = right(*arguments, **options)
        model.get_base_model().generation_config.suppress_tokens = sorted(set(tokens))
        return model

    monkeypatch.setattr(generate, "load_trained_model", load)
    assert answer_here(trained.paths).text == decode(tokens)


@pytest.mark.usefixtures("data_dir")
def test_sampling_is_repeatable_and_differs_from_greedy(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    paths = copy_run(trained, tmp_path, manifest={"training.decoding": {"temperature": 2.0}})
    question = f"What is asked?\n\n{QUESTION}"  # the tiny base is less certain here
    first, second, greedy = (
        answer_question(load_trained_run(run.root), question, SCHEMA, max_new_tokens=30)
        for run in (paths, paths, trained.paths)
    )
    assert first.text == second.text
    assert first.text != greedy.text


@pytest.mark.parametrize(
    ("decoding", "samples"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_p": 0.9}, False),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, True),
        ({"top_p": 0.9}, True),
    ],
)
def test_generation_config_follows_the_manifest(decoding: dict[str, Any], samples: bool) -> None:
    config = build_generation_config(Decoding(**decoding), [2, 0], 7)
    assert config.do_sample is samples
    assert (config.eos_token_id, config.max_new_tokens) == ([2, 0], 7)
    if samples:
        assert config.temperature == decoding.get("temperature", 1.0)
        assert (config.top_p, config.top_k) == (0.9, decoding.get("top_k", 0))


def test_json_answers_are_checked_for_syntax() -> None:
    manifest = load_manifest(ROOT / "experts/json/manifest.json").manifest
    assert ask.check_json(manifest, '{"a": [1, 2]}') == "parses"
    broken = ask.check_json(manifest, '{"a":\n  1,}')
    assert broken is not None
    assert "at line 2, column 5" in broken or "at line 2, column 4" in broken
    for text in ("NaN", "[" * 100_000, "", "{} {}"):
        check = ask.check_json(manifest, text)
        assert check is not None
        assert check.startswith("does not parse: "), text


@pytest.mark.parametrize("expert", ["neo4j", "sql", "typescript"])
def test_other_languages_are_not_checked(expert: str) -> None:
    assert ask.check_json(load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest, "nonsense") is None


@pytest.mark.usefixtures("data_dir")
def test_json_check_is_one_line_on_stderr(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path, manifest={"training.decoding.grammar_type": "json"})
    assert ask.main([f"--run={paths.root}", f"--question={QUESTION}", f"--input={SCHEMA}", "--max-new-tokens=3"]) == 0
    out, err = capfd.readouterr()
    assert out == decode(greedy_by_hand(trained, 3)) + "\n"
    assert [line for line in err.splitlines() if line.startswith("json: does not parse: ")]


@pytest.mark.parametrize(
    ("plan", "question", "words"),
    [
        ({"data.field_mapping.input": None}, QUESTION, "without a second field"),
        ({}, "  ", "the question is empty"),
        ({"base.max_positions": 5}, QUESTION, "more than launcher/tiny has positions"),
        ({"random_weights": True}, QUESTION, "--random-weights"),
    ],
)
def test_input_errors_are_reported(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    plan: dict[str, Any],
    question: str,
    words: str,
) -> None:
    paths = copy_run(trained, tmp_path, plan=plan)
    assert ask.main([f"--run={paths.root}", f"--question={question}", f"--input={SCHEMA}", "--json"]) == 2
    out, err = capfd.readouterr()
    assert words in json.loads(out)["error"]
    assert words in err
    assert "Traceback" not in err


def test_unknown_run_lists_existing_runs(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "b", QUESTION, "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["problems"] == [{"where": "a", "what": "done"}]


def test_missing_second_field_is_noted(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    ask.check_fields(load_trained_run(trained.paths.root), QUESTION, None, {})
    assert "schema; pass it with --input" in capsys.readouterr().err
    ask.check_fields(load_trained_run(trained.paths.root), QUESTION, SCHEMA, {})
    assert capsys.readouterr().err == ""


def run_ask(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    code = ask.main([f"--run={root}", f"--question={QUESTION}", f"--input={SCHEMA}", "--max-new-tokens=1", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out), err


def test_system_message_is_that_of_all_training_rows(
    trained: Trained,  # noqa: F811
    data_dir: Path,  # noqa: ARG001, F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path, outcome={"shared_system": "Write Cypher."})
    values, notes = run_ask(paths.root, capsys, "--json")
    assert values["prompt"] == f"<|im_start|>system\nWrite Cypher.<|im_end|>\n{PROMPT}"
    assert values["system"] == "Write Cypher."
    assert "system message: Write Cypher. (as in all training rows; --system TEXT changes it)" in notes
    values, notes = run_ask(paths.root, capsys, "--json", "--system=Be brief.")
    assert values["prompt"] == f"<|im_start|>system\nBe brief.<|im_end|>\n{PROMPT}"
    assert "system message: Be brief. (--system)" in notes
    values, notes = run_ask(paths.root, capsys, "--json", "--system=")
    assert (values["prompt"], values["system"], "system message" in notes) == (PROMPT, "", False)


def test_system_message_is_given_once(trained: Trained) -> None:  # noqa: F811
    run = load_trained_run(trained.paths.root)
    with pytest.raises(InputError, match="--system and --field both set a system message"):
        ask.describe_system(run, "of a field", "of the flag")


def test_template_that_rejects_the_question_is_an_input_error() -> None:
    tokenizer = load_tokenizer("launcher/tiny", ())
    from launcher.corpus.chat_template import TokenizerTemplate

    template = TokenizerTemplate(tokenizer=tokenizer, source="{{ raise_exception('no') }}")
    with pytest.raises(InputError, match="cannot render this question"):
        render_prompt(template, QUESTION)
