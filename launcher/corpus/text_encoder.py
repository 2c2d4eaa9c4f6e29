"""Encode rendered texts as the base's tokenizer does: each text as a whole, then cut into its segments."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer

from launcher.corpus.cached_tokenizer import CachedTokenizer, has_normalizer
from launcher.corpus.control_tokens import get_added_tokens, has_escape
from launcher.corpus.templates import Segment, Template
from launcher.corpus.tokenizer import BaseTokenizer


class TextEncoder:
    """Tokenizes rendered text. Control tokens are recognized where the template wrote them, never inside fields.

    A BOS token is added if the tokenizer's post-processor adds one and the text does not begin with it. The base's own
    chat template writes BOS itself.
    """

    def __init__(self, tokenizer: BaseTokenizer, template: Template) -> None:
        self._tokenizer = tokenizer.backend
        self._cached = CachedTokenizer(tokenizer.backend)
        self._controls = template.controls
        self._bos = np.array(tokenizer.bos_ids if template.adds_bos else [], dtype=np.int32).tobytes()
        self._added_ids = frozenset(get_added_tokens(tokenizer.backend))
        # An added token that is compared with the normalized text may also be written in other ways.
        added = get_added_tokens(tokenizer.backend)
        self._control_ids = frozenset(number for number, t in added.items() if t.content in template.controls.names)
        is_normalized = any(added[number].normalized for number in self._control_ids)
        self._is_always_renamed = is_normalized and has_normalizer(tokenizer.backend)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a rendered prompt."""
        ids: list[int] = np.frombuffer(b"".join(self.encode([(Segment(text, False),)])), dtype=np.int32).tolist()
        return ids

    def count_tokens(self, segments: Sequence[Segment]) -> list[int]:
        """Return the number of tokens of each segment of a document."""
        return [len(part) // np.dtype(np.int32).itemsize for part in self.encode([segments])]

    def adds_bos(self, prompt: str) -> bool:
        """Return whether encoding adds a BOS token to a rendered prompt, because it does not begin with one."""
        return bool(self._bos) and not self._starts_with_bos(self._encode_parts([(Segment(prompt, False),)])[0])

    def encode(self, documents: Sequence[Sequence[Segment]]) -> list[bytes]:
        """Return the token ids of each segment as int32 in bytes, for all documents in order.

        A token that contains the end of one segment and the beginning of the next belongs to the trained one.
        """
        return [part for parts in self._encode_parts(documents) for part in self._with_bos(parts)]

    def _encode_parts(self, documents: Sequence[Sequence[Segment]]) -> list[list[bytes]]:
        done: dict[int, list[bytes]] = {}
        by_segment = [index for index, segments in enumerate(documents) if self._can_split(segments)]
        pieces = iter(self._cached.encode([segment.text for index in by_segment for segment in documents[index]]))
        for index in by_segment:
            done[index] = [next(pieces) for _ in documents[index]]
        renamed: list[int] = []
        whole: list[int] = []
        for index, segments in enumerate(documents):
            if index not in done:
                (renamed if self._is_renamed(segments) else whole).append(index)
        for index, encoding in zip(whole, self._encode_whole([documents[i] for i in whole]), strict=True):
            done[index] = self._cut(encoding, documents[index])
        for index in renamed:
            done[index] = self._encode_renamed(documents[index])
        return [done[index] for index in range(len(documents))]

    def _can_split(self, segments: Sequence[Segment]) -> bool:
        return self._cached.can_split and not self._is_renamed(segments) and self._cached.has_safe_boundaries(segments)

    def _is_renamed(self, segments: Sequence[Segment]) -> bool:
        return self._is_always_renamed or any(has_escape(segment.text) for segment in segments)

    def _encode_whole(self, documents: Sequence[Sequence[Segment]]) -> list[Encoding]:
        texts = ["".join(segment.text for segment in segments) for segments in documents]
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _encode_renamed(self, segments: Sequence[Segment]) -> list[bytes]:
        """Encode a text with renamed control tokens, so that the same texts in fields are encoded as ordinary text."""
        tokenizer, names = self._renamed
        renamed = [Segment(self._controls.rename(segment.text, names), segment.is_trained) for segment in segments]
        encoding = tokenizer.encode("".join(segment.text for segment in renamed), add_special_tokens=False)
        if not any(has_escape(segment.text) for segment in segments):
            plain = self._encode_whole([segments])[0]
            if self._count_controls(plain) <= self._count_controls(encoding):
                return self._cut(plain, segments)
        return self._cut(encoding, renamed)

    def _count_controls(self, encoding: Encoding) -> int:
        return sum(map(self._control_ids.__contains__, encoding.ids))

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str]]:
        """A copy of the tokenizer with control tokens renamed to texts that no row contains, and the new names."""
        secret = secrets.token_hex(8)
        names = {name: f"⟪{secret}-{index}⟫" for index, name in enumerate(self._controls.names)}
        state = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            if token["content"] in names:  # found wherever the template wrote it, or its new name would be encoded
                token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_list_parts(merge))]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        tokenizer = Tokenizer.from_str(json.dumps(state))
        assert all(tokenizer.token_to_id(new) == self._tokenizer.token_to_id(old) for old, new in names.items())
        return tokenizer, names

    def _cut(self, encoding: Encoding, segments: Sequence[Segment]) -> list[bytes]:
        """Return the tokens of each segment, cut from the encoding of the whole text."""
        ids, cuts, position = encoding.ids, [0], 0
        for left, right in pairwise(segments):
            position += len(left.text)
            cut = _find_token(encoding, position)
            while right.is_trained and cut > cuts[-1] and _get_span(encoding, cut - 1)[1] > position:
                if ids[cut - 1] in self._added_ids:  # it swallows the blanks after it
                    break
                cut -= 1
            cuts.append(max(cut, cuts[-1]))
        tokens = np.array(ids, dtype=np.int32)
        return [tokens[start:end].tobytes() for start, end in pairwise([*cuts, len(ids)])]

    def _with_bos(self, parts: list[bytes]) -> list[bytes]:
        if self._bos and parts and not self._starts_with_bos(parts):
            parts[0] = self._bos + parts[0]
        return parts

    def _starts_with_bos(self, parts: list[bytes]) -> bool:
        return b"".join(parts).startswith(self._bos)


def _list_parts(merge: str | list[str]) -> tuple[str, str, str]:
    """Return both parts of a BPE merge, and what they are merged to."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _find_token(encoding: Encoding, position: int) -> int:
    """Return the index of the first token that starts at or after a character position, without listing all offsets."""
    token = encoding.char_to_token(position)
    if token is None:
        return bisect_left(encoding.offsets, (position,))
    while token > 0 and _get_span(encoding, token - 1)[0] >= position:
        token -= 1
    while token < len(encoding) and _get_span(encoding, token)[0] < position:
        token += 1
    return token


def _get_span(encoding: Encoding, token: int) -> tuple[int, int]:
    return encoding.token_to_chars(token) or (0, 0)
