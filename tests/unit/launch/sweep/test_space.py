"""Search spaces from --param flags."""

from __future__ import annotations

import pytest

from launcher.core.errors import InputError
from launcher.launch.sweep.space import Param, list_grid, parse_params
from tests.conftest import ROOT

MANIFEST = ROOT / "experts/json/manifest.json"
CONFIG = "training.config."


def parse(text: str, *overrides: str) -> Param:
    (param,) = parse_params([text], MANIFEST, overrides)
    return param


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "learning_rate=1e-5..1e-3:log",
            Param(key=f"{CONFIG}learning_rate", low=1e-5, high=1e-3, is_log=True),
        ),
        ("learning_rate=1e-4..1", Param(key=f"{CONFIG}learning_rate", low=1e-4, high=1.0)),
        ("rank=8,16,32", Param(key=f"{CONFIG}rank", choices=("8", "16", "32"))),
        (f"{CONFIG}rank=8..64:log", Param(key=f"{CONFIG}rank", low=8, high=64, is_log=True, is_integer=True)),
        ("packing=true,false", Param(key=f"{CONFIG}packing", choices=("true", "false"))),
        ("adapter_type=lora, dora", Param(key=f"{CONFIG}adapter_type", choices=('"lora"', '"dora"'))),
        (
            'target_modules="all-linear",["q_proj","v_proj"]',
            Param(key=f"{CONFIG}target_modules", choices=('"all-linear"', '["q_proj", "v_proj"]')),
        ),
        ("evaluation.task_rows=100..200", Param(key="evaluation.task_rows", low=100, high=200, is_integer=True)),
    ],
)
def test_ranges_and_lists_are_parsed(text: str, expected: Param) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank", "not NAME=VALUES"),
        ("=8", "not NAME=VALUES"),
        ("rank=", "not NAME=VALUES"),
        ("rank=8", "only one value"),
        ("rank=8-64", "write a range with two dots: --param rank=8..64"),
        ("learning_rate=1e-5:1e-3", "write a range with two dots: --param learning_rate=1e-5..1e-3"),
        ("rank=8,8", "a value is given twice"),
        ("rank=8..8", "both ends are equal"),
        ("rank=16..8", "the first end is larger than the last"),
        ("rank=8.5..16", "this key needs whole numbers"),
        ("rank=8..16:lin", "unknown scale 'lin'"),
        ("rank=8..16:", "unknown scale ''"),
        ("rank=8..x", "the ends of a range must be numbers"),
        ("learning_rate=nan..1", "the ends of a range must be finite numbers"),
        ("learning_rate=-1..1:log", "a logarithmic range must begin above 0"),
        ("learning_rate=0..1:log", "a logarithmic range must begin above 0"),
        ("learning_rate=-1..1", "-1.0: must be"),
        ("dropout=0..2", "2.0: must be less than 1"),
        ("packing=True,False", "must be true or false"),
        ("packing=0..1", "this key is not numeric"),
        ("use_unsloth=true,false", "training does not use this key"),
        ("lr=1..2", "unknown key\nhint: did you mean learning_rate?"),
        ("training.config.rnk=8,16", "unknown key\nhint: did you mean rank?"),
        ("zzz=1,2", "unknown key\nhint: `launcher schema` lists the keys"),
    ],
)
def test_wrong_parameters_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(text)
    assert message in str(raised.value)


def test_a_parameter_is_given_once() -> None:
    with pytest.raises(InputError, match="rank: given twice"):
        parse_params(["rank=8,16", "training.config.rank=4,8"], MANIFEST, [])
    with pytest.raises(InputError, match=r"training\.config\.rank is searched by --param, but fixed by --set"):
        parse("rank=8,16", "training.config.rank=4")
    with pytest.raises(InputError, match="--param is missing"):
        parse_params([], MANIFEST, [])


def test_the_grid_has_every_combination_once_if_it_is_small_enough() -> None:
    params = parse_params(["rank=8,16", "packing=true,false"], MANIFEST, [])
    grid = list_grid(params, 4)
    assert grid is not None
    assert [tuple(values.values()) for values in grid] == [
        ("8", "true"),
        ("8", "false"),
        ("16", "true"),
        ("16", "false"),
    ]
    assert list_grid(params, 3) is None
    assert list_grid([*params, parse("dropout=0..0.1")], 100) is None
