"""Memory budget of the hardware, and the inputs of the search for a layout that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import UNPACKED_SIZES, UNRECORDABLE_ATTENTION, Checkpointing
from launcher.core.units import GIB
from launcher.hardware.model import Hardware
from launcher.plan.calibration import Calibration
from launcher.plan.context import PlanContext
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.estimate.communication import Exchange, make_exchange
from launcher.plan.estimate.memory.recipe import Recipe
from launcher.plan.estimate.step_time import Workload
from launcher.plan.estimator_inputs import make_simplest_recipe, make_workload
from launcher.plan.schedule import count_step_sequences

LEVELS: tuple[Checkpointing, ...] = ("none", "selective", "full")
# Reserve for fragmentation, the driver, and errors of the estimate.
_GPU_HEADROOM = 0.08
CPU_HEADROOM = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory of one GPU (without GPUs: of the machine), and CPU memory of one node."""

    device_bytes: int
    free_bytes: int
    headroom_bytes: int
    host_bytes: int  # CPU memory of a node
    oom_bytes: int | None = None  # prediction of a plan that ran out of memory here

    @property
    def usable_bytes(self) -> int:
        """Return the device memory that a plan may use: free minus headroom, or less after a plan ran out of memory."""
        usable = self.free_bytes - self.headroom_bytes
        return usable if self.oom_bytes is None else min(usable, self.oom_bytes - 1)

    @property
    def usable_host_bytes(self) -> int:
        """Return the CPU memory that a plan may use."""
        return int(self.host_bytes * (1 - CPU_HEADROOM))


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchInputs:
    """Inputs of the layout search, the OOM fallbacks and the suggestions; the search caches results per object."""

    shape: ModelShape
    hardware: Hardware
    recipe: Recipe
    workload: Workload
    global_batch_size: int
    step_sequences: int  # the global batch, or all of an epoch that has fewer
    slot_tokens: float  # tokens computed per sequence of the batch, padding included
    budget: Budget
    levels: tuple[Checkpointing, ...]  # allowed gradient checkpointing, least first
    gradient_bytes: float
    calibration: Calibration
    can_use_cuda_graph: bool  # a CUDA graph is possible if memory allows

    @property
    def num_trained(self) -> float:
        """Return the number of trainable parameters."""
        return self.gradient_bytes / 4

    @cached_property
    def exchange(self) -> Exchange:
        """Bytes of the weights and gradients that ranks exchange."""
        return make_exchange(self.workload, self.num_trained)

    @property
    def slots_per_rank(self) -> int:
        """Return how many sequences a rank can have in one step."""
        return ceil(self.global_batch_size / self.hardware.num_ranks)

    @property
    def filled_slots_per_rank(self) -> int:
        """Return how many sequences a rank has in one step; fewer if an epoch is smaller than the global batch."""
        return ceil(self.step_sequences / self.hardware.num_ranks)


def make_budget(hardware: Hardware) -> Budget:
    """Return the memory budget of the hardware."""
    host = int(hardware.ram_gib_per_node * GIB)
    if hardware.gpu is None:
        return Budget(device_bytes=host, free_bytes=host, headroom_bytes=int(host * CPU_HEADROOM), host_bytes=host)
    gpu_bytes = hardware.gpu.memory_bytes
    return Budget(
        device_bytes=gpu_bytes,
        free_bytes=hardware.free_vram_bytes,
        headroom_bytes=int(gpu_bytes * _GPU_HEADROOM),
        host_bytes=host,
    )


def make_search_inputs(context: PlanContext, settings: ModelSettings, *, compiled: bool) -> SearchInputs:
    """Return the inputs of the search for a layout."""
    length, rows = context.config.max_seq_length, context.rows
    recipe = make_simplest_recipe(settings, context.hardware, length, compiled=compiled)
    return SearchInputs(
        shape=context.base,
        hardware=context.hardware,
        recipe=recipe,
        workload=make_workload(context.base, recipe, min(rows.mean_tokens, length), rows.trained_share),
        global_batch_size=context.config.global_batch_size,
        step_sequences=count_step_sequences(context),
        slot_tokens=estimate_slot_tokens(context),
        budget=replace(make_budget(context.hardware), oom_bytes=context.options.oom_bytes),
        levels=_allowed_levels(context),
        gradient_bytes=4.0 * settings.adapter.trainable_parameters,
        calibration=context.options.calibration,
        can_use_cuda_graph=can_use_cuda_graph(context, settings),
    )


def can_use_cuda_graph(context: PlanContext, settings: ModelSettings) -> bool:
    """Return whether micro-steps could run as a CUDA graph if there is enough memory."""
    is_allowed = context.config.torch_compile_mode in (None, "reduce-overhead")
    return context.gpu is not None and is_allowed and not find_cuda_graph_obstacle(context, settings)


def find_cuda_graph_obstacle(context: PlanContext, settings: ModelSettings) -> str:
    """Return why a CUDA graph is impossible, or an empty string."""
    if settings.attention.backend in UNRECORDABLE_ATTENTION:
        return f"attention by {settings.attention.backend} has different shapes in every micro-batch"
    if settings.loss_kernel != "fused" or settings.precision.loss_scaling:
        return "the loss synchronizes with the host"
    if settings.optimizer.in_backward:
        return "the optimizer runs within the backward pass"
    if context.base.experts is not None:
        return "mixtures of experts run transformers' own code"
    return "" if context.config.packing else "without packing, shapes vary"


def estimate_slot_tokens(context: PlanContext) -> float:
    """Return the mean number of tokens computed per sequence of the batch, padding included."""
    config = context.config
    if config.packing:
        return config.max_seq_length
    padding = config.max_seq_length / (2 * UNPACKED_SIZES)  # half a bucket size on average
    return min(config.max_seq_length, context.rows.mean_tokens + padding)


def _allowed_levels(context: PlanContext) -> tuple[Checkpointing, ...]:
    level = context.config.gradient_checkpointing
    if level is None:  # selective checkpointing saves the results of 16-bit products, which FP8 does not have
        return ("none", "full") if context.config.precision == "fp8" else LEVELS
    return ("full",) if level is True else ("none",) if level is False else ("selective",)
