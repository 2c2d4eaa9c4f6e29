"""Select the trained parameters: LoRA, DoRA or IA³ through PEFT, or all weights. The rest is frozen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from launcher.core.choices import ALL_LINEAR
from launcher.core.errors import InputError, Problem
from launcher.plan.model import Plan
from launcher.training.model.base_model import DTYPES
from launcher.training.model.new_tokens import separate_new_rows
from launcher.training.model.pissa import share_pissa


def add_adapter(base: PreTrainedModel, plan: Plan, new_token_ids: Sequence[int] = ()) -> PreTrainedModel | PeftModel:
    """Add the planned adapter to the decoder and freeze the base; full fine-tuning trains decoder and head instead."""
    base.requires_grad_(False)
    if plan.adapter.kind == "full":
        head: Any = base.get_output_embeddings()
        for part in (_get_decoder(base)[1], head):  # not a vision tower
            part.requires_grad_(True)
        return base
    _check_saved_modules(base, plan)
    config = _make_config(plan, *_select_targets(base, plan), new_token_ids)
    model = get_peft_model(base, config)
    if plan.adapter.init_lora_weights is not None:
        share_pissa(model)
    _set_trainable_dtype(model, plan)
    separate_new_rows(model)
    if plan.adapter.modules_to_save:
        cast_embeddings(base, DTYPES[plan.precision.base_dtype])
    return model


def _check_saved_modules(base: PreTrainedModel, plan: Plan) -> None:
    """Raise InputError if the base lacks a module of `modules_to_save`."""
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    missing = [name for name in plan.adapter.modules_to_save if name not in names]
    if missing:
        raise InputError(f"modules_to_save: {plan.base.name} has no {', '.join(missing)}")


def cast_embeddings(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the outputs of embeddings that are trained in FP32 to `dtype`, in which the decoder layers compute."""
    embeddings: Any = base.get_input_embeddings()
    if embeddings.weight.dtype != dtype:
        embeddings.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))


def _get_decoder(base: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the path and the module of the language model's decoder."""
    decoder: Any = base.get_decoder()
    return next((name, module) for name, module in base.named_modules() if module is decoder)


Targets = list[str] | str  # names, or a regular expression for whole paths, as PEFT understands them


def _select_targets(base: PreTrainedModel, plan: Plan) -> tuple[Targets, Targets]:
    """Return PEFT's target_modules and feedforward_modules; raise InputError if the decoder does not have them all.

    Names are checked, because PEFT ignores those without a match as long as one matches. Where other parts of the model
    have the same names, as a vision tower does, a regular expression limits them to the decoder.
    """
    prefix, decoder = _get_decoder(base)
    known = {name.rpartition(".")[2] for name in _list_linears(decoder)}
    adapter = plan.adapter
    targets = known if adapter.target_modules == (ALL_LINEAR,) else {*adapter.target_modules}
    targets = targets | {*adapter.feedforward_modules}
    missing = sorted(targets - known)
    if missing:
        raise InputError(
            f"{plan.base.name} does not have all target modules",
            tuple(
                Problem(where="target_modules", what=f"{name} is not a linear layer of {plan.base.name}")
                for name in missing
            ),
            f"it has: {', '.join(sorted(known))}",
        )
    feedforward = sorted(adapter.feedforward_modules)
    counted = [sum(name.rpartition(".")[2] in targets for name in _list_linears(part)) for part in (base, decoder)]
    if counted[0] == counted[1]:
        return sorted(targets), feedforward
    return _make_pattern(prefix, sorted(targets)), _make_pattern(prefix, feedforward) if feedforward else []


def _make_pattern(prefix: str, names: list[str]) -> str:
    return rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(map(re.escape, names))})"


def _list_linears(module: nn.Module) -> list[str]:
    """Return the paths of all linear layers; bitsandbytes' classes derive from nn.Linear."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def _make_config(
    plan: Plan, targets: Targets, feedforward: Targets, new_token_ids: Sequence[int]
) -> LoraConfig | IA3Config:
    adapter = plan.adapter
    if adapter.kind == "ia3":
        return IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=feedforward)
    assert adapter.rank is not None
    assert adapter.alpha is not None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.use_rslora,
        init_lora_weights=adapter.init_lora_weights or True,  # type: ignore[arg-type]
        target_modules=targets,
        target_parameters=sorted(adapter.target_parameters) or None,
        modules_to_save=list(adapter.modules_to_save) or None,
        ensure_weight_tying=bool(adapter.modules_to_save) and plan.base.tied_embeddings,
        trainable_token_indices=_list_token_rows(plan, new_token_ids),
        use_dora=adapter.kind == "dora",
    )


def _list_token_rows(plan: Plan, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return PEFT's trainable_token_indices, without modules of modules_to_save; None if no module has trained rows."""
    saved = plan.adapter.modules_to_save
    if not ids or (saved and plan.base.tied_embeddings):
        return None
    names = plan.base.embedding_names[: 1 if plan.base.tied_embeddings else 2]
    return {name: list(ids) for name in names if name not in saved} or None


def _set_trainable_dtype(model: nn.Module, plan: Plan) -> None:
    """Cast the trained parameters to the planned dtype; with ZeRO-3, which does not cast them, to the compute dtype."""
    precision = plan.precision
    dtype = DTYPES[precision.compute_dtype if plan.strategy == "zero3" else precision.trainable_dtype]
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
