"""How long the answers of `launcher eval` may be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from launcher.corpus.heldout import HeldOutRow, HeldOutRows
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.request.request import Request, plan_request
from launcher.training.inference import generate
from launcher.training.inference.answer_length import choose_new_tokens
from launcher.training.inference.eval import EvalTarget, _generate
from launcher.training.inference.generate import Answer
from tests.unit.corpus.inputs import make_rows, write_base, write_expert, write_jsonl

CONTEXT = 4096  # of the base in inputs.py


def choose(
    folder: Path, answers: Sequence[str], prompt: str = "Why?", requested: int | None = None, **config: Any
) -> list[int]:
    base = write_base(folder / "base")
    write_jsonl(folder / "train.jsonl", make_rows(20))
    manifest = write_expert(folder, **{"max_seq_length": 4096, **config})
    plan = plan_request(Request(expert=str(manifest), base=str(base), gpu="rtx4090")).plan
    rows = [
        HeldOutRow(key=str(at), prompt=prompt, instruction="", context="", answer=a) for at, a in enumerate(answers)
    ]
    return choose_new_tokens(rows, BaseTokenizer(folder=base), plan, requested)


def letters(count: int) -> str:
    """A text of as many tokens: no merge of the tokenizer joins these letters."""
    return "xq" * (count // 2)


def test_answers_have_512_tokens_or_more_if_their_reference_is_longer(tmp_path: Path) -> None:
    references = [letters(count) for count in (4, 400, 404, 600, 1000, 2000)]
    assert choose(tmp_path, references) == [512, 512, 1024, 1024, 2048, CONTEXT - 4]


@pytest.mark.parametrize(
    ("prompt", "config", "limit"),
    [("Why?", {"max_seq_length": 1024}, 1024), (letters(3000), {}, CONTEXT - 3000), (letters(4000), {}, 512)],
)
def test_sequence_length_and_context_limit_the_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: str, config: dict[str, Any], limit: int
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(tmp_path, ["yes", letters(2000)], prompt, **config) == [512, limit]
    assert f"1 of 2 reference answers are longer than the limit of {limit:,} tokens, by the sequence" in caplog.text


def test_the_flag_decides_and_says_what_it_truncates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose(tmp_path, ["yes", letters(100)], requested=20) == [20, 20]
    assert "longer than the limit of 20 tokens, set by --max-new-tokens" in caplog.text


def test_answers_keep_their_order_and_have_their_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], int]] = []

    class Generator:
        def generate(self, prompts: list[str], _advance: Any, limit: int) -> list[Answer]:
            calls.append((prompts, limit))
            return [
                Answer(text=f"{p} {limit}", prompt=p, num_prompt_tokens=1, num_tokens=1, end="end token")
                for p in prompts
            ]

    monkeypatch.setattr(generate, "load_generator", lambda *_args, **_options: Generator())
    rows = tuple(HeldOutRow(key=p, prompt=p, instruction="", context="", answer="") for p in "abcd")
    held_out = HeldOutRows(split="test", source="", rows=rows, num_rows=4)
    generated = _generate(MagicMock(spec=EvalTarget), held_out, [1024, 512, 4096, 512], None)
    assert calls == [(["b", "d"], 512), (["a"], 1024), (["c"], 4096)]
    assert [answer.text for answer in generated.answers] == ["a 1024", "b 512", "c 4096", "d 512"]
    assert generated.max_new_tokens == 4096
