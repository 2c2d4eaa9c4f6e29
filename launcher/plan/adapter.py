"""The adapter, its dropout, and the quantization of the frozen base."""

from __future__ import annotations

from itertools import filterfalse

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import ALL_LINEAR
from launcher.core.errors import MAX_PROBLEMS, InputError, ManifestError, Problem
from launcher.core.units import format_count, format_percent
from launcher.manifest.suggest import find_closest
from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.estimate.memory.recipe import count_new_rows, count_saved, count_trainable, select_stacks
from launcher.plan.model import AdapterPlan, Decision, QuantizationPlan

# What the trainer of the published manifests used by default.
DEFAULT_DROPOUT = 0.05


def decide_adapter(context: PlanContext) -> tuple[AdapterPlan, list[Decision]]:
    """Return the adapter, and the decisions about it."""
    config, base = context.config, context.base
    kind = config.adapter_type
    _check_experts(context)
    _check_targets(context)
    _check_saved_modules(context)
    targets = _list_targets(context)
    trainable = count_trainable(
        base,
        kind,
        config.rank,
        targets,
        feedforward_modules=config.feedforward_modules,
        target_parameters=config.target_parameters,
        modules_to_save=config.modules_to_save,
    )
    trainable += 0 if kind == "full" else count_new_rows(base, config.modules_to_save, len(config.new_tokens))
    dropout, dropout_decision = _decide_dropout(context)
    plan = AdapterPlan(
        kind=kind,
        rank=config.rank,
        alpha=config.alpha,
        use_rslora=config.use_rslora,
        init_lora_weights=config.init_lora_weights,
        dropout=dropout,
        target_modules=targets,
        target_parameters=config.target_parameters,
        modules_to_save=config.modules_to_save,
        feedforward_modules=config.feedforward_modules,
        trainable_parameters=trainable,
    )
    share = format_percent(trainable / base.num_parameters)
    size = ""
    if config.rank and config.alpha:
        scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
        root = "rsLoRA " if config.use_rslora else ""
        size = f"rank {config.rank}, alpha {config.alpha} ({root}scale {scale:.3g}), "
    value = f"{kind}, {size}{format_count(trainable)} trainable parameters ({share})"
    reason = "training.config" + _describe_differences(context)
    return plan, [
        manifest_decision("adapter", value, reason),
        *_explain_pissa(context),
        *_explain_saved_modules(context),
        *_explain_new_tokens(context),
        *dropout_decision,
        *_explain_experts(context),
    ]


def _explain_pissa(context: PlanContext) -> list[Decision]:
    kind = context.config.init_lora_weights
    if kind is None:
        return []
    if context.entry.quantization == "int4" and not context.is_smoke:
        raise ManifestError(
            f"training.config.init_lora_weights: {kind} subtracts principal components from the base's weights, "
            "which is not possible in 4 bits",
            hint="use quantization none, or remove init_lora_weights",
        )
    count = context.base.num_layers * len(set(_list_targets(context)))
    how = "complete SVD" if kind == "pissa" else "randomized SVD"
    reason = f"init_lora_weights in the manifest; {how} of about {count} matrices before the first step"
    if kind == "pissa":
        reason += ", where pissa_niter_16 is much faster"
    value = f"{kind}; saved as LoRA of rank {2 * (context.config.rank or 0)}, which loads on the unchanged base"
    return [manifest_decision("LoRA initialization", value, reason)]


def _check_saved_modules(context: PlanContext) -> None:
    """Refuse modules_to_save other than embeddings and LM head: fused layers need frozen norms and linear layers."""
    base = context.base
    unknown = [name for name in context.config.modules_to_save if name not in base.embedding_names]
    if unknown:
        raise ManifestError(
            f"training.config.modules_to_save: {', '.join(unknown)} cannot be trained completely with an adapter",
            hint=f"only embeddings and LM head can: {', '.join(base.embedding_names)} of {base.name}; target_modules "
            "adapts linear layers, adapter_type full trains all weights",
        )


def _explain_new_tokens(context: PlanContext) -> list[Decision]:
    base, config = context.base, context.config
    if not config.new_tokens:
        return []
    if config.adapter_type != "full" and base.has_head_bias:
        raise ManifestError(
            f"training.config.new_tokens: the LM head of {base.name} has a bias, which PEFT drops for trained tokens",
            hint="use adapter_type full, or another base",
        )
    rows = count_new_rows(base, config.modules_to_save, len(config.new_tokens))
    trained = f"{format_count(rows)} parameters of their own" if rows else "trained with all embeddings"
    value = f"{len(config.new_tokens)}, {trained if config.adapter_type != 'full' else 'trained with all weights'}"
    reason = "new_tokens in the manifest; each starts as the mean of all embeddings, whatever the seed"
    return [manifest_decision("new tokens", value, reason)]


def _explain_saved_modules(context: PlanContext) -> list[Decision]:
    base, names = context.base, context.config.modules_to_save
    if not names:
        return []
    count = sum(count_saved(base, names))
    reason = "modules_to_save in the manifest; each keeps its frozen original and a trained copy, as in PEFT"
    if base.tied_embeddings:
        names = base.embedding_names
        reason += "; tied in this base, so one trained weight serves both (PEFT's ensure_weight_tying)"
    return [manifest_decision("trained modules", f"{', '.join(names)}: {format_count(count)} parameters", reason)]


def _explain_experts(context: PlanContext) -> list[Decision]:
    experts, base = context.base.experts, context.base
    if experts is None:
        return []
    value = (
        f"{experts.num_experts} per layer, {experts.num_active} per token: {format_count(base.active_parameters)} of "
        f"{format_count(base.num_parameters)} parameters are active"
    )
    adapted = "with LoRA" if context.config.target_parameters else "frozen"
    reason = (
        f"experts {adapted}, routers frozen; no auxiliary loss of the router, as in transformers and PEFT "
        "(output_router_logits is false by default)"
    )
    return [plan_decision("experts", value, reason)]


def _list_targets(context: PlanContext) -> tuple[str, ...]:
    """Return the target modules; "all-linear" is kept for training to resolve if the base's layer names are unknown."""
    targets, base = context.config.target_modules, context.base
    if targets != ALL_LINEAR:
        return tuple(dict.fromkeys(targets))
    return (ALL_LINEAR,) if base.basis == "approximate" else tuple(dict.fromkeys(base.linear_names))


def _check_experts(context: PlanContext) -> None:
    """Refuse settings that a mixture of experts does not support, and target_parameters that the base does not have."""
    config, base = context.config, context.base
    stacks = () if base.experts is None else tuple(base.experts.stacks)
    if stacks and config.adapter_type == "full":
        raise ManifestError(
            f"adapter_type full: {base.name} is a mixture of experts, and its routers would be trained without the "
            "auxiliary loss that keeps experts in use",
            hint="use lora; target_parameters adapts the experts",
        )
    if stacks and context.entry.quantization == "int4":
        raise ManifestError(
            f"base_models[0].quantization int4: {base.name} is a mixture of experts, and "
            f"bitsandbytes quantizes linear layers only, not the stacked experts ({_get_expert_share(base)} of its "
            "parameters)",
            hint="use quantization none: --set base_models.0.quantization=none",
        )
    missing = [name for name in config.target_parameters if not select_stacks(base, (name,))]
    if missing:
        raise ManifestError(
            f"training.config.target_parameters: {base.name} has no {', '.join(missing)}",
            hint=f"its experts: {', '.join(stacks)}" if stacks else "it is not a mixture of experts: remove the key",
        )


def _get_expert_share(base: ModelShape) -> str:
    assert base.experts is not None
    return format_percent(base.num_layers * base.experts.num_parameters / base.num_parameters)


def _check_targets(context: PlanContext) -> None:
    config, base = context.config, context.base
    known = list(dict.fromkeys(base.indexed_names or base.linear_names))
    problems: list[Problem] = []
    if base.basis == "approximate" and not base.indexed_names:  # training checks the names
        return
    targets = () if config.target_modules == ALL_LINEAR else config.target_modules
    for key, names in (("target_modules", targets), ("feedforward_modules", config.feedforward_modules)):
        for name in filterfalse(frozenset(known).__contains__, names):
            similar = find_closest(name, known) if len(problems) < MAX_PROBLEMS else None
            what = f"{base.name} has no {name}" + (f"; did you mean {similar}?" if similar else "")
            problems.append(Problem(where=f"training.config.{key}", what=what))
    if problems:
        raise ManifestError(
            f"the base model {base.name} does not have all target modules",
            tuple(problems),
            hint=f'its linear layers: {", ".join(known)}; "{ALL_LINEAR}" selects all of them'
            + ("" if base.experts is None else f"; its experts by target_parameters: {', '.join(base.experts.stacks)}"),
        )


def _decide_dropout(context: PlanContext) -> tuple[float, list[Decision]]:
    config = context.config
    if config.adapter_type in ("full", "ia3"):
        if config.dropout:
            raise ManifestError(
                f"training.config.dropout: not supported by adapter_type {config.adapter_type}",
                hint="remove it, or use lora or dora",
            )
        return 0.0, []
    published = next((a.dropout for a in context.entry.adapters if a.dropout is not None), None)
    if config.target_parameters:
        return 0.0, [plan_decision("adapter dropout", "0", "PEFT has no dropout for stacked experts")]
    if config.dropout is not None:
        value, decide, reason = config.dropout, manifest_decision, "training.config.dropout"
    elif published is not None:
        value, decide, reason = published, manifest_decision, "base_models[0].adapters, not in training.config"
    else:
        value, decide, reason = DEFAULT_DROPOUT, plan_decision, "default of the manifest format"
    if value and config.adapter_type == "dora":
        reason += "; with dropout, DoRA needs a second matmul per adapted matrix"
    return value, [decide("adapter dropout", f"{value:g}", reason)]


def _describe_differences(context: PlanContext) -> str:
    """Return how the adapter in base_models[0].adapters differs from the one to train; empty if it does not."""
    config = context.config
    if not context.entry.adapters:
        return ""
    published = context.entry.adapters[0]
    pairs = (
        ("rank", config.rank, published.r),
        ("alpha", config.alpha, published.alpha),
        ("target_modules", set(_list_targets(context)), set(published.target_modules)),
    )
    differing = [name for name, trained, described in pairs if described and trained != described]
    return f" (base_models[0].adapters differs in {', '.join(differing)} and is ignored)" if differing else ""


def decide_quantization(context: PlanContext) -> tuple[QuantizationPlan | None, Decision]:
    """Return the quantization of the base, None if it is not quantized, and the decision."""
    kind = context.entry.quantization
    if kind == "int8":
        raise ManifestError(
            "base_models[0].quantization: int8 (LLM.int8()) is not supported. On an H200 it trained Qwen3-0.6B at "
            "24,295 tokens/s, where NF4 reached 133,638 and more, and it needs more memory than NF4",
            hint="use int4 (NF4): --set base_models.0.quantization=int4",
        )
    if kind in ("none", "bf16", "fp16"):
        return None, manifest_decision("quantization", "none", f"quantization {kind} in the manifest")
    if context.is_smoke:
        return None, hardware_decision(
            "quantization", "none", f"{kind} needs a CUDA GPU; the tiny base is small enough"
        )
    if context.gpu is None:
        raise InputError(
            f"base_models[0].quantization: {kind} needs a CUDA GPU (bitsandbytes), and this machine has none",
            hint="--gpu NAME plans for one, --profile smoke needs none, or --set base_models.0.quantization=none",
        )
    if context.lacks("bitsandbytes"):
        raise InputError(
            f"base_models[0].quantization: {kind} needs the package bitsandbytes, which is not installed",
            hint="pip install 'expert-launcher[cuda]'",
        )
    if context.config.adapter_type == "full":
        raise ManifestError(
            f"adapter_type full cannot train {kind} weights",
            hint="use lora or dora, or quantization none",
        )
    plan = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
    return plan, manifest_decision("quantization", "NF4, double quantization", "quantization int4 in the manifest")
