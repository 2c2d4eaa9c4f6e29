"""Optimizers and learning-rate schedules: the library's own, with the numbers of the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from launcher.core import metrics
from launcher.corpus.store import Store
from launcher.manifest.config import SchedulerName
from launcher.plan.model import Plan
from launcher.training.engine.optimizer import build_optimizer, build_scheduler, count_warmup_steps, list_embeddings
from launcher.training.engine.run import count_steps
from tests.training.builders import adapt, build, train_recorded, vary

STEPS, WARMUP = 20, 4
BOTH: dict[str, Any] = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS}
EXPECTED: dict[str, tuple[dict[str, float], Callable[[Optimizer], LRScheduler]]] = {
    "linear": ({}, partial(get_linear_schedule_with_warmup, **BOTH)),
    "cosine": ({}, partial(get_cosine_schedule_with_warmup, **BOTH)),
    "cosine, periods": ({"num_cycles": 1.5}, partial(get_cosine_schedule_with_warmup, **BOTH, num_cycles=1.5)),
    "cosine_with_restarts": ({}, partial(get_cosine_with_hard_restarts_schedule_with_warmup, **BOTH)),
    "cosine_with_restarts, three": (
        {"num_cycles": 3.0},
        partial(get_cosine_with_hard_restarts_schedule_with_warmup, **BOTH, num_cycles=3),
    ),
    "polynomial": ({}, partial(get_polynomial_decay_schedule_with_warmup, **BOTH)),
    "polynomial, given": (
        {"power": 2.0, "lr_end": 1e-4},
        partial(get_polynomial_decay_schedule_with_warmup, **BOTH, power=2.0, lr_end=1e-4),
    ),
    "constant": ({}, get_constant_schedule),
    "constant_with_warmup": ({}, partial(get_constant_schedule_with_warmup, num_warmup_steps=WARMUP)),
}


def rates(schedule: LRScheduler, optimizer: Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


def make_sgd() -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=5e-3)


def test_every_name_of_the_manifest_is_here() -> None:
    assert {name.partition(",")[0] for name in EXPECTED} == set(get_args(SchedulerName))


@pytest.mark.parametrize("case", EXPECTED)
def test_schedules(plan: Plan, case: str) -> None:
    options, expected = EXPECTED[case]
    changes = {"lr_scheduler": case.partition(",")[0], "scheduler_kwargs": options, "warmup_steps": WARMUP}
    varied = vary(plan, {f"schedule.{key}": value for key, value in {**changes, "warmup_ratio": None}.items()})
    ours, theirs = make_sgd(), make_sgd()
    found = rates(build_scheduler(varied.schedule, ours, STEPS), ours)
    assert found == pytest.approx(rates(expected(theirs), theirs), rel=1e-12, abs=0.0)
    assert max(found) == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("ratio", "steps", "num_steps", "warmup"),
    [
        (None, 7, 100, 7),
        (None, None, 100, 0),
        (0.0, 7, 100, 0),  # a ratio wins over a number, as in the published manifests
        (0.1, 0, 100, 10),
        (0.1, None, 101, 11),  # rounded up
        (0.03, None, 100, 3),  # 0.03 * 100 is 3.0000000000000004 nowhere but in binary
        (0.2, None, 6, 2),
        (1.0, None, 6, 6),
    ],
)
def test_warmup(plan: Plan, ratio: float | None, steps: int | None, num_steps: int, warmup: int) -> None:
    varied = vary(plan, {"schedule.warmup_ratio": ratio, "schedule.warmup_steps": steps})
    assert count_warmup_steps(varied.schedule, num_steps) == warmup


def test_warmup_is_a_share_of_the_real_number_of_steps(plan: Plan, store: Store, tmp_path: Path) -> None:
    """The plan counts 6 steps here: ten packs make three steps an epoch. What it estimated before does not matter."""
    varied = vary(plan, {"schedule.warmup_ratio": 0.5, "schedule.warmup_steps": 999, "schedule.num_steps": 1998})
    run = build(varied, store, tmp_path)
    assert run.num_steps == 6
    found = train_recorded(run).values(metrics.LEARNING_RATE)
    assert found[:4] == pytest.approx([0.0, 5e-3 / 3, 2 * 5e-3 / 3, 5e-3])
    assert 0 < found[5] < found[4] < found[3]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "per_epoch", "steps"),
    [
        (2.0, None, 3, 6),
        (2.5, None, 3, 8),  # rounded up
        (0.1, None, 3, 1),
        (0.001, None, 3, 1),  # at least one
        (1.1, None, 10, 11),  # 1.1 * 10 is a little more than 11 in binary
        (3.0, 5, 3, 5),  # steps win
        (1.0, 50, 3, 50),  # and may go over more epochs
    ],
)
def test_length(plan: Plan, epochs: float, max_steps: int | None, per_epoch: int, steps: int) -> None:
    varied = vary(plan, {"schedule.epochs": epochs, "schedule.max_steps": max_steps})
    assert count_steps(varied.schedule, per_epoch) == steps


def test_steps_beyond_the_epochs_go_on_with_the_next(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, {"schedule.max_steps": 8}), store, tmp_path)
    recorder = train_recorded(run)
    assert [step.step for step in recorder.steps] == list(range(1, 9))
    assert [step.epoch for step in recorder.steps] == pytest.approx([step / 3 for step in range(1, 9)])


@pytest.mark.parametrize(
    ("name", "kind", "fused"),
    [
        ("adamw_torch", torch.optim.AdamW, False),
        ("adamw_torch_fused", torch.optim.AdamW, True),
        ("sgd", torch.optim.SGD, True),
    ],
)
def test_optimizers(plan: Plan, name: str, kind: type[Optimizer], fused: bool | None) -> None:
    changes: dict[str, Any] = {"betas": (0.8, 0.95), "epsilon": 1e-6, "weight_decay": 0.3, "learning_rate": 0.02}
    varied = vary(plan, {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in changes.items()}})
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3), requires_grad=False)})
    optimizer = build_optimizer(varied.optimizer, model)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert [parameter.numel() for parameter in group["params"]] == [2], "frozen ones are left out"
    assert (group["lr"], group["weight_decay"], group.get("fused")) == (0.02, 0.3, fused)
    if kind is torch.optim.AdamW:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)


def test_norms_and_biases_do_not_decay(plan: Plan) -> None:
    """As transformers' trainer does it, which the published manifests were made for."""
    names = ("layers.0.q_proj.weight", "layers.0.q_proj.bias", "layers.0.input_layernorm.weight", "q_norm.weight")
    model = nn.Module()
    for index, name in enumerate((*names, "norm.weight", "normaliser_of.lora_A.weight")):
        _set(model, name, nn.Parameter(torch.full((index + 1,), 1.0)))
    varied = vary(plan, {"optimizer.weight_decay": 0.3})
    decaying, others = build_optimizer(varied.optimizer, model).param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {p.numel() for p in others["params"]} == {2, 3, 4, 5}
    assert 1 in {p.numel() for p in decaying["params"]}


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    model.register_parameter(last, parameter)


def test_the_fused_optimizer_trains_the_same(plan: Plan, store: Store, tmp_path: Path) -> None:
    plain = train_recorded(build(plan, store, tmp_path)).losses
    fused = train_recorded(build(vary(plan, {"optimizer.name": "adamw_torch_fused"}), store, tmp_path)).losses
    assert fused == pytest.approx(plain, rel=1e-6)  # fp32, other order of operations


@pytest.mark.parametrize(("kind", "count"), [("full", 1), ("lora", 0)])
def test_trained_embeddings_are_exempt_from_8_bits(
    plan: Plan, store: Store, tmp_path: Path, kind: str, count: int
) -> None:
    """As in transformers' Trainer; the head is tied to them."""
    run = build(vary(plan, adapt(kind)), store, tmp_path)
    found = list_embeddings(run.engine.module)
    assert len(found) == count
    assert all(weight is run.engine.module.base.get_input_embeddings().weight for weight in found)
