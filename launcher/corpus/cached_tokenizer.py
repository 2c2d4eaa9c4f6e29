"""Tokenizer with a cache: repeated words and lines are tokenized once.

On text2cypher it is 7 times as fast as `encode_batch_fast` (0.35 s instead of 2.6 s of CPU time), on WikiSQL 1.8 times.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from launcher.corpus.templates import Segment

# A piece ends before a single space, or after a single newline, between two visible ASCII characters. No pre-token of
# the splitters below crosses such a boundary or looks across it. ("/" may follow a newline inside a pre-token of
# GPT-4o's kind.) Everything else, such as indentation or other scripts, stays inside a piece.
_VISIBLE = re.compile(r"[!-~]")
_SPLITTABLE = re.compile(r"[!-.0-~]")
_PIECE = re.compile(r"[^!-~]*[!-~]+(?:(?! [!-~]|\n[!-.0-~])[^!-~]+[!-~]*)*(?:\n(?=[!-.0-~]))?|[^!-~]+")

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITTERS = frozenset(
    {
        rf" ?\p{{L}}+|\p{{N}}|{_TAIL}",  # the tiny base
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",  # Qwen 2 and 3
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",  # Llama 3, Phi-4
    }
)

# Size of the cache: enough for the words of a dataset, small compared with a batch. A full cache is cleared.
_MAX_PIECES = 400_000
_MAX_CHARACTERS = 16_000_000


class CachedTokenizer:
    """Tokenizer that caches the tokens of pieces of text; texts are only split if that provably changes no token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.can_split = can_split_safely(tokenizer)
        # GPT-2's regex looks at what follows several newlines; the splitters above keep them together.
        self._max_newlines = sys.maxsize if self.can_split and _has_known_splitter(tokenizer.pre_tokenizer) else 1
        names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        # A text can be split next to an added token, unless this one may be part of a longer one.
        joined = "\0".join(names)
        self._separators = tuple(name for name in names if name and joined.count(name) == 1)
        self._cache: dict[str, bytes] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the token ids of each text as the bytes of int32, which are the fastest to concatenate."""
        if not self.can_split:
            return self._encode_uncached(texts)
        pieces = [_PIECE.findall(text) for text in texts]
        self._add(pieces)
        tokens_of = self._cache.__getitem__
        return [b"".join(map(tokens_of, parts)) for parts in pieces]

    def has_safe_boundaries(self, segments: Sequence[Segment]) -> bool:
        """Return whether encoding the segments one by one gives the same tokens as encoding the whole text."""
        return all(self._is_safe_boundary(left.text, right.text) for left, right in pairwise(segments))

    def _is_safe_boundary(self, left: str, right: str) -> bool:
        if right.startswith(self._separators):
            return True
        if not left.endswith("\n"):
            return left.endswith(self._separators)
        line = left.rstrip("\n")
        is_after_line = len(left) - len(line) <= self._max_newlines and _VISIBLE.match(line[-1:])
        return bool(is_after_line and _SPLITTABLE.match(right))

    def _add(self, pieces: Sequence[Sequence[str]]) -> None:
        if len(self._cache) > _MAX_PIECES or self._num_characters > _MAX_CHARACTERS:
            self._cache.clear()
            self._num_characters = 0
        cache = self._cache
        new = [piece for piece in dict.fromkeys(chain.from_iterable(pieces)) if piece not in cache]
        self._num_characters += sum(map(len, new))
        cache.update(zip(new, self._encode_uncached(new), strict=True))

    def _encode_uncached(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32).tobytes() for encoding in encodings]


def can_split_safely(tokenizer: Tokenizer) -> bool:
    """Return whether splitting a text into pieces provably changes no token."""
    added = tokenizer.get_added_tokens_decoder().values()
    is_plain = all(
        not (token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content)) for token in added
    )
    normalizer = _state(tokenizer.normalizer).get("type")
    has_dropout = bool(getattr(tokenizer.model, "dropout", None))
    return is_plain and normalizer in (None, "NFC") and not has_dropout and _splits_safely(tokenizer.pre_tokenizer)


def has_normalizer(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has a normalizer, which changes texts before they are tokenized."""
    state = _state(tokenizer.normalizer)
    return bool(state) and state.get("normalizers") != []


def _splits_safely(splitter: Any) -> bool:
    state = _state(splitter)
    steps = state.get("pretokenizers", [state])
    *before, last = steps
    is_bytes = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if is_bytes and last["use_regex"]:  # GPT-2's own regex, also after a step that splits digits
        return all(step.get("type") == "Digits" for step in before)
    return is_bytes and [_regex_of(step) in _SPLITTERS for step in before] == [True]


def _has_known_splitter(splitter: Any) -> bool:
    return any(_regex_of(step) in _SPLITTERS for step in _state(splitter).get("pretokenizers", []))


def _regex_of(step: Mapping[str, Any]) -> str | None:
    is_isolating = step.get("type") == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return step["pattern"].get("Regex") if is_isolating else None


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state
