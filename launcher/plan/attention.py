"""Which attention kernel runs. Rows lie end to end, packed or not: every rung keeps them apart; training proves it."""

from __future__ import annotations

from launcher.choices import OWN_GROUP, OWN_HEAD_SIZES, AttentionBackend, Dtype
from launcher.errors import InputError
from launcher.hardware import Gpu, Hardware
from launcher.plan.model import AttentionPlan, Decision
from launcher.plan.situation import Situation, asked, decided, forced

TITLES: dict[AttentionBackend, str] = {
    "flash_attention_4": "FlashAttention 4 (flash-attn-4 package)",
    "flash_attention_3": "FlashAttention 3 (flash-attn package)",
    "flash_attention_2": "FlashAttention 2 (flash-attn package)",
    "triton": "our own kernels, in Triton",
    "varlen": "variable-length FlashAttention inside torch",
    "flex": "FlexAttention with a document mask",
    "sdpa": "SDPA, documents in groups of like length",
    "eager": "eager, the whole matrix of scores",
}

PACKAGE_BACKENDS: frozenset[AttentionBackend] = frozenset(
    {"flash_attention_4", "flash_attention_3", "flash_attention_2"}
)


def decide_attention(situation: Situation, dtype: Dtype) -> tuple[AttentionPlan, Decision]:
    config = situation.config
    ladder = make_ladder(situation, dtype)
    if config.attention != "auto":
        _check_able(situation, config.attention, ladder, dtype)
        rest = ladder[ladder.index(config.attention) + 1 :]
        plan = AttentionPlan(backend=config.attention, fallbacks=())
        return plan, asked(
            "attention",
            TITLES[config.attention],
            "attention in the manifest" + ("" if rest or config.attention == "eager" else "; the last that is able"),
        )
    plan = AttentionPlan(backend=ladder[0], fallbacks=ladder[1:])
    return plan, _explain(situation, ladder[0], dtype)


def make_ladder(situation: Situation, dtype: Dtype) -> tuple[AttentionBackend, ...]:
    """Able backends, fastest first."""
    config, gpu = situation.config, situation.gpu
    if gpu is None or dtype == "fp32":  # flash kernels compute in 16 bits: what FP32 was asked for would be lost there
        return ("sdpa", "eager") if not _has_softcap(situation) else ("eager",)
    ladder: list[AttentionBackend] = []
    if config.flash_attention_2 is not False:
        ladder += _package_rungs(gpu, situation.hardware)
    if gpu.has_flash_attention and not _has_softcap(situation):
        ladder.append("varlen")
    if _fits_own_kernels(situation, gpu):
        ladder.insert(1 if _wants_torchs(situation) else 0, "triton")
    if _has_softcap(situation):
        return (*ladder, "eager")
    if gpu.has_flash_attention:
        ladder.append("flex")
    return (*ladder, "sdpa", "eager")


def _fits_own_kernels(situation: Situation, gpu: Gpu) -> bool:
    base = situation.base
    has_heads = base.head_dim in OWN_HEAD_SIZES and base.num_heads // base.num_kv_heads <= OWN_GROUP
    return gpu.has_own_attention and has_heads and not situation.lacks("triton")


def _wants_torchs(situation: Situation) -> bool:
    config = situation.config
    return bool(config.use_sdpa) and config.flash_attention_2 is False and not _has_softcap(situation)


def _package_rungs(gpu: Gpu, hardware: Hardware) -> list[AttentionBackend]:
    rungs: list[AttentionBackend] = []
    if gpu.has_flash_attention_4 and "flash_attn.cute" in hardware.packages:
        rungs.append("flash_attention_4")
    if gpu.has_flash_attention_3 and "flash_attn_interface" in hardware.packages:
        rungs.append("flash_attention_3")
    if gpu.has_flash_attention and "flash_attn" in hardware.packages:
        rungs.append("flash_attention_2")
    return rungs


def _has_softcap(situation: Situation) -> bool:
    """Gemma 2 caps its attention scores, which torch's own kernels cannot do."""
    return situation.base.model_type == "gemma2"


def _explain(situation: Situation, backend: AttentionBackend, dtype: Dtype) -> Decision:
    config, gpu = situation.config, situation.gpu
    if gpu is None:
        return forced("attention", TITLES[backend], "no GPU: flash kernels need one")
    if dtype == "fp32":
        return forced("attention", TITLES[backend], "FP32: flash kernels compute in 16 bits")
    if backend in PACKAGE_BACKENDS:
        return decided("attention", TITLES[backend], "installed, and this GPU can run it")
    if _has_softcap(situation):
        return forced("attention", TITLES[backend], "this base caps its attention scores; torch's flash kernels cannot")
    if not gpu.has_flash_attention:
        capability = ".".join(map(str, gpu.compute_capability))
        return forced(
            "attention", TITLES[backend], f"{gpu.title} has compute capability {capability}; flash kernels need 8.0"
        )
    if _wants_torchs(situation):
        reason = "use_sdpa in the manifest: the flash kernel of torch's SDPA, for rows that lie end to end"
        return asked("attention", TITLES[backend], reason)
    why = "flash_attention_2 in the manifest; " if config.flash_attention_2 else ""
    best = "the fastest that was measured on this kind of GPU" if backend == "triton" else "no package to build"
    apart = "documents of a pack stay apart" if config.packing else "rows that lie end to end stay apart"
    return decided("attention", TITLES[backend], f"{why}{best}; {apart}")


def _check_able(
    situation: Situation, wanted: AttentionBackend, ladder: tuple[AttentionBackend, ...], dtype: Dtype
) -> None:
    if wanted in ladder:
        return
    if dtype == "fp32" and situation.gpu is not None:
        raise InputError(
            f"training.config.attention: {wanted} computes in 16 bits, and FP32 is asked for",
            hint=f'use "auto", or one of: {", ".join(ladder)}; or leave the precision to the plan',
        )
    where = situation.gpu.title if situation.gpu else "a machine without a GPU"
    reasons: dict[AttentionBackend, str] = {
        "flash_attention_4": "it needs a Hopper or Blackwell GPU and the package flash-attn-4, installed",
        "flash_attention_3": "it needs a Hopper GPU and the package flash_attn_interface, installed",
        "flash_attention_2": "it needs compute capability 8.0 and the package flash_attn, installed",
        "triton": "it needs a Hopper GPU, Triton, and heads of 64 or 128 features",
        "varlen": "it needs compute capability 8.0",
        "flex": "it needs compute capability 8.0",
    }
    raise InputError(
        f"training.config.attention: {wanted} cannot run on {where}: {reasons.get(wanted, 'this base needs eager')}",
        hint=f'use "auto", or one of: {", ".join(ladder)}',
    )
