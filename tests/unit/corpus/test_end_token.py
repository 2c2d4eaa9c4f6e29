"""The end of an answer: what is trained, where generation stops, and files that disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.corpus.documents import make_template
from launcher.corpus.end_token import collect_end_ids, note_disagreement, note_other_prompt
from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.families import FAMILIES, write_family


def write_base(folder: Path, family: str, files: dict[str, Any], **settings: Any) -> BaseTokenizer:
    """Write a base; `files` maps config files to names of their end tokens."""
    base = write_family(folder, FAMILIES[family], **settings)
    for name, ends in files.items():
        ids = [base.backend.token_to_id(end) for end in ends]
        (folder / name).write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return base


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("gemma", "<end_of_turn>"),
        ("qwen 2.5", "<|im_end|>"),
        ("llama 3", "<|eot_id|>"),
        ("mistral v3", "</s>"),
        ("phi 3", "<|end|>"),
        ("deepseek", "<\uff5cend▁of▁sentence\uff5c>"),
    ],
)
def test_generation_stops_where_the_template_ends_answers(tmp_path: Path, family: str, end: str) -> None:
    base = write_base(tmp_path, family, {"generation_config.json": [FAMILIES[family].eos, end]})
    template = make_template("tokenizer", base)
    assert template.end_token == end
    assert collect_end_ids(base, end)[0] == base.backend.token_to_id(end)
    assert base.backend.token_to_id(FAMILIES[family].eos) in collect_end_ids(base, end)
    assert note_disagreement(template, base) == ()


def test_published_ends_are_kept(tmp_path: Path) -> None:
    base = write_base(tmp_path, "llama 3", {"generation_config.json": ["<|end_of_text|>", "<|eot_id|>"]})
    ids = [base.backend.token_to_id(name) for name in ("<|eot_id|>", "<|end_of_text|>")]
    assert collect_end_ids(base, "<|eot_id|>") == ids


@pytest.mark.parametrize("template", ["alpaca", "tokenizer"])
def test_the_start_of_a_turn_is_no_end(tmp_path: Path, template: str) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    files = {"config.json": ["<|im_end|>"]}
    base = write_base(tmp_path, "smollm", files, eos_token="<|im_start|>", chat_template=source)
    with pytest.raises(InputError, match="which begins a turn") as caught:
        make_template(template, base)
    assert "base_models[0].end_token=<|im_end|>" in caught.value.hint


def test_the_start_of_a_turn_is_known_by_its_name_without_a_template(tmp_path: Path) -> None:
    base = write_base(tmp_path, "smollm", {}, eos_token="<|im_start|>", chat_template=None)
    with pytest.raises(InputError, match="which begins a turn"):
        make_template("alpaca", base)


def test_files_that_disagree_need_a_decision(tmp_path: Path) -> None:
    base = write_base(tmp_path, "smollm", {"config.json": ["<|endoftext|>"]})
    with pytest.raises(InputError, match="the files of the base model disagree about the end token") as caught:
        make_template("alpaca", base)
    assert {problem.where for problem in caught.value.problems} == {"config.json", "tokenizer_config.json"}
    assert make_template("alpaca", base, "<|endoftext|>").end_token == "<|endoftext|>"
    assert make_template("tokenizer", base, "<|im_end|>").end_token == "<|im_end|>"


def test_another_end_of_the_template_is_noted(tmp_path: Path) -> None:
    base = write_base(tmp_path, "gemma", {"config.json": ["<eos>"]})
    (note,) = note_disagreement(make_template("tokenizer", base), base)
    assert "trained to end with <end_of_turn>" in note
    assert "config.json: <eos>" in note


def test_an_end_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path, "gemma", {})
    with pytest.raises(InputError, match="writes no '<eos>' after an answer"):
        make_template("tokenizer", base, "<eos>")
    with pytest.raises(InputError, match="ends answers with '<nowhere>', not a token"):
        make_template("alpaca", base, "<nowhere>")


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path, "gemma", {}, eos_token=None)
    for name in ("alpaca", "tokenizer"):
        with pytest.raises(InputError, match="the tokenizer has no eos_token"):
            make_template(name, base)


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
def test_chat_templates_of_their_own_files(tmp_path: Path, file: str) -> None:
    base = write_base(tmp_path, "gemma", {}, chat_template=None)
    source = FAMILIES["gemma"].template
    assert source is not None
    (tmp_path / file).write_text(source if file.endswith("jinja") else json.dumps({"chat_template": source}))
    assert (base.chat_template, base.chat_template_file) == (source, file)


def test_what_servers_read_decides_whether_a_note_is_needed(tmp_path: Path) -> None:
    """generation_config.json goes before config.json; without both, only the tokenizer names an end."""
    files = {"config.json": ["<|im_end|>"], "generation_config.json": ["<|endoftext|>"]}
    base = write_base(tmp_path / "one", "smollm", files)
    (note,) = note_disagreement(make_template("tokenizer", base), base)
    assert "generation_config.json: <|endoftext|>" in note
    base = write_base(tmp_path / "two", "gemma", {})
    (note,) = note_disagreement(make_template("tokenizer", base), base)
    assert "(tokenizer_config.json: <eos>). Answers are trained to end with <end_of_turn>" in note
    base = write_base(tmp_path / "three", "qwen 2.5", {})
    assert note_disagreement(make_template("tokenizer", base), base) == ()


@pytest.mark.parametrize("start", ["<|user|>", "<|assistant|>", "<|system|>"])
def test_every_start_of_a_turn_is_known(tmp_path: Path, start: str) -> None:
    """Phi-3's prompt and its end of text begin alike."""
    base = write_base(tmp_path, "phi 3", {}, eos_token=start)
    with pytest.raises(InputError, match="which begins a turn"):
        make_template("alpaca", base)


def test_another_prompt_of_servers_is_noted(tmp_path: Path) -> None:
    """DeepSeek R1 and Gemma 4 begin thoughts in the prompt, but do not write them before an answer."""
    source = FAMILIES["smollm"].template
    assert source is not None
    base = write_base(tmp_path / "same", "smollm", {})
    assert note_other_prompt(make_template("tokenizer", base)) == ()
    assert note_other_prompt(make_template("chatml", base)) == ()
    base = write_base(
        tmp_path / "other", "smollm", {}, chat_template=source.replace("assistant\n", "assistant\n<think>\n")
    )
    (note,) = note_other_prompt(make_template("tokenizer", base))
    assert r"end the prompt with '<think>\n', which" in note
