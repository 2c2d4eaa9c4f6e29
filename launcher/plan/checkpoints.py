"""How checkpoints are saved: gathered on rank 0, or in shards if the CPU memory of its node is too small for that."""

from __future__ import annotations

from launcher.core.choices import DEEPSPEED_STRATEGIES, DTYPE_BYTES, EIGHT_BIT_OPTIMIZERS, Dtype, OptimizerName
from launcher.core.units import GIB, format_gib
from launcher.plan.context import PlanContext, plan_decision
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.model import Decision
from launcher.plan.search import Layout, estimate_layout_memory

SHARD_BYTES = GIB // 2  # of one file of a rank; twice this is in host memory while it is written
_MUCH_OF_HOST_MEMORY = 0.5


def count_state_bytes(trainable_dtype: Dtype, optimizer: OptimizerName) -> int:
    """Return an upper bound of a checkpoint's bytes per trained parameter: weight and two moments, FP32 or 8-bit."""
    is_small = trainable_dtype == "bf16" and optimizer in EIGHT_BIT_OPTIMIZERS
    return DTYPE_BYTES[trainable_dtype] + (3 if is_small else 8)  # not 2: moments of embeddings are FP32


def decide_checkpoints(
    context: PlanContext, inputs: SearchInputs, layout: Layout
) -> tuple[bool, int, tuple[Decision, ...]]:
    """Return whether checkpoints are sharded, the CPU memory that saving takes on a node, and the decision.

    Adapters are small and always gathered, in PEFT's format; only full fine-tuning has a decision.
    """
    memory, ranks = estimate_layout_memory(inputs, layout), max(1, inputs.hardware.gpus_per_node)
    trained = int(inputs.num_trained)
    gathered = count_state_bytes(inputs.recipe.trainable_dtype, inputs.recipe.optimizer) * trained
    if context.config.adapter_type != "full":
        return False, gathered, ()
    used = ranks * (memory.host_bytes if context.gpu is not None else memory.total_bytes)
    free = max(0, inputs.budget.host_bytes - used)
    assumed = f" (of {inputs.hardware.ram_gib_per_node:.0f} GiB, assumed; --ram sets them)"
    host = f"of the {format_gib(free)} of CPU memory that the training leaves on a node"
    host += assumed if inputs.hardware.is_ram_assumed else ""
    if gathered <= _MUCH_OF_HOST_MEMORY * free:
        reason = f"weights and optimizer states need {format_gib(gathered)} {host}; written in the background"
        return False, gathered, (plan_decision("checkpoint writing", "gathered on rank 0", reason),)
    largest = 4 * inputs.shape.vocab_size * inputs.shape.hidden_size
    sharded = min(gathered, 2 * SHARD_BYTES * ranks + largest)
    value = "tensor by tensor on rank 0" if layout.strategy in DEEPSPEED_STRATEGIES else "one set of shards per rank"
    reason = (
        f"gathering weights and optimizer states on rank 0 needs {format_gib(gathered)} {host}; "
        f"this needs {format_gib(sharded)}, and training waits until a checkpoint is on disk"
    )
    return True, sharded, (plan_decision("checkpoint writing", value, reason),)
