"""The tiny base: its shape is the catalogue's, its tokenizer is frozen, complete and lossless."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base_models.catalogue import BASES, TINY_BASE_NAME
from launcher.base_models.shapes import load_shape, make_shape
from tests.conftest import EXPERTS, ROOT

pytestmark = pytest.mark.long

TINY = ROOT / "launcher" / "base_models" / "tiny_base"
# Weights and prepared data belong to exactly these tokens. Another tokenizer is another base.
TOKENIZER_SHA256 = "97cf6fdd420779d776ee7465a8db83c8d11f27d4d7abc4bc18a9b35f14d46533"
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


@cache
def load_tokenizer() -> Any:
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer()


def test_the_tokenizer_is_frozen() -> None:
    assert hashlib.sha256((TINY / "tokenizer.json").read_bytes()).hexdigest() == TOKENIZER_SHA256
    assert (TINY / "tokenizer.json").stat().st_size < 400_000


def test_the_folder_has_the_shape_of_the_catalogue() -> None:
    from_folder = load_shape(str(TINY), [])
    from_catalogue = make_shape(BASES[TINY_BASE_NAME], TINY_BASE_NAME, "catalogue")
    assert from_folder.basis == "config"
    same = {"name": TINY_BASE_NAME, "basis": "catalogue"}
    assert from_folder.model_copy(update=same) == from_catalogue


def test_transformers_reads_the_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(TINY))
    for key, value in BASES[TINY_BASE_NAME].items():
        assert getattr(config, key) == value, key
    assert (config.eos_token_id, config.pad_token_id) == (SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"])


def test_transformers_reads_the_tokenizer(tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.AutoTokenizer.from_pretrained(str(TINY))
    assert len(wrapped) == 4096
    assert (wrapped.eos_token, wrapped.pad_token, wrapped.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert wrapped.model_max_length == 4096
    text = "Which café sells 1,024 crêpes?\n\nSELECT name FROM cafes;"
    assert wrapped(text)["input_ids"] == tokenizer.encode(text).ids
    assert wrapped.decode(wrapped(text)["input_ids"]) == text


def test_the_chat_template_is_chatml() -> None:
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.AutoTokenizer.from_pretrained(str(TINY))
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    said = "<|im_start|>user\n2 + 2?<|im_end|>\n"
    whole = wrapped.apply_chat_template(turns, tokenize=False)
    asked = wrapped.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert whole == f"{said}<|im_start|>assistant\n4<|im_end|>\n"
    assert asked == f"{said}<|im_start|>assistant\n"
    ids = wrapped(whole)["input_ids"]
    assert [ids.count(SPECIAL[marker]) for marker in ("<|im_start|>", "<|im_end|>")] == [2, 2]


def test_the_vocabulary_is_full(tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(4096))
    assert {token: vocabulary[token] for token in SPECIAL} == SPECIAL


def test_digits_are_separate_tokens(tokenizer: Any) -> None:
    assert tokenizer.encode("year 20250").tokens[1:] == ["Ġ", "2", "0", "2", "5", "0"]
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(sign.isdigit() for sign in token)]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("expert", EXPERTS)
def test_samples_survive_the_round_trip(expert: str, split: str, tokenizer: Any) -> None:
    file = ROOT / f"experts/{expert}/sample/{split}.jsonl"
    texts = [text for line in file.read_text(encoding="utf-8").splitlines() for text in json.loads(line).values()]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert tokenizer.decode_batch(encoded, skip_special_tokens=False) == texts
    assert sum(len(text.encode()) for text in texts) / sum(map(len, encoded)) > 3.0  # bytes per token


@given(text=st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_weights_are_frozen_and_the_card_names_them() -> None:
    file = TINY / "model.safetensors"
    assert file.stat().st_size < 15_000_000
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (TINY / "README.md").read_text(encoding="utf-8")


def test_transformers_loads_all_weights() -> None:
    """The head is the embedding, so it is not in the file."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, found = transformers.AutoModelForCausalLM.from_pretrained(str(TINY), **options)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
