"""Settings that do not depend on memory: precision, adapter, quantization, attention, loss kernel, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.choices import (
    EIGHT_BIT_OPTIMIZERS,
    FP8_CAPABILITIES,
    Dtype,
    LossKernel,
    OptimizerName,
    Quantization,
    Strategy,
)
from launcher.core.errors import InputError
from launcher.core.units import format_gib
from launcher.manifest.config import TrainingConfig
from launcher.plan.adapter import decide_adapter, decide_quantization
from launcher.plan.attention import decide_attention
from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.model import (
    AdapterPlan,
    AttentionPlan,
    Decision,
    OptimizerPlan,
    PrecisionPlan,
    QuantizationPlan,
)

_MIN_FP8_HIDDEN = 1024  # Qwen3-0.6B is 7 to 17 % faster on an H200; SmolLM2-135M (576) is not


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The settings that are chosen before the search for a layout that fits."""

    precision: PrecisionPlan
    adapter: AdapterPlan
    quantization: QuantizationPlan | None
    attention: AttentionPlan
    loss_kernel: LossKernel
    optimizer: OptimizerPlan
    decisions: tuple[Decision, ...]

    @property
    def quantization_kind(self) -> Quantization:
        """Return the quantization of the base; "none" if it is not quantized."""
        return "none" if self.quantization is None else self.quantization.kind

    def store_quantization(self, strategy: Strategy) -> QuantizationPlan | None:
        """Return the quantization with the storage dtype that a strategy needs; None if the base is not quantized."""
        return self.quantization and self.quantization.stored_for(strategy, self.precision.compute_dtype)


def decide_model_settings(context: PlanContext) -> ModelSettings:
    """Return all settings that do not depend on memory."""
    precision, precision_decisions = decide_precision(context)
    adapter, adapter_decisions = decide_adapter(context)
    quantization, quantization_decision = decide_quantization(context)
    attention, attention_decision = decide_attention(context, precision.compute_dtype)
    loss_kernel, loss_decisions = _decide_loss(context)
    optimizer, optimizer_decisions = decide_optimizer(context)
    return ModelSettings(
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


def decide_precision(context: PlanContext) -> tuple[PrecisionPlan, list[Decision]]:
    """Return the data types, and the decisions about them."""
    compute, precision = _decide_compute_dtype(context)
    use_tf32, tf32 = _decide_tf32(context, compute)
    is_full = context.config.adapter_type == "full"
    uses_fp8 = _uses_fp8(context)
    plan = PrecisionPlan(
        compute_dtype=compute,
        base_dtype="fp32" if is_full else compute,
        trainable_dtype="fp32",
        use_tf32=use_tf32,
        loss_scaling=compute == "fp16",
        fp8_base=uses_fp8 and not is_full,
        fp8_layers=uses_fp8 and is_full,
    )
    if compute == "fp32":
        reason = "everything is computed in FP32"
    else:
        reason = (
            f"{'the model' if is_full else 'the adapter'} is stored in FP32 and computed in {compute.upper()}: at this "
            f"learning rate ({context.config.learning_rate:g}) {compute.upper()} would round most updates to zero"
        )
    return plan, [precision, tf32, plan_decision("trainable weights", "FP32", reason)]


def _decide_compute_dtype(context: PlanContext) -> tuple[Dtype, Decision]:
    config, gpu = context.config, context.gpu
    name, fp16, no_scaling = "precision", "FP16 with loss scaling", "same range as FP32, so no loss scaling"
    if _uses_fp8(context):
        if config.adapter_type == "full":
            reason = "outputs and input gradients of linear layers in FP8, weight gradients and all else in BF16"
            return "bf16", manifest_decision(name, "FP8 layers, BF16", f"precision in the manifest; {reason}")
        reason = "precision in the manifest; matmuls of the frozen base in FP8, all others in BF16"
        return "bf16", manifest_decision(name, "FP8 base, BF16", reason)
    if gpu is None:
        unused = "" if config.precision in (None, "fp32") else f"; precision {config.precision} is not used"
        reason = f"no GPU; CPUs emulate BF16, about 20 times slower than FP32{unused}"
        return "fp32", hardware_decision(name, "FP32", reason)
    wants_bf16, wants_fp16 = config.bf16, config.fp16
    if config.precision == "fp8":
        wants_bf16, wants_fp16 = None, False  # of the smoke profile, which does not use it
    elif config.precision is not None:
        wants_bf16, wants_fp16 = config.precision == "bf16", config.precision == "fp16"
    key = "precision" if config.precision is not None else "fp16" if wants_fp16 else "bf16"
    if wants_fp16:
        hint = "; BF16 needs no loss scaling on this GPU: set bf16 instead of fp16" if gpu.has_bf16 else ""
        return "fp16", manifest_decision(name, fp16, f"{key} in the manifest{hint}")
    wants_fp32 = wants_bf16 is False and (wants_fp16 is False or config.precision == "fp32")
    if not gpu.has_bf16 and not wants_fp32:
        capability = ".".join(map(str, gpu.compute_capability))
        return "fp16", hardware_decision(name, fp16, f"{gpu.title} (compute capability {capability}) has no BF16")
    if wants_bf16:
        return "bf16", manifest_decision(name, "BF16", f"{key} in the manifest; {no_scaling}")
    if wants_bf16 is False:
        reason = "bf16 and fp16 are both off in the manifest" if key == "bf16" else "precision in the manifest"
        return "fp32", manifest_decision(name, "FP32", reason)
    return "bf16", plan_decision(name, "BF16", f"{gpu.title} supports it; {no_scaling}")


def _uses_fp8(context: PlanContext) -> bool:
    """Return whether matmuls of linear layers run in FP8; raise InputError if FP8 is requested but impossible."""
    gpu, config = context.gpu, context.config
    if config.precision != "fp8" or context.is_smoke:
        return False
    kind = context.entry.quantization
    if gpu is None:
        obstacle, hint = "needs a GPU, and this machine has none", "--gpu NAME plans for one"
    elif gpu.compute_capability not in FP8_CAPABILITIES:
        capability = ".".join(map(str, gpu.compute_capability))
        obstacle = f"is not supported on {gpu.title} (compute capability {capability})"
        hint = "it runs on 8.9 (RTX 40 series, L4, L40S), 9.0 (H100, H200) and 12.0 (RTX 50 series)"
    elif config.adapter_type not in ("lora", "dora", "full"):
        obstacle, hint = f"does not support adapter_type {config.adapter_type}", "use lora, dora or full"
    elif kind == "int4":
        obstacle, hint = "and quantization int4 (NF4) exclude each other", "--set base_models.0.quantization=none"
    elif context.base.hidden_size < _MIN_FP8_HIDDEN:
        obstacle = f"is no faster with a hidden size of {context.base.hidden_size}, and less accurate"
        hint = f"use bf16; FP8 is for bases with a hidden size of {_MIN_FP8_HIDDEN:,} or more"
    elif context.base.experts is not None:
        obstacle, hint = "does not support mixtures of experts", "use bf16"
    elif config.gradient_checkpointing == "selective":
        obstacle = "does not support selective checkpointing, which saves the results of 16-bit matmuls"
        hint = "--set training.config.gradient_checkpointing=true"
    elif context.lacks("triton"):
        obstacle, hint = "needs Triton, which is not installed", "torch for Linux includes it"
    else:
        return True
    raise InputError(f"training.config.precision: fp8 {obstacle}", hint=hint)


def _decide_tf32(context: PlanContext, compute: Dtype) -> tuple[bool, Decision]:
    gpu, use_tf32 = context.gpu, context.config.use_tf32
    if gpu is None or not gpu.has_tf32:
        return False, hardware_decision("TF32", "off", "no GPU" if gpu is None else f"{gpu.title} has no TF32")
    if use_tf32 is not None:
        return use_tf32, manifest_decision("TF32", "on" if use_tf32 else "off", "use_tf32 in the manifest")
    matmuls = "all matmuls" if compute == "fp32" else "the few FP32 matmuls"
    reason = f"{matmuls} run on tensor cores; a 10-bit mantissa is enough for training"
    return True, plan_decision("TF32", "on", reason)


def _decide_loss(context: PlanContext) -> tuple[LossKernel, list[Decision]]:
    gpu, config = context.gpu, context.config
    tokens = "the completion only" if config.loss_on == "completion" else "every token"
    if "loss_on" in config.model_fields_set:
        trained = manifest_decision("loss tokens", tokens, "loss_on in the manifest")
    else:
        trained = plan_decision("loss tokens", tokens, "default of the manifest format")
    full_logits = "the full logits are never held in memory"
    if gpu is None or gpu.compute_capability < (8, 0):
        obstacle = "no GPU" if gpu is None else f"{gpu.title} is too old for the fused Triton kernel"
    elif context.lacks("triton"):
        obstacle = "Triton is not installed (torch for Linux includes it)"
    else:
        logits = config.max_seq_length * context.base.vocab_size * 4
        reason = f"{full_logits}: {format_gib(logits)} in FP32 for each sequence of a micro-step"
        return "fused", [trained, plan_decision("loss", "fused linear cross-entropy", reason)]
    return "chunked", [trained, plan_decision("loss", "chunked cross-entropy", f"{obstacle}; {full_logits}")]


def decide_optimizer(context: PlanContext) -> tuple[OptimizerPlan, list[Decision]]:
    """Return the optimizer, and the decisions about it and about gradient clipping."""
    config = context.config
    name, decision = _decide_optimizer_name(context)
    clipping = config.max_grad_norm or None
    plan = OptimizerPlan(
        name=name,
        learning_rate=config.learning_rate,
        loraplus_lr_ratio=config.loraplus_lr_ratio,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        max_grad_norm=clipping,
    )
    is_set = "max_grad_norm" in config.model_fields_set
    reason = "max_grad_norm in the manifest" if is_set else "default of the manifest format"
    decide = manifest_decision if is_set else plan_decision
    ratio = config.loraplus_lr_ratio
    loraplus = f"B matrices learn {ratio:g} times as fast" if ratio else ""
    return plan, [
        decision,
        *([manifest_decision("LoRA+", loraplus, "loraplus_lr_ratio in the manifest")] if ratio else []),
        _explain_weight_decay(config, plan),
        decide("gradient clipping", f"norm {clipping:g}" if clipping else "off", reason),
    ]


def _explain_weight_decay(config: TrainingConfig, plan: OptimizerPlan) -> Decision:
    """Return the decision about the weight decay and, if the manifest sets them, the constants of AdamW."""
    constants = [key for key in ("adam_beta1", "adam_beta2", "adam_epsilon") if key in config.model_fields_set]
    value = f"{plan.weight_decay:g}"
    if constants and plan.name != "sgd":
        value += f"; β {plan.betas[0]:g} and {plan.betas[1]:g}, ε {plan.epsilon:g}"
    keys = [*(["weight_decay"] if "weight_decay" in config.model_fields_set else []), *constants]
    if not keys:
        return plan_decision("weight decay", value, "default of the manifest format")
    return manifest_decision("weight decay", value, f"{keys[0]} in the manifest")


def _decide_optimizer_name(context: PlanContext) -> tuple[OptimizerName, Decision]:
    name, gpu = context.config.optim, context.gpu
    if name is None:
        reason = "one kernel for all weights; same arithmetic as adamw_torch"
        return "adamw_torch_fused", plan_decision("optimizer", "adamw_torch_fused", reason)
    reason = "optim in the manifest"
    if name in EIGHT_BIT_OPTIMIZERS:
        if gpu is None and context.is_smoke:
            return "adamw_torch", hardware_decision("optimizer", "adamw_torch", f"{name} needs a CUDA GPU")
        if gpu is None:
            raise InputError(
                f"training.config.optim: {name} needs a CUDA GPU, and this machine has none",
                hint="--gpu NAME plans for one, or --set training.config.optim=adamw_torch",
            )
        if context.lacks("bitsandbytes"):
            raise InputError(
                f"training.config.optim: {name} needs the package bitsandbytes, which is not installed",
                hint="pip install 'expert-launcher[cuda]', or --set training.config.optim=adamw_torch_fused",
            )
        if name == "paged_adamw_8bit" and context.config.adapter_type != "full":
            reason = "as paged_adamw_8bit in the manifest, on the GPU: the moments of an adapter are small"
            return "adamw_bnb_8bit", plan_decision("optimizer", "adamw_bnb_8bit", reason)
        if name == "paged_adamw_8bit":
            return name, manifest_decision("optimizer", name, f"{reason}; moments are in CPU memory")
        reason += "; every step waits for the host to read the gradients, which adamw_torch_fused avoids"
    return name, manifest_decision("optimizer", name, reason)
