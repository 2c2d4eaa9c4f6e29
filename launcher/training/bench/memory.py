"""`python -m launcher.training.bench.memory SPEC`: cases of the memory grid, one a line on stdin, a row for each.

A case is built and stepped as a training is. What torch still holds of the case before would falsify the next: then,
and after any error but a full memory, this process ends, and another goes on.
"""

from __future__ import annotations

import gc
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

from launcher.bench.memory_cases import GridCase
from launcher.bench.memory_grid import Answer, GridSpec
from launcher.bench.memory_plans import MEAN_TOKENS, plan_case
from launcher.bench.memory_rows import GridRow
from launcher.errors import LauncherError, first_line
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.plan.recipes import recipe_of
from launcher.training.assembly import assemble
from launcher.training.bench.documents import write_random_store
from launcher.training.bench.telling import Tell, run_measuring
from launcher.training.chronicle import find_versions
from launcher.training.clock import StepClock
from launcher.training.feeding import feed
from launcher.training.loop import StepResult, train_step
from launcher.training.run import Run
from launcher.training.starting import start
from launcher.units import MIB

_MOST_LEFT_OVER = 64 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    seconds: tuple[float, ...]
    num_tokens: tuple[int, ...]
    warm_seconds: float
    static_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        steps = zip(self.num_tokens, self.seconds, strict=True)
        return statistics.median(tokens / seconds for tokens, seconds in steps)


def measure_case(case: GridCase, spec: GridSpec) -> Answer:
    began, leftover = time.perf_counter(), clean_up()
    failed = GridRow(case=case.name, model=case.base)
    goes_on = True
    try:
        row = _measure(case, spec)
    except torch.OutOfMemoryError as error:
        row = failed.model_copy(update={"error": f"out of memory: {first_line(error)}"})
    except LauncherError as error:  # planned, and it does not fit, or this machine cannot do it at all
        row = failed.model_copy(update={"left_out": error.title})
    except Exception as error:  # one case that fails must not cost the others, nor falsify them
        goes_on, row = False, failed.model_copy(update={"error": f"{type(error).__name__}: {first_line(error)}"})
    still_held = clean_up() if goes_on else 0
    facts = {
        "leftover_bytes": leftover,
        "case_seconds": round(time.perf_counter() - began, 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": find_versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    return Answer(row=row.model_copy(update=facts), goes_on=goes_on and still_held <= _MOST_LEFT_OVER)


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
            recipe={**asdict(recipe_of(run.plan)), "target_modules": list(run.plan.adapter.target_modules)},
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
            warm_seconds=round(steps.warm_seconds, 2),
            built_seconds=round(built_seconds, 2),
            num_graphs=counters["stats"]["unique_graphs"],
            num_graph_breaks=sum(counters["graph_break"].values()),
        )


def _build(plan: Plan, folder: Path, num_steps: int) -> Run:
    store = write_random_store(
        folder,
        num_packs=plan.batch.global_batch_size * num_steps,
        sequence_length=plan.batch.sequence_length,
        vocab_size=plan.base.vocab_size,
        mean_tokens=min(MEAN_TOKENS, plan.batch.sequence_length),
    )
    paths = RunPaths(folder / "run")
    paths.logs.mkdir(parents=True)
    run, _ = assemble(plan, paths, store, (), start(plan))
    return run


def _step(run: Run, spec: GridSpec) -> _Steps:
    """Peaks and times are those of steady steps: the optimizer's state exists, and nothing is compiled any more."""
    on_gpu = run.engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what building took is not the steps': quantising holds a matrix unquantised
    batches = feed(run.batches(), run.plan.loader, is_beside=on_gpu)
    clock = StepClock(run.engine.device)
    began = time.perf_counter()
    _wait_for([train_step(run, step, batches, clock) for step in range(1, spec.warm_steps + 1)])
    warm_seconds = time.perf_counter() - began
    static_bytes = torch.cuda.memory_allocated() if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock.restart()
    results = [train_step(run, step, batches, clock) for step in range(spec.warm_steps + 1, spec.num_steps + 1)]
    return _Steps(
        seconds=_wait_for(results),
        num_tokens=tuple(result.num_tokens for result in results),
        warm_seconds=warm_seconds,
        static_bytes=static_bytes,
    )


def _wait_for(results: Sequence[StepResult]) -> tuple[float, ...]:
    """Their seconds; the host runs ahead of the device until here, as it does in a training."""
    return tuple(result.lap.seconds() for result in results)


def _measure_context() -> int:
    """What the process holds beside torch's allocator: the context and the loaded kernels."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def clean_up() -> int:
    """What is still allocated behind it."""
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


def measure_all(spec: GridSpec, tell: Tell) -> None:
    for line in sys.stdin:
        answer = measure_case(GridCase.model_validate_json(line), spec)
        tell(answer)
        if not answer.goes_on:
            return


def main() -> int:
    spec = GridSpec.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return run_measuring(lambda tell: measure_all(spec, tell))


if __name__ == "__main__":
    sys.exit(main())
