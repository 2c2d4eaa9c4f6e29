"""Asking: the prompt is the training's, the answer is the model's, and stdout holds nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from launcher.corpus.documents import make_template
from launcher.corpus.preparation import data_root
from launcher.corpus.store import find_store
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import InputError
from launcher.manifest import load_manifest
from launcher.manifest.metadata import Decoding
from launcher.training import answering, ask
from launcher.training.answering import answer_question, make_generation
from launcher.training.checking import check_answer
from launcher.training.finished import load_finished
from launcher.training.prompts import make_prompt
from launcher.training.reloading import load_expert
from tests.conftest import ROOT
from tests.training.trained_run import Trained, copy_run, data_dir, launcher, load_plan, trained  # noqa: F401

QUESTION, SCHEMA = "Who acted in most films?", "Node properties:\nActor {name: STRING}"
PROMPT = f"<|im_start|>user\n{QUESTION}\n\n{SCHEMA}<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 4  # fewer than an answer has


def greedy_by_hand(trained: Trained, num_tokens: int = NUM_TOKENS) -> list[int]:  # noqa: F811
    """Token by token, by PEFT alone."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained.base), str(trained.paths.adapter))
    model.eval()
    ids = load_tokenizer("launcher/tiny", ()).backend.encode(PROMPT, add_special_tokens=False).ids
    start = len(ids)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def decode(tokens: list[int]) -> str:
    return load_tokenizer("launcher/tiny", ()).backend.decode(tokens)


def answer_here(paths: Any, max_new_tokens: int = NUM_TOKENS) -> answering.Answer:
    return answer_question(load_finished(paths.root), QUESTION, SCHEMA, max_new_tokens)


def test_the_answer_is_all_that_stdout_holds(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "a", QUESTION, "--input", SCHEMA, "--max-new-tokens", str(NUM_TOKENS))
    assert result.returncode == 0, result.stderr
    assert result.stdout == decode(greedy_by_hand(trained)) + "\n"
    notes = [line for line in result.stderr.splitlines() if "a smoke run" in line]
    assert len(notes) == 1
    assert f"cut off after {NUM_TOKENS} tokens" in result.stderr
    assert "parse" not in result.stderr  # Cypher has no checker


def test_as_json(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "a", QUESTION, "--input", SCHEMA, "--max-new-tokens", str(NUM_TOKENS), "--json")
    values = json.loads(result.stdout)
    assert values["answer"] == decode(greedy_by_hand(trained))
    assert values["prompt"] == PROMPT
    assert (values["num_answer_tokens"], values["end"], values["check"]) == (NUM_TOKENS, "length", None)


def test_the_prompt_is_what_training_saw(trained: Trained, data_dir: Path) -> None:  # noqa: ARG001, F811
    run, tokenizer = load_finished(trained.paths.root), load_tokenizer("launcher/tiny", ())
    assert run.outcome is not None
    assert run.outcome.data_key is not None
    store = find_store(data_root(run.plan), run.outcome.data_key)
    assert store is not None
    pack = store.open_split("validation")[0]
    rows = (ROOT / "experts/neo4j/sample/validation.jsonl").read_text().splitlines()
    row = json.loads(rows[int(pack.rows[0]) - 1])
    template = make_template(run.plan.data.prompt_template, tokenizer)
    prompt = make_prompt(template, row["question"], context=row["schema"])
    ids = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    num_prompt_tokens = int(pack.trained.argmax())
    assert pack.input_ids[:num_prompt_tokens].tolist() == ids


@pytest.mark.usefixtures("data_dir")
def test_an_answer_ends_at_the_end_token(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The end token is made the one that comes anyway."""
    tokens = greedy_by_hand(trained)
    monkeypatch.setattr(answering, "_find_ends", lambda *_: [tokens[0]])
    answer = answer_here(trained.paths)
    assert (answer.num_tokens, answer.end) == (1, "end token")


def test_the_end_tokens_are_the_templates_and_the_bases() -> None:
    tokenizer = load_tokenizer("launcher/tiny", ())
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert answering._find_ends(tokenizer, "<|im_end|>")[0] == end
    assert set(answering._find_ends(tokenizer, "<|endoftext|>")) == {0, end}


@pytest.mark.usefixtures("data_dir")
def test_an_answer_stops_before_a_stop_sequence(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    whole = decode(greedy_by_hand(trained))
    stop = whole[4:6]
    paths = copy_run(trained, tmp_path, manifest={"training.decoding": {"stop_sequences": [stop]}})
    answer = answer_here(paths)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.end == "stop sequence"
    assert answer.num_tokens < NUM_TOKENS


@pytest.mark.usefixtures("data_dir")
def test_what_the_base_was_published_with_does_not_leak(
    trained: Trained,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, right = greedy_by_hand(trained), load_expert

    def load(*arguments: Any, **options: Any) -> Any:
        model: Any = right(*arguments, **options)
        model.get_base_model().generation_config.suppress_tokens = sorted(set(tokens))
        return model

    monkeypatch.setattr(answering, "load_expert", load)
    assert answer_here(trained.paths).text == decode(tokens)


@pytest.mark.usefixtures("data_dir")
def test_sampling_is_repeatable_and_differs_from_greedy(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    paths = copy_run(trained, tmp_path, manifest={"training.decoding": {"temperature": 2.0}})
    question = f"What is asked?\n\n{QUESTION}"  # of which the tiny base is less sure
    first, second, greedy = (
        answer_question(load_finished(run.root), question, SCHEMA, 30) for run in (paths, paths, trained.paths)
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
def test_decoding_is_the_manifests(decoding: dict[str, Any], samples: bool) -> None:
    config = make_generation(Decoding(**decoding), [2, 0], 7)
    assert config.do_sample is samples
    assert (config.eos_token_id, config.max_new_tokens) == ([2, 0], 7)
    if samples:
        assert config.temperature == decoding.get("temperature", 1.0)
        assert (config.top_p, config.top_k) == (0.9, decoding.get("top_k", 0))


def test_json_answers_are_checked() -> None:
    manifest = load_manifest(ROOT / "experts/json/manifest.json").manifest
    valid = check_answer(manifest, '{"a": [1, 2]}')
    assert valid is not None
    assert valid.is_valid
    broken = check_answer(manifest, '{"a":\n  1,}')
    assert broken is not None
    assert not broken.is_valid
    assert "at line 2, column 5" in broken.words or "at line 2, column 4" in broken.words
    for text in ("NaN", "[" * 100_000, "", "{} {}"):
        verdict = check_answer(manifest, text)
        assert verdict is not None
        assert not verdict.is_valid, text


@pytest.mark.parametrize("expert", ["neo4j", "sql", "typescript"])
def test_other_answers_are_not_judged(expert: str) -> None:
    assert check_answer(load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest, "nonsense") is None


@pytest.mark.usefixtures("data_dir")
def test_the_verdict_is_one_line_on_stderr(
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
def test_mistakes_are_told(
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


def test_an_unknown_run(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "ask", "b", QUESTION, "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["problems"] == [{"where": "a", "what": "done"}]


def test_a_missing_second_field_is_noted(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    ask.check_fields(load_finished(trained.paths.root), QUESTION, None)
    assert "schema; --input gives it" in capsys.readouterr().err
    ask.check_fields(load_finished(trained.paths.root), QUESTION, SCHEMA)
    assert capsys.readouterr().err == ""


def test_a_template_that_refuses_is_told() -> None:
    tokenizer = load_tokenizer("launcher/tiny", ())
    from launcher.corpus.chat_template import TokenizerTemplate

    template = TokenizerTemplate(tokenizer=tokenizer, source="{{ raise_exception('no') }}", end_token="<|im_end|>")
    with pytest.raises(InputError, match="does not render this question"):
        make_prompt(template, QUESTION)
