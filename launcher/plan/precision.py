"""Which numbers are computed in which precision."""

from __future__ import annotations

from launcher.choices import Dtype
from launcher.plan.model import Decision, PrecisionPlan
from launcher.plan.situation import Situation, asked, decided, forced


def decide_precision(situation: Situation) -> tuple[PrecisionPlan, list[Decision]]:
    compute, precision = _decide_compute_dtype(situation)
    use_tf32, tf32 = _decide_tf32(situation, compute)
    trainable, weights = _decide_trainable_dtype(situation, compute)
    is_full = situation.config.adapter_type == "full"
    plan = PrecisionPlan(
        compute_dtype=compute,
        base_dtype=trainable if is_full else compute,
        trainable_dtype=trainable,
        use_tf32=use_tf32,
        loss_scaling=compute == "fp16",
    )
    return plan, [precision, tf32, weights]


def _decide_compute_dtype(situation: Situation) -> tuple[Dtype, Decision]:
    config, gpu = situation.config, situation.gpu
    if gpu is None:
        return "fp32", forced("precision", "FP32", "no GPU: CPUs emulate BF16, about 20 times slower than FP32")
    if config.fp16:
        hint = "; BF16 would need no loss scaling here: set bf16 instead of fp16" if gpu.has_bf16 else ""
        return "fp16", asked("precision", "FP16 with loss scaling", f"fp16 in the manifest{hint}")
    if not gpu.has_bf16:
        capability = ".".join(map(str, gpu.compute_capability))
        return "fp16", forced(
            "precision", "FP16 with loss scaling", f"{gpu.title} (compute capability {capability}) has no BF16"
        )
    if config.bf16:
        return "bf16", asked("precision", "BF16", "bf16 in the manifest; range of FP32, so no loss scaling")
    if config.bf16 is False:
        return "fp32", asked("precision", "FP32", "bf16 and fp16 are both switched off in the manifest")
    return "bf16", decided("precision", "BF16", f"{gpu.title} has it; range of FP32, so no loss scaling")


def _decide_tf32(situation: Situation, compute: Dtype) -> tuple[bool, Decision]:
    gpu, wanted = situation.gpu, situation.config.use_tf32
    if gpu is None or not gpu.has_tf32:
        return False, forced("TF32", "off", "no GPU" if gpu is None else f"{gpu.title} has no TF32")
    if wanted is not None:
        return wanted, asked("TF32", "on" if wanted else "off", "use_tf32 in the manifest")
    what = "all matrix products" if compute == "fp32" else "the few FP32 matrix products"
    return True, decided("TF32", "on", f"{what} run on tensor cores; 10 bits of mantissa are enough for training")


def _decide_trainable_dtype(situation: Situation, compute: Dtype) -> tuple[Dtype, Decision]:
    name = "trained weights"
    if compute == "fp32":
        return "fp32", decided(name, "FP32", "everything is computed in FP32")
    what = "the model" if situation.config.adapter_type == "full" else "the adapter"
    return "fp32", decided(
        name,
        "FP32",
        f"{what} is kept in FP32 and computed in {compute.upper()}: at this learning rate "
        f"({situation.config.learning_rate:g}) {compute.upper()} would round most updates away",
    )
