"""What is trained: the adapter, its size, and how the frozen base is stored."""

from __future__ import annotations

from launcher.choices import AdapterKind
from launcher.errors import InputError, ManifestError, Problem
from launcher.manifest.config import TrainingConfig
from launcher.manifest.spelling import closest
from launcher.memory import count_trainable
from launcher.plan.model import AdapterPlan, Decision, QuantizationPlan
from launcher.plan.situation import Situation, asked, decided, forced
from launcher.units import format_count, format_percent

# PEFT's own default, and what the trainer of the published manifests passed when they named none.
DEFAULT_DROPOUT = 0.05


def decide_adapter(situation: Situation) -> tuple[AdapterPlan, list[Decision]]:
    config, base = situation.config, situation.base
    kind = _supported_kind(config)
    _check_targets(situation)
    trainable = count_trainable(base, kind, config.rank, config.target_modules, config.feedforward_modules)
    dropout, dropout_decision = _decide_dropout(situation)
    plan = AdapterPlan(
        kind=kind,
        rank=config.rank,
        alpha=config.alpha,
        dropout=dropout,
        target_modules=config.target_modules,
        feedforward_modules=config.feedforward_modules,
        trainable_parameters=trainable,
    )
    share = format_percent(trainable / base.num_parameters)
    size = f"rank {config.rank}, alpha {config.alpha}, " if config.rank else ""
    value = f"{kind}, {size}{format_count(trainable)} weights trained ({share})"
    reason = "training.config" + _disagreement(situation)
    return plan, [asked("adapter", value, reason), *dropout_decision]


def _supported_kind(config: TrainingConfig) -> AdapterKind:
    kind = config.adapter_type
    if kind == "lokr" or kind == "adalora":
        raise AssertionError(f"the manifest refuses {kind}")
    return kind


def _check_targets(situation: Situation) -> None:
    config, base = situation.config, situation.base
    known = [linear.name for linear in base.linears]
    problems = []
    for key, names in (("target_modules", config.target_modules), ("feedforward_modules", config.feedforward_modules)):
        for name in names:
            if name not in known:
                meant = closest(name, known)
                what = f"{base.name} has no {name}" + (f"; did you mean {meant}?" if meant else "")
                problems.append(Problem(where=f"training.config.{key}", what=what))
    if problems:
        raise ManifestError(
            f"the adapter's targets do not fit the base {base.name}",
            tuple(problems),
            hint=f"layers of {base.name} have: {', '.join(known)}",
        )


def _decide_dropout(situation: Situation) -> tuple[float, list[Decision]]:
    config = situation.config
    if config.adapter_type in ("full", "ia3"):
        if config.dropout:
            raise ManifestError(
                f"training.config.dropout: adapter_type {config.adapter_type} has no adapter dropout",
                hint="remove it, or use lora or dora",
            )
        return 0.0, []
    published = next((a.dropout for a in situation.entry.adapters if a.dropout is not None), None)
    if config.dropout is not None:
        value, decide, reason = config.dropout, asked, "training.config.dropout"
    elif published is not None:
        value, decide, reason = published, asked, "base_models[0].adapters, not in training.config"
    else:
        value, decide, reason = DEFAULT_DROPOUT, decided, "not given: what the published trainer used"
    if value and config.adapter_type == "dora":
        reason += "; for it DoRA multiplies twice by each matrix that it adapts"
    return value, [decide("adapter dropout", f"{value:g}", reason)]


def _disagreement(situation: Situation) -> str:
    """`adapters` of the base describes what was published; where it differs from what is trained, say so."""
    config = situation.config
    if not situation.entry.adapters:
        return ""
    published = situation.entry.adapters[0]
    pairs = (
        ("rank", config.rank, published.r),
        ("alpha", config.alpha, published.alpha),
        ("target_modules", set(config.target_modules), set(published.target_modules)),
    )
    differing = [name for name, trained, described in pairs if described and trained != described]
    return f" (wins over base_models[0].adapters, which differs in {', '.join(differing)})" if differing else ""


def decide_quantization(situation: Situation) -> tuple[QuantizationPlan | None, Decision]:
    asked_for = situation.entry.quantization
    if asked_for in ("none", "bf16", "fp16"):
        return None, asked("base weights", "not quantised", f"quantization {asked_for} in the manifest")
    if situation.is_smoke:
        return None, forced(
            "base weights", "not quantised", f"{asked_for} needs a CUDA GPU; the tiny base needs no saving"
        )
    if situation.gpu is None:
        raise InputError(
            f"base_models[0].quantization: {asked_for} needs a CUDA GPU (bitsandbytes), this machine has none",
            hint="--gpu NAME plans for one, --profile smoke needs none, or --set base_models.0.quantization=none",
        )
    if situation.lacks("bitsandbytes"):
        raise InputError(
            f"base_models[0].quantization: {asked_for} needs the package bitsandbytes, which is not installed here",
            hint="pip install 'expert-launcher[cuda]'",
        )
    if situation.config.adapter_type == "full":
        raise ManifestError(
            f"adapter_type full cannot train weights stored as {asked_for}",
            hint="use lora or dora, or quantization none",
        )
    if asked_for == "int8":
        plan = QuantizationPlan(kind="int8", storage_dtype="int8", double_quantization=False)
        return plan, asked("base weights", "int8", "quantization in the manifest")
    plan = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
    return plan, asked("base weights", "NF4, double quantisation", "quantization int4 in the manifest")
