"""Plans that no file can express are refused, with every reason at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render import render, render_accelerate, render_deepspeed

MakePlan = Callable[..., Plan]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more ranks than hardware": (
        {"strategy": "ddp", "gpus": 2, "num_ranks": 4},
        "batch.num_ranks: 4, but the hardware",
    ),
    "single on four": ({"strategy": "single", "gpus": 4}, "strategy: single is one process, the hardware starts 4"),
    "offload of ddp": ({"strategy": "ddp", "offload": "optimizer"}, "offload: optimizer needs DeepSpeed"),
    "parameters under zero2": (
        {"strategy": "zero2", "offload": "optimizer_and_parameters"},
        "offload: parameters leave the GPU under zero3 only, the strategy is zero2",
    ),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_an_impossible_plan_is_refused_with_its_reason(name: str, make_plan: MakePlan, paths: RunPaths) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(InputError) as error:
        render(make_plan(**arguments), paths)
    assert message in str(error.value)
    assert error.value.exit_code == 2


def test_all_problems_are_reported_at_once(make_plan: MakePlan, paths: RunPaths) -> None:
    with pytest.raises(InputError) as error:
        render(make_plan(strategy="single", gpus=4, num_ranks=3, offload="optimizer"), paths)
    assert len(error.value.problems) == 3


def test_a_deepspeed_file_and_its_strategy_belong_together(make_plan: MakePlan) -> None:
    with pytest.raises(InputError, match="accelerate config and DeepSpeed config do not match"):
        render_accelerate(make_plan(strategy="zero2"))
    with pytest.raises(InputError, match="accelerate config and DeepSpeed config do not match"):
        render_accelerate(make_plan(strategy="ddp"), deepspeed_config_file="ds_configs/zero2.json")
    with pytest.raises(InputError, match="no DeepSpeed config"):
        render_deepspeed(make_plan(strategy="ddp"))


@pytest.mark.process
def test_rendering_imports_neither_torch_nor_the_engines() -> None:
    code = "import sys, launcher.render; print(sorted({'torch', 'accelerate', 'deepspeed'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
