"""`python -m benchmarks.memory_grid.worker SPEC`: measures cases of the memory grid, one per line on stdin.

A case is built and trained like a training. If torch still holds memory of the previous case, which would falsify the
next one, or after any error but out of memory, this process exits and another one takes over.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters

from benchmarks.memory_grid.cases import GridCase
from benchmarks.memory_grid.grid import CaseReply, GridSpec
from benchmarks.memory_grid.plans import MEAN_TOKENS, plan_case
from benchmarks.memory_grid.rows import GridRow
from launcher.bench.workers.documents import write_random_store
from launcher.bench.workers.output import Send, run_worker
from launcher.core.errors import LauncherError, first_line
from launcher.core.run_paths import RunPaths
from launcher.core.units import MIB
from launcher.plan.estimator_inputs import recipe_from_plan
from launcher.plan.model import Plan
from launcher.training.build import build_run
from launcher.training.data.loader import build_loader
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train_step
from launcher.training.monitoring.step_results import StepResult
from launcher.training.monitoring.step_timer import StepTimer
from launcher.training.runtime.run_record import collect_versions

_MAX_LEFTOVER_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    seconds: tuple[float, ...]
    num_tokens: tuple[int, ...]
    warmup_seconds: float
    static_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        steps = zip(self.num_tokens, self.seconds, strict=True)
        return statistics.median(tokens / seconds for tokens, seconds in steps)


def measure_case(case: GridCase, spec: GridSpec) -> CaseReply:
    """Measure a case; errors become part of its row."""
    began, leftover = time.perf_counter(), clean_up()
    failed = GridRow(case=case.name, model=case.base)
    can_continue = True
    try:
        row = _measure(case, spec)
    except torch.OutOfMemoryError as error:
        row = failed.model_copy(update={"error": f"out of memory: {first_line(error)}"})
    except LauncherError as error:  # it does not fit, or this machine cannot run it
        row = failed.model_copy(update={"left_out": error.title})
    except Exception as error:  # must neither stop nor falsify the other cases
        can_continue, row = False, failed.model_copy(update={"error": f"{type(error).__name__}: {first_line(error)}"})
    still_allocated = clean_up() if can_continue else 0
    facts = {
        "leftover_bytes": leftover,
        "case_seconds": round(time.perf_counter() - began, 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": collect_versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    can_continue = can_continue and still_allocated <= _MAX_LEFTOVER_BYTES
    return CaseReply(row=row.model_copy(update=facts), can_continue=can_continue)


def _measure(case: GridCase, spec: GridSpec) -> GridRow:
    with tempfile.TemporaryDirectory(prefix="memory-case-") as folder:
        began = time.perf_counter()
        plan = plan_case(case, Path(folder), spec.num_steps).plan
        run = _build(plan, Path(folder), spec.num_steps)
        built_seconds = time.perf_counter() - began
        steps = _step(run, spec)
        on_gpu = run.engine.device.type == "cuda"
        return GridRow(
            case=case.name,
            model=case.base,
            recipe=json.loads(json.dumps(asdict(recipe_from_plan(run.plan)))),
            accumulation=case.accumulation,
            num_trainable=sum(parameter.numel() for parameter in run.engine.trained_parameters()),
            predicted_terms={term.name: term.num_bytes for term in plan.memory.terms},
            predicted_bytes=plan.memory.allocated_bytes,
            predicted_total_bytes=plan.memory.total_bytes,
            static_bytes=steps.static_bytes,
            peak_allocated_bytes=run.engine.peak_bytes if on_gpu else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
            context_bytes=_measure_context() if on_gpu else None,
            predicted_tokens_per_second=plan.speed.tokens_per_second,
            tokens_per_second=round(steps.tokens_per_second, 1),
            step_seconds=round(statistics.median(steps.seconds), 5),
            steps_seconds=tuple(round(seconds, 5) for seconds in steps.seconds),
            warm_seconds=round(steps.warmup_seconds, 2),
            built_seconds=round(built_seconds, 2),
            num_graphs=counters["stats"]["unique_graphs"],
            num_graph_breaks=sum(counters["graph_break"].values()),
        )


def _build(plan: Plan, folder: Path, num_steps: int) -> TrainingRun:
    store = write_random_store(
        folder,
        num_packs=plan.batch.global_batch_size * num_steps,
        sequence_length=plan.batch.sequence_length,
        vocab_size=plan.base.vocab_size,
        mean_tokens=min(MEAN_TOKENS, plan.batch.sequence_length),
    )
    paths = RunPaths(folder / "run")
    paths.logs.mkdir(parents=True)
    run, _ = build_run(plan, paths, store, (), build_accelerator(plan))
    return run


def _step(run: TrainingRun, spec: GridSpec) -> _Steps:
    """Measure steady steps: the optimizer's state exists, and nothing is compiled any more."""
    on_gpu = run.engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # building needs more, e.g. unquantized weights
    batches = build_loader(run.batches(), run.plan.loader, prefetch=on_gpu)
    timer = StepTimer(run.engine.device)
    began = time.perf_counter()
    _wait_for([train_step(run, step, batches, timer) for step in range(1, spec.warmup_steps + 1)])
    warmup_seconds = time.perf_counter() - began
    static_bytes = torch.cuda.memory_allocated() if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    timer.restart()
    results = [train_step(run, step, batches, timer) for step in range(spec.warmup_steps + 1, spec.num_steps + 1)]
    return _Steps(
        seconds=_wait_for(results),
        num_tokens=tuple(result.num_tokens for result in results),
        warmup_seconds=warmup_seconds,
        static_bytes=static_bytes,
    )


def _wait_for(results: Sequence[StepResult]) -> tuple[float, ...]:
    """Sync with the device and return the seconds of each step."""
    return tuple(result.timing.seconds() for result in results)


def _measure_context() -> int:
    """Return the GPU memory outside torch's allocator: CUDA context and loaded kernels."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def clean_up() -> int:
    """Free everything of the last case; return the bytes still allocated."""
    torch._dynamo.reset()
    counters.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    with suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure_all(spec: GridSpec, send: Send) -> None:
    """Measure a case per line on stdin."""
    for line in sys.stdin:
        reply = measure_case(GridCase.model_validate_json(line), spec)
        send(reply)
        if not reply.can_continue:
            return


if __name__ == "__main__":
    sys.exit(run_worker(GridSpec, measure_all))
