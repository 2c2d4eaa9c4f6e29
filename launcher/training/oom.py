"""Out of memory: retry with the plan's next fallback.

A single process retries by itself. With several ranks, the others wait in collectives: the attempt ends, and the
launcher starts the next one.
"""

from __future__ import annotations

import gc

import torch
from accelerate import Accelerator

from launcher.core.errors import first_line
from launcher.core.log import get_logger
from launcher.core.units import bytes_to_gib, format_gib
from launcher.plan.model import MemoryPlan, Plan
from launcher.plan.oom_fallbacks import apply_next_fallback
from launcher.runs.oom_history import remember_failure
from launcher.training.engine.engine import HalfUpdatedError
from launcher.training.engine.run import TrainingRun

log = get_logger(__name__)

_OWN_SHARE = 0.95  # of the predicted memory, reserved by this process when memory ran out


def fall_back(plan: Plan, accelerator: Accelerator, error: torch.OutOfMemoryError) -> Plan:
    """Return the plan of the next out-of-memory fallback, or raise `error` if this process cannot retry with one."""
    if _was_underestimated(plan):
        remember_failure(plan)
    fallback = apply_next_fallback(plan)
    if fallback is None or not _can_retry(plan, fallback, accelerator, error):
        raise error
    log.warning(f"out of memory ({_shorten(error)}); retrying with {plan.oom_fallbacks[0].action}")
    return fallback


def _was_underestimated(plan: Plan) -> bool:
    """Whether this process used about the predicted memory or more; if not, other processes filled the GPU."""
    return torch.cuda.is_available() and torch.cuda.max_memory_reserved() >= _OWN_SHARE * plan.memory.allocated_bytes


def _shorten(error: BaseException) -> str:
    """Return the error without torch's details about its allocator."""
    return first_line(error).partition(" Including")[0]


def _can_retry(plan: Plan, fallback: Plan, accelerator: Accelerator, error: torch.OutOfMemoryError) -> bool:
    is_single = accelerator.num_processes == 1 and plan.strategy in ("single", "ddp", "fsdp2")
    is_same_engine = (fallback.strategy, fallback.offload) == (plan.strategy, plan.offload)
    return is_single and is_same_engine and not isinstance(error, HalfUpdatedError)


def free_for_checkpoint(run: TrainingRun, error: torch.OutOfMemoryError) -> bool:
    """Free memory so that the steps before an out-of-memory error can be saved; return False if they cannot."""
    if isinstance(error, HalfUpdatedError) or run.engine.num_ranks > 1 or run.engine.is_deepspeed:
        return False
    run.engine.optimizer.zero_grad(set_to_none=True)
    run.engine.module.clear_cached_outputs()
    _empty_cache()
    return True


def free_memory(accelerator: Accelerator) -> None:
    """Free everything that an attempt built."""
    accelerator.free_memory()
    torch._dynamo.reset()
    _empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the next attempt is measured from zero


def _empty_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a CUDA graph may still run; torch does not wait for it before it unmaps its memory
        torch.cuda.empty_cache()


def format_oom_error(error: BaseException, plan: Plan) -> str:
    """Format an out-of-memory error with predicted and measured memory, and the remaining fallbacks."""
    lines = [f"out of memory: {_shorten(error)}", *_format_memory(plan.memory)]
    if plan.oom_fallbacks:
        lines.append("OOM fallbacks, in order (global batch unchanged):")
        lines += [f"  {number}. {fallback.action}" for number, fallback in enumerate(plan.oom_fallbacks, 1)]
    else:
        lines.append(f"no fallback is left: `launcher plan {plan.expert}` takes this into account and says what fits")
    return "\n".join(lines)


def _format_memory(memory: MemoryPlan) -> list[str]:
    rows = [(term.name, format_gib(term.num_bytes)) for term in memory.terms if term.num_bytes]
    rows += [("predicted", format_gib(memory.total_bytes)), ("free on the GPU", format_gib(memory.free_bytes))]
    if torch.cuda.is_available():
        rows += [
            ("measured, allocated", f"{bytes_to_gib(torch.cuda.max_memory_allocated()):.2f} GiB"),
            ("measured, reserved", f"{bytes_to_gib(torch.cuda.max_memory_reserved()):.2f} GiB"),
        ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value:>12}" for name, value in rows]
