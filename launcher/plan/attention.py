"""Choice of the attention backend. Every backend keeps documents of a packed sequence apart; training verifies it."""

from __future__ import annotations

from launcher.base_models.families import FAMILIES
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import (
    OWN_GROUP,
    OWN_HEAD_SIZES,
    SINK_ATTENTION,
    UNRECORDABLE_ATTENTION,
    AttentionBackend,
    Dtype,
)
from launcher.core.errors import InputError
from launcher.hardware.model import Gpu, Hardware
from launcher.plan.calibration import AttentionShape, MeasuredAttention
from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.model import AttentionPlan, Decision

TITLES: dict[AttentionBackend, str] = {
    "flash_attention_4": "FlashAttention 4 (flash-attn-4 package)",
    "flash_attention_3": "FlashAttention 3 (flash-attn package)",
    "flash_attention_2": "FlashAttention 2 (flash-attn package)",
    "triton": "our Triton kernels",
    "varlen": "torch's variable-length FlashAttention",
    "flex": "FlexAttention with a document mask",
    "sdpa": "SDPA, documents grouped by length",
    "eager": "eager, with the full score matrix",
}

PACKAGE_BACKENDS: frozenset[AttentionBackend] = frozenset(
    {"flash_attention_4", "flash_attention_3", "flash_attention_2"}
)


def decide_attention(context: PlanContext, dtype: Dtype) -> tuple[AttentionPlan, Decision]:
    """Return the attention backend with its fallbacks, and the decision."""
    name, backends = context.config.attention, list_backends(context, dtype)
    if name != "auto":
        _check_supported(context, name, backends, dtype)
        plan = AttentionPlan(backend=name, fallbacks=())
        return plan, manifest_decision("attention", TITLES[name], "attention in the manifest")
    measured = find_measured(context, dtype)
    if measured is not None:
        backends = _order_by_time(backends, measured)
    plan = AttentionPlan(backend=backends[0], fallbacks=backends[1:])
    if measured is not None and backends[0] in measured.milliseconds:
        return plan, plan_decision("attention", TITLES[backends[0]], _describe_times(backends, measured))
    return plan, _explain(context, backends[0], dtype)


def find_measured(context: PlanContext, dtype: Dtype) -> MeasuredAttention | None:
    """Return this machine's latest benchmark that decides the order of attention backends for the base, or None."""
    if context.gpu is None or _prefers_torch(context) or _has_softcap(context) or _has_sinks(context):
        return None
    base = context.base
    shape = AttentionShape(
        num_heads=base.num_heads, num_kv_heads=base.num_kv_heads, head_dim=base.head_dim, dtype=dtype
    )
    known = context.options.calibration.attention
    return next((one for one in reversed(known) if one.shape == shape), None)


def _order_by_time(backends: tuple[AttentionBackend, ...], measured: MeasuredAttention) -> tuple[AttentionBackend, ...]:
    """Sort attention backends by measured time, unmeasured last; after them, those that a CUDA graph cannot capture."""

    def rank(backend: AttentionBackend) -> tuple[bool, float]:
        return backend in UNRECORDABLE_ATTENTION, measured.milliseconds.get(backend, float("inf"))

    return tuple(sorted(backends, key=rank))


def _describe_times(backends: tuple[AttentionBackend, ...], measured: MeasuredAttention) -> str:
    times = [f"{name} {measured.milliseconds[name]:.2f} ms" for name in backends if name in measured.milliseconds]
    return f"measured on this machine: {', '.join(times)} per layer"


def list_backends(context: PlanContext, dtype: Dtype) -> tuple[AttentionBackend, ...]:
    """Return the attention backends that can run on this hardware, those expected to be fastest first."""
    config, gpu = context.config, context.gpu
    if _has_sinks(context):
        has_flash = gpu is not None and gpu.has_flash_attention and dtype != "fp32"
        has_kernels = has_own_heads(context.base) and not context.lacks("triton")
        return SINK_ATTENTION if has_flash and has_kernels else ("eager",)
    if gpu is None or dtype == "fp32":  # flash kernels compute in 16 bits, which would defeat FP32
        return ("sdpa", "eager") if not _has_softcap(context) else ("eager",)
    backends: list[AttentionBackend] = []
    if config.flash_attention_2 is not False:
        backends += list_package_backends(gpu, context.hardware)
    if gpu.has_flash_attention and not _has_softcap(context):
        backends.append("varlen")
    if _supports_own_kernels(context, gpu, dtype):
        backends.insert(1 if _prefers_torch(context) else 0, "triton")
    if gpu.has_flash_attention:
        backends.append("flex")
    return (*backends, "eager") if _has_softcap(context) else (*backends, "sdpa", "eager")


def _supports_own_kernels(context: PlanContext, gpu: Gpu, dtype: Dtype) -> bool:
    """Return whether our attention kernels support the base, and were measured on this GPU or its architecture."""
    measured = find_measured(context, dtype)
    is_known = gpu.has_own_attention or (measured is not None and "triton" in measured.milliseconds)
    return is_known and has_own_heads(context.base) and not context.lacks("triton")


def has_own_heads(base: ModelShape) -> bool:
    """Return whether our attention kernels support a base's head size and number of query heads per KV head."""
    return base.head_dim in OWN_HEAD_SIZES and base.num_heads // base.num_kv_heads <= OWN_GROUP


def _prefers_torch(context: PlanContext) -> bool:
    config = context.config
    return bool(config.use_sdpa) and config.flash_attention_2 is False and not _has_softcap(context)


def list_package_backends(gpu: Gpu, hardware: Hardware) -> list[AttentionBackend]:
    """Return the backends of installed flash-attn packages that this GPU supports."""
    backends: list[AttentionBackend] = []
    if gpu.has_flash_attention_4 and "flash_attn.cute" in hardware.packages:
        backends.append("flash_attention_4")
    if gpu.has_flash_attention_3 and "flash_attn_interface" in hardware.packages:
        backends.append("flash_attention_3")
    if gpu.has_flash_attention and "flash_attn" in hardware.packages:
        backends.append("flash_attention_2")
    return backends


def _has_softcap(context: PlanContext) -> bool:
    """Return whether the base soft-caps its attention scores, as Gemma 2 does; torch's kernels do not support this."""
    return context.base.model_type == "gemma2"


def _has_sinks(context: PlanContext) -> bool:
    """Return whether the base has attention sinks (a learned score per head in the softmax), as gpt-oss does."""
    family = FAMILIES.get(context.base.model_type)
    return family is not None and family.has_sinks


def _explain(context: PlanContext, backend: AttentionBackend, dtype: Dtype) -> Decision:
    config, gpu = context.config, context.gpu
    decide = hardware_decision
    if _has_sinks(context):
        decide = plan_decision
        reason = "attention sinks of this base: FlashAttention and torch's kernels do not support them"
        is_new = gpu is not None and backend == "triton" and not gpu.has_own_attention
        reason += "; not measured on this GPU" * is_new
    elif gpu is None:
        reason = "no GPU, and flash kernels need one"
    elif dtype == "fp32":
        reason = "FP32: flash kernels compute in 16 bits"
    elif backend in PACKAGE_BACKENDS:
        decide, reason = plan_decision, f"installed, and this GPU can run it{_not_measured(context, gpu)}"
    elif _has_softcap(context):
        reason = "this base soft-caps attention scores, which torch's flash kernels do not support"
    elif not gpu.has_flash_attention:
        capability = ".".join(map(str, gpu.compute_capability))
        reason = f"{gpu.title} has compute capability {capability}; flash kernels need 8.0"
    elif _prefers_torch(context):
        decide = manifest_decision
        reason = "use_sdpa in the manifest: the flash kernel of torch's SDPA, for packed documents"
    else:
        decide = plan_decision
        requested = "flash_attention_2 in the manifest; " if config.flash_attention_2 else ""
        best = "the fastest measured on this kind of GPU" if backend == "triton" else "needs no extra package"
        reason = f"{requested}{best}; masks documents that share a sequence{_not_measured(context, gpu)}"
    return decide("attention", TITLES[backend], reason)


def _not_measured(context: PlanContext, gpu: Gpu) -> str:
    if context.hardware.source == "probe":
        return "; not measured on this machine (launcher bench attention)"
    return "" if gpu.has_own_attention else "; not measured on this GPU"


def _check_supported(
    context: PlanContext, backend: AttentionBackend, backends: tuple[AttentionBackend, ...], dtype: Dtype
) -> None:
    if backend in backends:
        return
    if dtype == "fp32" and context.gpu is not None:
        raise InputError(
            f"training.config.attention: {backend} computes in 16 bits, but FP32 is requested",
            hint=f'use "auto", or one of: {", ".join(backends)}; or let the plan choose the precision',
        )
    where = context.gpu.title if context.gpu else "a machine without a GPU"
    reasons: dict[AttentionBackend, str] = {
        "flash_attention_4": "it needs a Hopper or Blackwell GPU and the package flash-attn-4",
        "flash_attention_3": "it needs a Hopper GPU and the package flash_attn_interface",
        "flash_attention_2": "it needs compute capability 8.0 and the package flash_attn",
        "triton": "it needs a Hopper GPU (or a measurement by launcher bench attention), Triton, and a head size of "
        "64, 128 or 256",
        "varlen": "it needs compute capability 8.0",
        "flex": "it needs compute capability 8.0",
    }
    raise InputError(
        f"training.config.attention: {backend} cannot run on {where}: {reasons.get(backend, 'this base needs eager')}",
        hint=f'use "auto", or one of: {", ".join(backends)}',
    )
