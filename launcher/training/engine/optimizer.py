"""Optimizer and learning-rate schedule, by the names used in manifests."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from launcher.core.choices import EIGHT_BIT_OPTIMIZERS, Dtype
from launcher.plan.model import OptimizerPlan, SchedulePlan
from launcher.training.engine.chunked_adamw import ChunkedAdamW

_NORM = re.compile(r"norm(\.|$)|(^|\.)ln_")


def build_optimizer(plan: OptimizerPlan, model: nn.Module, trainable_dtype: Dtype = "fp32", seed: int = 0) -> Optimizer:
    """Return the planned optimizer over the trained parameters. `seed` is that of stochastic rounding."""
    groups = _make_groups(model, plan)
    if needs_chunked_adamw(plan, trainable_dtype):
        return ChunkedAdamW(
            groups,
            lr=plan.learning_rate,
            betas=plan.betas,
            eps=plan.epsilon,
            seed=seed,
            bits=8 if plan.name in EIGHT_BIT_OPTIMIZERS else 32,
            on_host=plan.name == "paged_adamw_8bit",
            full_precision=list_embeddings(model),
        )
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=plan.learning_rate, fused=True)
    if plan.name == "adamw_bnb_8bit":
        from launcher.training.engine.adamw_8bit import AdamW8bit

        optimizer: Any = AdamW8bit(groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.epsilon)
        optimizer.full_precision = list_embeddings(model)
        eight: Optimizer = optimizer
        return eight
    return torch.optim.AdamW(
        groups,
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.epsilon,
        fused=plan.name == "adamw_torch_fused",
    )


def needs_chunked_adamw(plan: OptimizerPlan, trainable_dtype: Dtype) -> bool:
    """Whether ChunkedAdamW is needed: for BF16 weights, moments in CPU memory, or updates within the backward pass."""
    return trainable_dtype == "bf16" or plan.in_backward or plan.name == "paged_adamw_8bit"


def list_embeddings(model: nn.Module) -> list[nn.Parameter]:
    """List the trained embeddings, whose 8-bit states would be unstable: transformers' Trainer exempts them, too."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [weight for module in embeddings for weight in module.parameters() if weight.requires_grad]


def _make_groups(model: nn.Module, plan: OptimizerPlan) -> list[dict[str, Any]]:
    """Return parameter groups without weight decay for norms and biases, as in transformers' Trainer.

    With LoRA+, B and vectors such as DoRA's magnitudes have their own learning rate, as in PEFT. The first group has
    the learning rate that is logged.
    """
    ratio = plan.loraplus_lr_ratio or 1.0
    groups: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, plan.weight_decay): [], (1.0, 0.0): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_excluded = name.endswith("bias") or _NORM.search(name.lower()) is not None
            factor = ratio if "lora_B" in name or parameter.ndim == 1 else 1.0
            groups.setdefault((factor, 0.0 if is_excluded else plan.weight_decay), []).append(parameter)
    return [
        {"params": parameters, "lr": factor * plan.learning_rate, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
        if parameters
    ]


def build_scheduler(plan: SchedulePlan, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Return the LR schedule over the real number of steps, which the plan could only estimate."""
    return get_scheduler(
        plan.lr_scheduler,
        optimizer,
        num_warmup_steps=count_warmup_steps(plan, num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=_scheduler_options(plan),
    )


def count_warmup_steps(plan: SchedulePlan, num_steps: int) -> int:
    """Return the number of warm-up steps."""
    if plan.warmup_ratio is not None:
        return ceil(plan.warmup_ratio * num_steps - 1e-9)
    return plan.warmup_steps or 0


def _scheduler_options(plan: SchedulePlan) -> dict[str, float | int]:
    """Return the arguments of the LR schedule; for cosine_with_restarts, transformers needs an integer `num_cycles`."""
    is_integer = plan.lr_scheduler == "cosine_with_restarts"
    return {
        key: int(value) if key == "num_cycles" and is_integer else value for key, value in plan.scheduler_kwargs.items()
    }


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer
