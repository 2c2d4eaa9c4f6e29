"""Text -> token ids, piece by piece. Words and lines repeat, and a piece has the same tokens wherever it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

# A piece ends before a single space, or behind a single newline, that stands between two visible ASCII characters.
# No pre-token of the splitters below reaches across such a border, and none looks across it. ("/" may follow a newline
# inside a pre-token of GPT-4o's kind.) Everything else, such as indentation or other scripts, stays inside a piece.
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

# What is remembered: enough for the words of a data set, small beside a batch. Then it is forgotten, and begins anew.
_MOST_PIECES = 400_000
_MOST_CHARACTERS = 16_000_000


class PieceEncoder:
    """Encodes each piece once. With a tokenizer that is not known to be safe for it, each text is one piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_borders = has_safe_borders(tokenizer)
        self._known: dict[str, bytes] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Token ids of each text, as the bytes of int32: joining those is the fastest way to lay them end to end."""
        if not self._has_borders:
            return self._encode_whole(texts)
        pieces = [_PIECE.findall(text) for text in texts]
        self._learn(pieces)
        tokens_of = self._known.__getitem__
        return [b"".join(map(tokens_of, parts)) for parts in pieces]

    def _learn(self, pieces: Sequence[Sequence[str]]) -> None:
        if len(self._known) > _MOST_PIECES or self._num_characters > _MOST_CHARACTERS:
            self._known.clear()
            self._num_characters = 0
        known = self._known
        unknown = [piece for piece in dict.fromkeys(chain.from_iterable(pieces)) if piece not in known]
        self._num_characters += sum(map(len, unknown))
        known.update(zip(unknown, self._encode_whole(unknown), strict=True))

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32).tobytes() for encoding in encodings]


def has_safe_borders(tokenizer: Tokenizer) -> bool:
    """True where cutting a text at its borders provably changes no token."""
    added = tokenizer.get_added_tokens_decoder().values()
    is_plain = all(
        not (token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content)) for token in added
    )
    normalizer = _state(tokenizer.normalizer).get("type")
    has_dropout = bool(getattr(tokenizer.model, "dropout", None))
    return is_plain and normalizer in (None, "NFC") and not has_dropout and _splits_safely(tokenizer.pre_tokenizer)


def _splits_safely(splitter: Any) -> bool:
    state = _state(splitter)
    steps = state.get("pretokenizers", [state])
    *before, last = steps
    is_bytes = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if is_bytes and last["use_regex"]:  # GPT-2's own, also behind a step that sets digits apart
        return all(step.get("type") == "Digits" for step in before)
    return is_bytes and [_regex_of(step) in _SPLITTERS for step in before] == [True]


def _regex_of(step: Mapping[str, Any]) -> str | None:
    is_isolating = step.get("type") == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return step["pattern"].get("Regex") if is_isolating else None


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state
