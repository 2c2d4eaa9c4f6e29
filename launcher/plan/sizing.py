"""What has to fit: one value that the search, the ladder and the advice all work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from launcher.choices import UNPACKED_SIZES, UNRECORDABLE_ATTENTION, Checkpointing
from launcher.hardware import Hardware
from launcher.memory import Recipe, joins_mlp
from launcher.plan.basics import Basics
from launcher.plan.calibration import Calibration
from launcher.plan.situation import Situation
from launcher.shapes import ModelShape
from launcher.speed import Workload
from launcher.units import GIB

LEVELS: tuple[Checkpointing, ...] = ("none", "selective", "full")
# Fragmentation, the driver's own share, and what the prediction may be wrong by.
_GPU_HEADROOM = 0.08
CPU_HEADROOM = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    card_bytes: int
    free_bytes: int
    headroom_bytes: int
    host_bytes: int  # CPU memory of a node
    failed_bytes: int | None = None  # a plan that was predicted to need so much ran out of memory here

    @property
    def usable_bytes(self) -> int:
        usable = self.free_bytes - self.headroom_bytes
        return usable if self.failed_bytes is None else min(usable, self.failed_bytes - 1)

    @property
    def usable_host_bytes(self) -> int:
        return int(self.host_bytes * (1 - CPU_HEADROOM))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    shape: ModelShape
    hardware: Hardware
    recipe: Recipe
    workload: Workload
    global_batch_size: int
    slot_tokens: float  # computed for one sequence of the batch, what fills it up included
    budget: Budget
    levels: tuple[Checkpointing, ...]  # of gradient checkpointing, from none to all, as far as they may be chosen
    gradient_bytes: float
    calibration: Calibration
    may_capture: bool  # a micro-step of one process may be launched as one graph

    @property
    def num_trained(self) -> float:
        return self.gradient_bytes / 4

    @property
    def slots_per_rank(self) -> int:
        return ceil(self.global_batch_size / self.hardware.num_ranks)


def make_budget(hardware: Hardware) -> Budget:
    host = int(hardware.ram_gib_per_node * GIB)
    if hardware.gpu is None:
        return Budget(card_bytes=host, free_bytes=host, headroom_bytes=int(host * CPU_HEADROOM), host_bytes=host)
    card = hardware.gpu.memory_bytes
    return Budget(
        card_bytes=card,
        free_bytes=hardware.free_vram_bytes,
        headroom_bytes=int(card * _GPU_HEADROOM),
        host_bytes=host,
    )


def make_workload(situation: Situation, basics: Basics) -> Workload:
    return Workload(
        shape=situation.base,
        adapter=basics.adapter.kind,
        quantization=basics.quantization_kind,
        compute_dtype=basics.precision.compute_dtype,
        compiled=True,
        checkpointing="none",
        document_tokens=min(situation.rows.mean_tokens, situation.config.max_seq_length),
        repeated=basics.adapter.repeated_modules,
        drops=basics.adapter.dropout > 0,
        joined=joins_mlp(situation.base, _make_recipe(situation, basics, compiled=True)),
    )


def make_sizing(situation: Situation, basics: Basics, workload: Workload) -> Sizing:
    return Sizing(
        shape=situation.base,
        hardware=situation.hardware,
        recipe=_make_recipe(situation, basics, workload.compiled),
        workload=workload,
        global_batch_size=situation.config.global_batch_size,
        slot_tokens=estimate_slot_tokens(situation),
        budget=replace(make_budget(situation.hardware), failed_bytes=situation.options.failed_bytes),
        levels=_allowed_levels(situation),
        gradient_bytes=4.0 * basics.adapter.trainable_parameters,
        calibration=situation.options.calibration,
        may_capture=may_capture(situation, basics),
    )


def may_capture(situation: Situation, basics: Basics) -> bool:
    """Whether micro-steps of a process could be launched as a CUDA graph, if there is room."""
    is_asked = situation.config.torch_compile_mode in (None, "reduce-overhead")
    return situation.gpu is not None and is_asked and not why_not_captured(situation, basics)


def likely_captured(situation: Situation, basics: Basics) -> bool:
    """Before anything is sized."""
    return may_capture(situation, basics) and (situation.num_ranks == 1 or basics.adapter.kind != "full")


def why_not_captured(situation: Situation, basics: Basics) -> str:
    if basics.attention.backend in UNRECORDABLE_ATTENTION:
        return f"attention by {basics.attention.backend} has another shape in each micro-batch"
    if basics.loss_kernel != "fused" or basics.precision.loss_scaling:
        return "what is computed waits for the host"
    if basics.quantization_kind == "int8":
        return "8-bit products wait for the host"
    return "" if situation.config.packing else "rows that are not packed have many shapes"


def estimate_slot_tokens(situation: Situation) -> float:
    config = situation.config
    if config.packing:
        return config.max_seq_length
    filling = config.max_seq_length / (2 * UNPACKED_SIZES)  # half a size on average, shared by the rows
    return min(config.max_seq_length, situation.rows.mean_tokens + filling)


def _allowed_levels(situation: Situation) -> tuple[Checkpointing, ...]:
    wanted = situation.config.gradient_checkpointing
    if wanted is None:
        return LEVELS
    return ("full",) if wanted is True else ("none",) if wanted is False else ("selective",)


def _make_recipe(situation: Situation, basics: Basics, compiled: bool) -> Recipe:
    """At the smallest size; the search replaces what it decides."""
    return Recipe(
        adapter=basics.adapter.kind,
        rank=basics.adapter.rank,
        target_modules=basics.adapter.target_modules,
        adapter_dropout=basics.adapter.dropout,
        quantization=basics.quantization_kind,
        compute_dtype=basics.precision.compute_dtype,
        base_dtype=basics.precision.base_dtype,
        trainable_dtype=basics.precision.trainable_dtype,
        optimizer=basics.optimizer.name,
        checkpointing="none",
        compiled=compiled,
        loss_kernel=basics.loss_kernel,
        attention=basics.attention.backend,
        sequence_length=situation.config.max_seq_length,
        micro_batch_size=1,
        strategy="single",
        offload="none",
        num_ranks=situation.num_ranks,
        on_gpu=situation.gpu is not None,
        has_kernels=situation.gpu is None or situation.gpu.has_kernels,
    )
