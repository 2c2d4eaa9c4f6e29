"""Rows of synthetic text with log-normal lengths, for trainings that are only timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from launcher.corpus.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE_TOKENS = 5  # added per row by a chat template, on average

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Sizes(Protocol):
    @property
    def base(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def mean_tokens(self) -> int: ...
    @property
    def num_held_out(self) -> int: ...


def write_rows(sizes: Sizes, folder: Path) -> None:
    """Write enough rows for all steps. The files are the same for every case, so that they are prepared once."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = sizes.batch_size * sizes.num_steps * sizes.sequence_length
    count = int(1.1 * num_tokens / sizes.mean_tokens) + 8
    words = load_words()
    counts = count_tokens(words, sizes.base)
    for name, number in (("rows.jsonl", count), ("held_out.jsonl", sizes.num_held_out)):
        samples = rng.lognormal(np.log(sizes.mean_tokens) - 0.32, 0.8, number)
        lengths = np.clip(samples, 16, sizes.sequence_length - 4 * TEMPLATE_TOKENS) - TEMPLATE_TOKENS
        texts = (write_text(rng, words, counts, float(length)) for length in lengths)
        (folder / name).write_text("".join(json.dumps(split_text(text)) + "\n" for text in texts))


def load_words() -> list[str]:
    """Return words of the experts' samples, which the tokenizer was trained on."""
    text = (ROOT / "experts/neo4j/sample/train.jsonl").read_text(encoding="utf-8").replace("\\n", " ")
    return sorted({word for word in text.split() if word.isalpha()})


def count_tokens(words: list[str], base: str) -> Counts:
    """Count tokens per word with the tokenizer used for random weights."""
    tokenizer = load_tokenizer(base, (), allow_tiny_fallback=True).backend
    encoded = tokenizer.encode_batch([f" {word}" for word in words], add_special_tokens=False)
    return np.array([len(encoding.ids) for encoding in encoded])


def write_text(rng: np.random.Generator, words: list[str], counts: Counts, num_tokens: float) -> list[str]:
    indices = rng.integers(0, len(words), int(num_tokens) + 1)
    num_words = int(np.searchsorted(np.cumsum(counts[indices]), num_tokens, side="right"))
    return [words[index] for index in indices[: max(2, num_words)]]


def split_text(text: list[str]) -> dict[str, str]:
    third = max(1, len(text) // 3)
    return {"instruction": " ".join(text[:third]), "response": " ".join(text[third:])}
