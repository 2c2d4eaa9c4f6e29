"""Parsing of `--vary`."""

from __future__ import annotations

import pytest

from launcher.bench.variants import parse_vary
from launcher.core.errors import InputError


def test_short_name_is_a_key_of_training_config() -> None:
    variation = parse_vary("torch_compile=true,false")
    assert (variation.key, variation.path) == ("torch_compile", "training.config.torch_compile")
    assert variation.values == ("true", "false")


def test_path_is_taken_like_by_set() -> None:
    variation = parse_vary("base_models.0.quantization=none, int4")
    assert (variation.path, variation.values) == ("base_models.0.quantization", ("none", "int4"))


def test_commas_inside_lists_and_quotes_do_not_split() -> None:
    variation = parse_vary('target_modules=["q_proj","v_proj"],["q_proj"]')
    assert variation.values == ('["q_proj","v_proj"]', '["q_proj"]')
    assert parse_vary('wandb.notes="a,b",c').values == ('"a,b"', "c")


def test_three_values_are_three_variants() -> None:
    assert parse_vary("batch_size=4,8,16").values == ("4", "8", "16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch_compile", "must be KEY=A,B"),
        ("=a,b", "must be KEY=A,B"),
        ("batch_size=4", "only one value"),
        ("batch_size=4,", "a value is empty"),
        ("batch_size=4,4", "4 and 4 are the same value"),
        ("attention=flex,sdpa,flex", "flex and flex are the same value"),
        ("batch_size=1,2,3,4,5,6,7", "7 values, at most 6"),
        ("torch_compil=true,false", "did you mean torch_compile?"),
        ("lora_r=8,16", "did you mean rank?"),
        ("qqqqqq=1,2", "not a key of training.config"),
    ],
)
def test_invalid_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_vary(text)
    assert message in str(caught.value)


def test_true_and_1_are_different_values() -> None:
    assert parse_vary("gradient_checkpointing=true,1").values == ("true", "1")
