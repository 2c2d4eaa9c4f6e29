"""Select the trained parameters: LoRA, DoRA or IA³ through PEFT, or all weights. The rest is frozen."""

from __future__ import annotations

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from launcher.core.choices import Dtype
from launcher.core.errors import InputError, Problem
from launcher.plan.model import AdapterPlan, Plan
from launcher.training.model.base_model import DTYPES


def add_adapter(base: PreTrainedModel, plan: Plan) -> PreTrainedModel | PeftModel:
    """Add the planned adapter to the base and freeze everything else."""
    if plan.adapter.kind == "full":
        base.requires_grad_(True)
        return base
    base.requires_grad_(False)
    _check_targets(base, plan)
    model = get_peft_model(base, _make_config(plan.adapter))
    _set_trainable_dtype(model, DTYPES[_trainable_dtype(plan)])
    return model


def _trainable_dtype(plan: Plan) -> Dtype:
    """DeepSpeed keeps FP32 master weights itself. It casts parameters itself, except under ZeRO-3."""
    return plan.precision.compute_dtype if plan.strategy == "zero3" else plan.precision.trainable_dtype


def _check_targets(base: PreTrainedModel, plan: Plan) -> None:
    """Checks every target module, because PEFT ignores names without a match as long as one matches."""
    # includes bitsandbytes' classes, which derive from nn.Linear
    linears = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    targets = {name.rpartition(".")[2]: name for name in plan.adapter.target_modules}
    missing = sorted(targets[name] for name in targets.keys() - linears)
    if missing:
        problems = tuple(
            Problem(where="target_modules", what=f"{name} is not a linear layer of {plan.base.name}")
            for name in missing
        )
        raise InputError(
            f"{plan.base.name} does not have all target modules",
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
