"""What is trained on a base: LoRA, DoRA, IA³ through PEFT, or all of it. Everything else is frozen."""

from __future__ import annotations

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from launcher.choices import Dtype
from launcher.errors import InputError, Problem
from launcher.plan.model import AdapterPlan, Plan
from launcher.training.loading import DTYPES


def add_adapter(base: PreTrainedModel, plan: Plan) -> PreTrainedModel | PeftModel:
    if plan.adapter.kind == "full":
        base.requires_grad_(True)
        return base
    base.requires_grad_(False)
    _check_targets(base, plan)
    model = get_peft_model(base, _make_config(plan.adapter))
    _set_trainable_dtype(model, DTYPES[_trainable_dtype(plan)])
    return model


def _trainable_dtype(plan: Plan) -> Dtype:
    """DeepSpeed keeps FP32 weights beside those it computes with. It casts what it is given, but not under ZeRO-3."""
    return plan.precision.compute_dtype if plan.strategy == "zero3" else plan.precision.trainable_dtype


def _check_targets(base: PreTrainedModel, plan: Plan) -> None:
    """PEFT passes over names that match nothing, as long as one does."""
    # torch's own, and bitsandbytes', which derive from it
    linears = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    wanted = {name.rpartition(".")[2]: name for name in plan.adapter.target_modules}
    missing = sorted(wanted[name] for name in wanted.keys() - linears)
    if missing:
        problems = tuple(
            Problem(where="target_modules", what=f"{name} is no linear layer of {plan.base.name}") for name in missing
        )
        raise InputError(
            f"{plan.base.name} does not have all modules that shall be adapted",
            problems,
            f"it has: {', '.join(sorted(linears - {'lm_head'}))}",
        )


def _make_config(plan: AdapterPlan) -> LoraConfig | IA3Config:
    if plan.kind == "ia3":
        return IA3Config(
            task_type="CAUSAL_LM",
            target_modules=sorted({*plan.target_modules, *plan.feedforward_modules}),
            feedforward_modules=sorted(plan.feedforward_modules),
        )
    assert plan.rank is not None
    assert plan.alpha is not None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=plan.rank,
        lora_alpha=plan.alpha,
        lora_dropout=plan.dropout,
        target_modules=sorted(plan.target_modules),
        use_dora=plan.kind == "dora",
    )


def _set_trainable_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
