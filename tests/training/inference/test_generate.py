"""Batched generation gives the same answers as one prompt at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from launcher.core.choices import Dtype
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.manifest.model import Decoding
from launcher.plan.model import Plan
from launcher.request.request import Request, base_folders, plan_request
from launcher.training.inference import generate, load
from launcher.training.inference.generate import (
    Answer,
    Generator,
    StopSequenceCriteria,
    count_row_bytes,
    load_base_for_generation,
    load_generator,
)

PROMPTS = ["MATCH", "SELECT name FROM films WHERE", '{"a": 1', "function f(", "a" * 60, "x"]


@pytest.fixture(scope="module")
def smoke() -> Plan:
    return plan_request(Request(expert="neo4j", profile="smoke")).plan


@pytest.fixture(scope="module")
def model(smoke: Plan) -> object:
    return load_base_for_generation(smoke)


@pytest.fixture(scope="module")
def tokenizer(smoke: Plan) -> BaseTokenizer:
    return load_tokenizer(smoke.base.name, base_folders(Path(smoke.data.folder)))


def generator(model: object, smoke: Plan, batch_size: int | None, decoding: Decoding | None = None) -> Generator:
    return load_generator(model, smoke, decoding=decoding or Decoding(), max_new_tokens=12, batch_size=batch_size)


def texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def test_batch_equals_single_prompts(model: object, smoke: Plan) -> None:
    alone = generator(model, smoke, 1).generate(PROMPTS)
    together = generator(model, smoke, 4).generate(PROMPTS)
    assert together == alone
    assert [answer.prompt for answer in together] == PROMPTS, "in the order of the prompts"
    assert len(set(texts(alone))) > 1, "else the test shows nothing"


def test_progress_is_reported_per_batch(model: object, smoke: Plan) -> None:
    advanced: list[tuple[int, str]] = []
    generator(model, smoke, 4).generate(PROMPTS, lambda count, detail: advanced.append((count, detail)))
    assert [count for count, _ in advanced if count] == [4, 2]
    assert advanced[0][0] == 0
    assert advanced[0][1].startswith("token 1 of at most ")


def test_rows_stop_independently(model: object, smoke: Plan) -> None:
    plain = generator(model, smoke, 1).generate(PROMPTS[:3])
    word = plain[0].text.strip()[2:6]
    assert word
    assert word not in plain[1].text, "choose another word"
    stopped = generator(model, smoke, 3, Decoding(stop_sequences=(word,))).generate(PROMPTS[:3])
    assert stopped[0].end == "stop sequence"
    assert stopped[0].text == plain[0].text[: plain[0].text.index(word)]
    assert stopped[1].text == plain[1].text


def test_stop_sequence_may_span_tokens(tokenizer: BaseTokenizer) -> None:
    ids = tokenizer.backend.encode("abc END def", add_special_tokens=False).ids
    other = tokenizer.backend.encode("nothing at all here", add_special_tokens=False).ids
    width = max(len(ids), len(other))
    rows = torch.tensor([[0] * (width - len(one)) + one for one in (ids, other)])
    stop = StopSequenceCriteria(tokenizer, ("END",), 0)
    assert stop(rows, None).tolist() == [True, False]
    assert StopSequenceCriteria(tokenizer, (), 0)(rows, None).tolist() == [False, False]


def test_long_prompt_loses_its_beginning(model: object, smoke: Plan) -> None:
    long = "word " * (2 * smoke.base.max_positions)
    (answer,) = generator(model, smoke, 1).generate([long])
    assert answer.num_prompt_tokens == smoke.base.max_positions - 12


def test_batch_size_follows_the_free_memory(smoke: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    standin = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    one = generator(standin, smoke, None)
    row, long = (count_row_bytes(smoke.base, 2, longest, 12) for longest in (100, 16_384))
    assert long > 200 * row, "the mask grows with the square of the length"
    for free, longest, expected in ((20 * row, 100, 10), (10**15, 100, 256), (20 * long, 16_384, 10), (row, 100, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, free))
        assert one._choose_batch_size(longest) == expected


def test_short_prompts_are_not_padded_to_a_very_long_one(model: object, smoke: Plan) -> None:
    sizes: list[int] = []
    prompts = ["What is " + "word " * count for count in (2, 300, 3, 280, 4)]
    answers = generator(model, smoke, 5).generate(prompts, lambda count, _detail: sizes.append(count))
    assert [size for size in sizes if size] == [2, 3]
    assert [answer.prompt for answer in answers] == prompts


@pytest.mark.parametrize("batch_size", [None, 6])
def test_out_of_memory_halves_only_a_chosen_batch(
    model: object, smoke: Plan, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generator(model, smoke, 1).generate(PROMPTS)
    sizes: list[int] = []
    generate_batch = Generator._generate_batch

    def generate_at_most_two(self: Generator, ids: list[list[int]], advance: Any) -> list[list[int]]:
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError
        return generate_batch(self, ids, advance)

    monkeypatch.setattr(Generator, "_generate_batch", generate_at_most_two)
    if batch_size is None:
        assert generator(model, smoke, None).generate(PROMPTS) == expected
        assert sizes == [6, 3, 1, 5, 2, 3, 1, 2]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            generator(model, smoke, batch_size).generate(PROMPTS)


@pytest.mark.parametrize(
    ("dtype", "has_matmuls", "free", "expected"),
    [
        ("bf16", False, 10**12, "fp32"),
        ("fp16", False, 10**12, "fp32"),
        ("bf16", False, 10**3, "bf16"),
        ("bf16", True, 10**12, "bf16"),
        ("fp32", False, 10**12, "fp32"),
    ],
)
def test_a_cpu_computes_in_fp32_without_instructions_for_the_dtype(
    smoke: Plan, monkeypatch: pytest.MonkeyPatch, dtype: Dtype, has_matmuls: bool, free: int, expected: Dtype
) -> None:
    monkeypatch.setattr(load, "_has_cpu_matmuls", lambda _dtype: has_matmuls)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert load.pick_dtype(smoke, dtype, torch.device("cpu")) == expected
    assert load.pick_dtype(smoke, dtype, torch.device("cuda")) == dtype


def test_a_base_in_bf16_is_loaded_in_fp32_on_such_a_cpu(smoke: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "get_base_dtype", lambda _plan: "bf16")
    for has_matmuls, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(load, "_has_cpu_matmuls", lambda _dtype, has_matmuls=has_matmuls: has_matmuls)
        assert load_base_for_generation(smoke).dtype == expected
