"""Optimizer and learning-rate schedule, by the names that manifests use."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from launcher.plan.model import OptimizerPlan, SchedulePlan

_NORM = re.compile(r"norm(\.|$)|(^|\.)ln_")


def build_optimizer(plan: OptimizerPlan, model: nn.Module) -> Optimizer:
    """Only what is trained: frozen weights have no state."""
    groups = _make_groups(model, plan.weight_decay)
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=plan.learning_rate, fused=True)
    if plan.name == "adamw_bnb_8bit":
        from launcher.training.eight_bits import AdamW8bit

        optimizer: Optimizer = AdamW8bit(groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.epsilon)
        return optimizer
    return torch.optim.AdamW(
        groups,
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.epsilon,
        fused=plan.name == "adamw_torch_fused",
    )


def _make_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Norms and biases do not decay, as under the trainer of the published manifests."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = weight_decay and (name.endswith("bias") or _NORM.search(name.lower()) is not None)
            (others if is_spared else decaying).append(parameter)
    groups = ((decaying, weight_decay), (others, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def build_schedule(plan: SchedulePlan, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Over the real number of steps: the plan had to estimate it before the data was packed."""
    return get_scheduler(
        plan.lr_scheduler,
        optimizer,
        num_warmup_steps=count_warmup_steps(plan, num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=_scheduler_options(plan),
    )


def count_warmup_steps(plan: SchedulePlan, num_steps: int) -> int:
    if plan.warmup_ratio is not None:
        return ceil(plan.warmup_ratio * num_steps - 1e-9)
    return plan.warmup_steps or 0


def _scheduler_options(plan: SchedulePlan) -> dict[str, float | int]:
    """transformers wants whole cycles for restarts."""
    is_whole = plan.lr_scheduler == "cosine_with_restarts"
    return {
        key: int(value) if key == "num_cycles" and is_whole else value for key, value in plan.scheduler_kwargs.items()
    }


def innermost(optimizer: object) -> Optimizer:
    """Under what accelerate and DeepSpeed wrap around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer
