"""The cached tokenizer returns the same tokens as the tokenizer itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from launcher.corpus import cached_tokenizer as module
from launcher.corpus.cached_tokenizer import CachedTokenizer, can_split_safely
from launcher.corpus.templates import Segment

pytestmark = pytest.mark.long

SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITTERS = {
    "tiny": rf" ?\p{{L}}+|\p{{N}}|{TAIL}",
    "qwen": rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}",
    "llama3": rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}",
}
CORPUS = (
    "MATCH (p:Person)-[:MADE]->(f:Film) WHERE p.name = 'Ada' RETURN count(f)\n  - `url`: STRING\n\n- it's 1999 // x\n",
    "How many films did this person make?  Which of them,\tthough, has the highest budget? I'll say: 12345.\r\n",
    '{"title": "A film", "year": 1999, "actors": ["Ada", "Grace"]}\n/path/to\n/etc a   d\n}\n/foo } /x é ñ 漢字',
) * 4


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(SPLITTERS[name]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make_tokenizer(splitter: pre_tokenizers.PreTokenizer, *, tokens: Sequence[str | AddedToken] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Merges across borders are learned where a splitter allows any: small words, many of them.
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *tokens])
    return tokenizer


SAFE = {name: make_tokenizer(pre_tokenizer(name)) for name in ("gpt2", "smollm", *SPLITTERS)}
FRAGMENTS = (
    *(" ", " ", "  ", "\n", "\n\n", "\n  ", " \n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\x85", "\u0301", "'s"),
    *(
        "a",
        "film",
        "Film",
        "7",
        "1999",
        "-",
        "/",
        "//",
        "(",
        ")",
        "}",
        "_",
        "'",
        '"',
        "\xe9",
        "e\u0301",
        "\u6f22\u5b57",
    ),
    *("\U0001f600", "<|im_start|>", "<|im_end|>", "<|im", "end|>", "MATCH", "RETURN", "it's", "I'LL"),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=25
)


def ids_of(encoder: CachedTokenizer, strings: Sequence[str]) -> list[list[int]]:
    return [list(memoryview(encoded).cast("i")) for encoded in encoder.encode(strings)]


@pytest.mark.parametrize("name", SAFE)
@settings(max_examples=80)
@given(strings=st.lists(texts, max_size=4))
def test_cached_tokens_equal_uncached_tokens(name: str, strings: list[str]) -> None:
    assert can_split_safely(SAFE[name])
    encoder = CachedTokenizer(SAFE[name])
    expected = [encoding.ids for encoding in SAFE[name].encode_batch(strings, add_special_tokens=False)]
    assert ids_of(encoder, strings) == expected
    assert ids_of(encoder, strings) == expected, "and once more, from memory"


@given(texts)
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(module._PIECE.findall(text)) == text


def test_words_and_lines_are_pieces_and_indentation_is_not() -> None:
    found = module._PIECE.findall("How many films?\n(:Film {title})\n  - url  x\n/etc")
    assert found == ["How", " many", " films?\n", "(:Film", " {title})\n  -", " url  x\n/etc"]


def unsafe(change: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = make_tokenizer(pre_tokenizer("qwen"))
    change(tokenizer)
    return tokenizer


def with_splitter(splitter: pre_tokenizers.PreTokenizer) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(tokenizer, "pre_tokenizer", splitter)


UNSAFE: dict[str, Callable[[Tokenizer], None]] = {
    "a prefix space": with_splitter(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": with_splitter(pre_tokenizers.Metaspace()),
    "an unknown splitter": with_splitter(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\S+ \S+|\s+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "a known splitter that merges": with_splitter(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITTERS["qwen"]), "merged_with_previous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "no splitter": lambda tokenizer: setattr(tokenizer, "pre_tokenizer", None),
    "a normalizer": lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Strip()),
    "a token that eats spaces": lambda tokenizer: _add(tokenizer, AddedToken("<|x|>", lstrip=True)),
    "a token with a space": lambda tokenizer: _add(tokenizer, AddedToken("two words")),
    "a token that is a word": lambda tokenizer: _add(tokenizer, AddedToken("word", single_word=True)),
    "dropout": lambda tokenizer: setattr(tokenizer.model, "dropout", 0.1),
}


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    tokenizer.add_tokens([token])


@pytest.mark.parametrize("name", UNSAFE)
def test_unknown_tokenizers_are_not_split(name: str) -> None:
    tokenizer = unsafe(UNSAFE[name])
    assert not can_split_safely(tokenizer)
    if name != "dropout":
        strings = ["two words <|x|> word", " a b\nc"]
        expected = [encoding.ids for encoding in tokenizer.encode_batch(strings, add_special_tokens=False)]
        assert ids_of(CachedTokenizer(tokenizer), strings) == expected


def test_cache_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PIECES", 10)
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 100)
    encoder = CachedTokenizer(SAFE["qwen"])
    for start in range(0, 400, 20):
        strings = [f"word{number} film{number}" for number in range(start, start + 20)] + ["a" * 200]
        expected = [encoding.ids for encoding in SAFE["qwen"].encode_batch(strings, add_special_tokens=False)]
        assert ids_of(encoder, strings) == expected
        assert len(encoder._cache) <= 41


@pytest.mark.parametrize("name", SAFE)
@settings(max_examples=150)
@given(left=texts, right=texts)
def test_safe_borders_change_no_token(name: str, left: str, right: str) -> None:
    encoder = CachedTokenizer(SAFE[name])
    if encoder.has_safe_boundaries((Segment(left, False), Segment(right, True))):
        both, apart = ids_of(encoder, [left + right]), ids_of(encoder, [left, right])
        assert both == [[*apart[0], *apart[1]]]


@pytest.mark.parametrize(("left", "right", "is_safe"), [("x\n", "y", True), ("x\n", "\ny", False), ("x", "y", False)])
def test_borders_between_lines_are_safe(left: str, right: str, is_safe: bool) -> None:
    for tokenizer in SAFE.values():
        assert CachedTokenizer(tokenizer).has_safe_boundaries((Segment(left, False), Segment(right, True))) == is_safe
