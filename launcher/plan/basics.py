"""What is decided before anything is sized: numbers, adapter, kernels, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.choices import LossKernel, Quantization
from launcher.plan.adapter import decide_adapter, decide_quantization
from launcher.plan.attention import decide_attention
from launcher.plan.model import (
    AdapterPlan,
    AttentionPlan,
    Decision,
    OptimizerPlan,
    PrecisionPlan,
    QuantizationPlan,
)
from launcher.plan.optimizer import decide_optimizer
from launcher.plan.precision import decide_precision
from launcher.plan.situation import Situation, asked, decided


@dataclass(frozen=True, kw_only=True, slots=True)
class Basics:
    precision: PrecisionPlan
    adapter: AdapterPlan
    quantization: QuantizationPlan | None
    attention: AttentionPlan
    loss_kernel: LossKernel
    optimizer: OptimizerPlan
    decisions: tuple[Decision, ...]

    @property
    def quantization_kind(self) -> Quantization:
        return "none" if self.quantization is None else self.quantization.kind


def decide_basics(situation: Situation) -> Basics:
    precision, precision_decisions = decide_precision(situation)
    adapter, adapter_decisions = decide_adapter(situation)
    quantization, quantization_decision = decide_quantization(situation)
    attention, attention_decision = decide_attention(situation, precision.compute_dtype)
    loss_kernel, loss_decisions = _decide_loss(situation)
    optimizer, optimizer_decisions = decide_optimizer(situation)
    return Basics(
        precision=precision,
        adapter=adapter,
        quantization=quantization,
        attention=attention,
        loss_kernel=loss_kernel,
        optimizer=optimizer,
        decisions=(
            *adapter_decisions,
            quantization_decision,
            *precision_decisions,
            attention_decision,
            *loss_decisions,
            *optimizer_decisions,
        ),
    )


def _decide_loss(situation: Situation) -> tuple[LossKernel, list[Decision]]:
    gpu, config = situation.gpu, situation.config
    where = "the completion only" if config.loss_on == "completion" else "every token"
    if "loss_on" in config.model_fields_set:
        trained = asked("trained tokens", where, "loss_on in the manifest")
    else:
        trained = decided("trained tokens", where, "not given: as the published trainer did")
    if gpu is None or gpu.compute_capability < (8, 0):
        why = "no GPU" if gpu is None else f"{gpu.title} is too old for the fused Triton kernel"
        return "chunked", [trained, decided("loss", "chunked cross-entropy", f"{why}; the logits are never held whole")]
    if situation.lacks("triton"):
        why = "Triton is not installed, which comes with torch for Linux; the logits are never held whole"
        return "chunked", [trained, decided("loss", "chunked cross-entropy", why)]
    fused = decided("loss", "fused linear cross-entropy", "the logits are never held whole: they would fill the card")
    return "fused", [trained, fused]
