"""Cases of the memory grid, in the order in which they are measured.

Several cases vary each term of the estimate. Small base models are fast to build and most informative; large ones
confirm them. Compiled cases of a base have the same number of tokens where possible, so that they share the compiler's
cache.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Literal

from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.core.choices import Checkpointing, LossKernel, OptimizerName
from launcher.core.errors import InputError
from launcher.core.frozen_model import Frozen

Kind = Literal["lora", "dora", "qlora", "qdora", "full"]  # qdora: 4-bit DoRA without gate_proj, as published

BASES: dict[str, str] = {
    "0.6B": "Qwen/Qwen3-0.6B",
    "1.7B": "Qwen/Qwen3-1.7B",
    "4B": "Qwen/Qwen3-4B",
    "8B": "Qwen/Qwen3-8B",
}
TINY = "tiny"  # covers every code path on a CPU, without memory figures
ALL_BASES = {**BASES, TINY: TINY_BASE_NAME}


class GridCase(Frozen):
    """A training: manifest settings, and three settings that only a plan has."""

    base: str  # a key of ALL_BASES
    kind: Kind
    micro_batch_size: int  # set in the plan, which would choose the fastest
    sequence_length: int
    checkpointing: Checkpointing = "none"
    compiled: bool = False
    compile_backend: str | None = None
    graphed: bool = False  # a micro-step as one CUDA graph
    accumulation: int = 1  # set in the plan
    loss_kernel: LossKernel | None = None  # set in the plan; None: as planned
    dropout: float = 0.0
    optimizer: OptimizerName = "adamw_torch_fused"
    fp8: bool = False  # linear layers in FP8: those of the frozen base, or all that are trained
    bf16_weights: bool = False  # full fine-tuning with stochastic rounding
    optimizer_in_backward: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.micro_batch_size * self.sequence_length

    @property
    def name(self) -> str:
        """Unique name, made from the settings."""
        parts = [
            self.base,
            self.kind,
            f"{self.micro_batch_size}x{self.sequence_length}",
            self.checkpointing,
            "graphed" if self.graphed else "compiled" if self.compiled else "eager",
            *([f"by{self.accumulation}"] if self.accumulation > 1 else []),
            *([self.loss_kernel] if self.loss_kernel else []),
            *([f"dropout{self.dropout:g}"] if self.dropout else []),
            *([self.optimizer] if self.optimizer != "adamw_torch_fused" else []),
            *(["fp8"] if self.fp8 else []),
            *(["bf16_weights"] if self.bf16_weights else []),
            *(["in_backward"] if self.optimizer_in_backward else []),
        ]
        return "-".join(parts)


def _cases(
    base: str, kind: Kind, sizes: str, checkpointing: Checkpointing = "none", compiled: bool = False
) -> Iterator[GridCase]:
    """Yield a case per size; `sizes` are micro-batch x tokens, separated by spaces."""
    for size in sizes.split():
        rows, tokens = (int(number) for number in size.split("x"))
        yield GridCase(
            base=base,
            kind=kind,
            micro_batch_size=rows,
            sequence_length=tokens,
            checkpointing=checkpointing,
            compiled=compiled,
        )


def _changed(case: GridCase, **changes: object) -> GridCase:
    return GridCase.model_validate({**case.model_dump(), **changes})


def _small_eager() -> Iterator[GridCase]:
    yield from _cases("0.6B", "lora", "1x512 16x512 8x1024 2x2048 16x2048 4x4096 2x8192")
    yield from _cases("0.6B", "lora", "4x2048 16x1024", "selective")
    yield from _cases("0.6B", "lora", "2x2048 16x2048 8x8192", "full")
    yield from _cases("0.6B", "dora", "2x2048 8x1024")
    yield from _cases("0.6B", "dora", "4x2048", "selective")
    yield from _cases("0.6B", "dora", "8x2048", "full")
    yield from _cases("0.6B", "qlora", "2x2048")
    yield from _cases("0.6B", "qlora", "4x4096", "selective")
    yield from _cases("0.6B", "qlora", "8x2048", "full")
    yield from _cases("0.6B", "full", "2x2048 8x1024")
    yield from _cases("0.6B", "full", "4x2048", "selective")
    yield from _cases("0.6B", "full", "8x2048", "full")
    (lora,) = _cases("0.6B", "lora", "4x2048")
    (dora,) = _cases("0.6B", "dora", "4x2048")
    (full,) = _cases("0.6B", "full", "2x2048")
    (published,) = _cases("0.6B", "qdora", "24x1536", "full")
    yield _changed(published, dropout=0.1, optimizer="adamw_bnb_8bit")
    yield _changed(published, dropout=0.1, checkpointing="none", micro_batch_size=8)
    yield _changed(published, checkpointing="none", micro_batch_size=8)
    yield _changed(lora, loss_kernel="chunked")
    yield _changed(lora, loss_kernel="full_logits")
    yield _changed(lora, dropout=0.1)
    yield _changed(dora, dropout=0.1)
    yield _changed(full, loss_kernel="full_logits")
    yield _changed(full, accumulation=2)
    yield _changed(full, optimizer="adamw_bnb_8bit")


def _small_compiled() -> Iterator[GridCase]:
    kinds: tuple[Kind, ...] = ("lora", "dora", "qlora", "full")
    for kind in kinds:
        yield from _cases("0.6B", kind, "4x2048", compiled=True)
        yield from _cases("0.6B", kind, "4x2048", "full", compiled=True)
    yield from _cases("0.6B", "lora", "4x2048", "selective", compiled=True)
    yield from _cases("0.6B", "full", "4x2048", "selective", compiled=True)
    yield from _cases("0.6B", "lora", "16x512 1x8192 16x2048", compiled=True)
    (lora,) = _cases("0.6B", "lora", "4x2048", compiled=True)
    (dora,) = _cases("0.6B", "dora", "4x2048", compiled=True)
    (full,) = _cases("0.6B", "full", "4x2048", compiled=True)
    yield _changed(dora, dropout=0.1)
    yield _changed(dora, dropout=0.1, checkpointing="full")
    yield _changed(lora, accumulation=2)
    yield _changed(lora, loss_kernel="full_logits")
    yield _changed(lora, dropout=0.1)
    yield _changed(full, accumulation=2)
    for kind in kinds:
        for case in _cases("0.6B", kind, "2x2048", compiled=True):
            yield _changed(case, graphed=True)
    yield _changed(lora, graphed=True, micro_batch_size=8)


def _larger() -> Iterator[GridCase]:
    yield from _cases("1.7B", "lora", "1x2048 8x1024")
    yield from _cases("1.7B", "lora", "4x2048", "selective")
    yield from _cases("1.7B", "lora", "8x2048", "full")
    yield from _cases("1.7B", "dora", "2x2048")
    yield from _cases("1.7B", "qlora", "4x2048")
    yield from _cases("1.7B", "full", "2x2048")
    yield from _cases("1.7B", "full", "4x2048", "full")
    yield from _cases("1.7B", "lora", "4x2048", compiled=True)
    yield from _cases("1.7B", "lora", "8x1024", "full", compiled=True)
    yield from _cases("1.7B", "dora", "4x2048", compiled=True)
    yield from _cases("1.7B", "qlora", "4x2048", "selective", compiled=True)
    yield from _cases("1.7B", "full", "4x2048", compiled=True)
    yield from _cases("4B", "lora", "2x2048")
    yield from _cases("4B", "lora", "1x8192", "full")
    yield from _cases("4B", "dora", "1x2048")
    yield from _cases("4B", "qlora", "2x2048", "selective")
    yield from _cases("4B", "full", "1x2048", "full")
    yield from _cases("4B", "lora", "2x2048", compiled=True)
    yield from _cases("4B", "lora", "1x4096", "selective", compiled=True)
    yield from _cases("4B", "dora", "2x2048", "full", compiled=True)
    yield from _cases("4B", "qlora", "2x2048", compiled=True)
    yield from _cases("4B", "full", "2x2048", "full", compiled=True)
    yield from _cases("8B", "lora", "1x2048")
    yield from _cases("8B", "lora", "2x4096", "full")
    yield from _cases("8B", "dora", "1x2048", "full")
    yield from _cases("8B", "qlora", "1x2048")
    (full,) = _cases("8B", "full", "1x2048", "full")
    yield _changed(full, optimizer="adamw_bnb_8bit")
    yield from _cases("8B", "lora", "2x2048", compiled=True)
    yield from _cases("8B", "qlora", "4x2048", "full", compiled=True)


def _fp8() -> Iterator[GridCase]:
    for case in (
        *_cases("0.6B", "lora", "2x2048 16x512 1x8192"),
        *_cases("0.6B", "lora", "8x2048", "full"),
        *_cases("0.6B", "dora", "4x2048"),
        *_cases("0.6B", "dora", "8x1024", "full"),
        *_cases("1.7B", "lora", "1x2048 8x1024"),
        *_cases("4B", "lora", "2x2048"),
        *_cases("8B", "lora", "1x2048"),
        *_cases("8B", "lora", "2x4096", "full"),
        *_cases("0.6B", "lora", "4x2048 16x2048", compiled=True),
        *_cases("8B", "lora", "2x2048", compiled=True),
        *_cases("0.6B", "full", "2x2048 8x1024"),
        *_cases("0.6B", "full", "8x2048", "full"),
        *_cases("0.6B", "full", "4x2048", compiled=True),
        *_cases("1.7B", "full", "2x2048"),
        *_cases("1.7B", "full", "4x2048", compiled=True),
    ):
        yield _changed(case, fp8=True)
    (lora,) = _cases("0.6B", "lora", "4x2048")
    yield _changed(lora, fp8=True, dropout=0.1)
    yield _changed(lora, fp8=True, compiled=True, graphed=True, micro_batch_size=2)


def _bf16_weights() -> Iterator[GridCase]:
    for case in (
        *_cases("0.6B", "full", "2x2048 8x1024"),
        *_cases("0.6B", "full", "8x2048", "full"),
        *_cases("0.6B", "full", "4x2048", compiled=True),
        *_cases("1.7B", "full", "2x2048"),
        *_cases("1.7B", "full", "4x2048", "full"),
    ):
        yield _changed(case, bf16_weights=True)
    for case in (
        *_cases("0.6B", "full", "4x2048"),
        *_cases("1.7B", "full", "2x2048", "full"),
        *_cases("4B", "full", "1x2048", "full"),
    ):
        yield _changed(case, bf16_weights=True, optimizer="adamw_bnb_8bit")
    for case in (
        *_cases("0.6B", "full", "2x2048 8x1024"),
        *_cases("1.7B", "full", "4x2048", "full"),
        *_cases("8B", "full", "1x2048", "full"),
    ):
        yield _changed(case, bf16_weights=True, optimizer="adamw_bnb_8bit", optimizer_in_backward=True)
    for case in (*_cases("0.6B", "full", "2x2048"), *_cases("1.7B", "full", "2x2048", "full")):
        yield _changed(case, bf16_weights=True, optimizer="paged_adamw_8bit", optimizer_in_backward=True)


def _tiny() -> Iterator[GridCase]:
    kinds: tuple[Kind, ...] = ("lora", "dora", "full")
    for kind in kinds:
        yield from _cases(TINY, kind, "2x64")
    levels: tuple[Checkpointing, ...] = ("selective", "full")
    for level in levels:
        yield from _cases(TINY, "lora", "1x128", level)
    (lora,) = _cases(TINY, "lora", "2x64")
    yield _changed(lora, accumulation=2, dropout=0.1)
    yield _changed(lora, loss_kernel="full_logits")
    yield _changed(lora, compiled=True, compile_backend="aot_eager")
    (full,) = _cases(TINY, "full", "2x64")
    yield _changed(full, bf16_weights=True)
    yield from _cases(TINY, "qlora", "2x64")  # skipped without a GPU


GRID: tuple[GridCase, ...] = (
    *_small_eager(),
    *_small_compiled(),
    *_larger(),
    *_fp8(),
    *_bf16_weights(),
    *_tiny(),
)


def select_cases(bases: Sequence[str], pattern: str | None = None) -> tuple[GridCase, ...]:
    """Return cases in the grid's order; a pattern is part of a name, or a glob: lora, 0.6B-*-compiled*."""
    unknown = [name for name in bases if name not in ALL_BASES]
    if unknown:
        raise InputError(f"--bases {unknown[0]}: no such base in the grid", hint=f"one of {', '.join(ALL_BASES)}")
    glob = "*" if pattern is None else pattern if "*" in pattern else f"*{pattern}*"
    cases = tuple(case for case in GRID if case.base in bases and fnmatch.fnmatchcase(case.name, glob))
    if not cases:
        raise InputError(f"--only {pattern}: no matching case of {', '.join(bases)}", hint="--list shows all cases")
    return cases
