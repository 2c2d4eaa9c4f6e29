"""Out of memory: one rung down the planned ladder, in this process where it is alone, else by starting all anew.

With several ranks the others wait inside collectives: there the attempt ends, and the launcher starts the next one.
"""

from __future__ import annotations

import gc
from itertools import chain

import torch
from accelerate import Accelerator

from launcher.errors import first_line, say
from launcher.experience import remember_failure
from launcher.plan.ladder import take_rung
from launcher.plan.model import MemoryPlan, Plan
from launcher.training.engine import HalfUpdatedError
from launcher.training.products import forget
from launcher.training.run import Run
from launcher.units import bytes_to_gib, format_gib

_OWN_SHARE = 0.95  # of what was predicted, reserved by ourselves when memory ran out


def step_down(plan: Plan, accelerator: Accelerator, error: torch.OutOfMemoryError) -> Plan:
    """The plan that this process can go on with; raises the error where there is none."""
    if _is_our_own(plan):
        remember_failure(plan)
    lower = take_rung(plan)
    if lower is None or not _can_go_on(plan, lower, accelerator, error):
        raise error
    said = _shorten(error)
    action = plan.ladder[0].action
    say(f"warning: the memory is full ({said}); going on one rung lower: {action}")
    return lower


def _is_our_own(plan: Plan) -> bool:
    """Whether the prediction was too small. Where others hold the card, the next plan sees it for itself."""
    return torch.cuda.is_available() and torch.cuda.max_memory_reserved() >= _OWN_SHARE * plan.memory.allocated_bytes


def _shorten(error: BaseException) -> str:
    """torch explains its allocator at length."""
    return first_line(error).partition(" Including")[0]


def _can_go_on(plan: Plan, lower: Plan, accelerator: Accelerator, error: torch.OutOfMemoryError) -> bool:
    is_alone = accelerator.num_processes == 1 and plan.strategy in ("single", "ddp", "fsdp2")
    is_same_engine = (lower.strategy, lower.offload) == (plan.strategy, plan.offload)
    return is_alone and is_same_engine and not isinstance(error, HalfUpdatedError)


def make_room(run: Run, error: torch.OutOfMemoryError) -> bool:
    """For saving what was trained before the step that failed. False: it cannot be told what is of which step."""
    if isinstance(error, HalfUpdatedError) or run.engine.num_ranks > 1 or run.engine.is_deepspeed:
        return False
    run.engine.optimizer.zero_grad(set_to_none=True)
    forget(run.engine.module.products)
    _empty_cache()
    return True


def free_memory(accelerator: Accelerator) -> None:
    """All that an attempt has built."""
    accelerator.free_memory()
    torch._dynamo.reset()
    _empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # what the next attempt has is judged by itself


def _empty_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def explain_full_card(error: BaseException, plan: Plan) -> str:
    """Predicted against measured, and what is left to be tried."""
    said = _shorten(error)
    lines = [f"the GPU's memory is full: {said}", *_memory_table(plan.memory)]
    if plan.ladder:
        lines.append("what needs less, in this order (the global batch stays):")
        lines += [f"  {number}. {rung.action}" for number, rung in enumerate(plan.ladder, 1)]
    else:
        lines.append("nothing is left on the ladder: a smaller base, int4, a shorter max_seq_length, or more GPUs")
    return "\n".join(lines)


def _memory_table(memory: MemoryPlan) -> list[str]:
    rows = [(term.name, format_gib(term.num_bytes)) for term in memory.terms if term.num_bytes]
    rows += [("predicted", format_gib(memory.total_bytes)), ("free of the card", format_gib(memory.free_bytes))]
    if torch.cuda.is_available():
        measured = (("measured, allocated", torch.cuda.max_memory_allocated()),)
        reserved = (("measured, reserved", torch.cuda.max_memory_reserved()),)
        rows += [(name, f"{bytes_to_gib(value):.2f} GiB") for name, value in chain(measured, reserved)]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value:>12}" for name, value in rows]
