"""Blocks of steps, side by side in turn, until there are enough of them to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher.bench.children import Child, started
from launcher.bench.order import Course, interleave
from launcher.bench.sides import Side
from launcher.bench.values import Block, Ready, Said, SideSpec, Timing

_MODULE = "launcher.training.bench.blocks"
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured."""

    repeats: int
    course: Course
    limit_seconds: float  # of one answer: a model that is built, a block


@dataclass(kw_only=True)
class Measured:
    blocks: list[Block] = field(default_factory=list)
    ready: dict[int, Ready] = field(default_factory=dict)  # by side
    is_kept: bool  # each side was one process throughout


def fit_together(sides: Sequence[Side]) -> bool:
    """Whether all models may stay loaded: by the plans' own prediction, with the headroom of one."""
    memory = [side.plan.memory for side in sides]
    return sum(plan.total_bytes for plan in memory) <= min(plan.usable_bytes for plan in memory)


def measure_sides(
    sides: Sequence[Side], stores: Sequence[Path], effort: Effort, folder: Path, *, is_kept: bool, tell: Tell
) -> Measured:
    """Kept: each side has one process that sleeps while another is timed. Else every block has a process of its own."""
    specs = [_make_spec(side, store, effort.course) for side, store in zip(sides, stores, strict=True)]
    measured = Measured(is_kept=is_kept)
    rounds = interleave(len(sides), effort.repeats)
    with _kept(specs, folder, effort, measured) if is_kept else _fresh(specs, folder, effort, measured) as measure:
        for number, order in enumerate(rounds, 1):
            for side in order:
                timing = measure(number, side)
                measured.blocks.append(Block(round=number, side=side, timing=timing))
                tell(_format_progress(number, effort.repeats, sides[side].label, timing))
    return measured


Measure = Callable[[int, int], Timing]  # of a round and a side


@contextmanager
def _kept(specs: Sequence[SideSpec], folder: Path, effort: Effort, measured: Measured) -> Iterator[Measure]:
    with ExitStack() as stack:
        children = []
        for side, spec in enumerate(specs):  # one after another: two that build at once would slow each other down
            child = stack.enter_context(started(_MODULE, spec, folder, f"side-{side + 1}"))
            measured.ready[side] = _read_ready(child, effort)
            children.append(child)
        yield lambda _number, side: _ask(children[side], effort)


@contextmanager
def _fresh(specs: Sequence[SideSpec], folder: Path, effort: Effort, measured: Measured) -> Iterator[Measure]:
    def measure(number: int, side: int) -> Timing:
        with started(_MODULE, specs[side], folder, f"side-{side + 1}-round-{number}") as child:
            measured.ready[side] = _read_ready(child, effort)
            return _ask(child, effort)

    yield measure


def _read_ready(child: Child, effort: Effort) -> Ready:
    ready = Said.model_validate_json(child.read(effort.limit_seconds)).ready
    assert ready is not None
    return ready


def _ask(child: Child, effort: Effort) -> Timing:
    child.tell("block")
    timing = Said.model_validate_json(child.read(effort.limit_seconds)).timing
    assert timing is not None
    return timing


def _make_spec(side: Side, store: Path, course: Course) -> SideSpec:
    warm, timed = course.count_steps(side.plan.batch.global_batch_size)
    return SideSpec(plan=side.plan, store=str(store.resolve()), warm_steps=warm, timed_steps=timed)


def _format_progress(number: int, repeats: int, label: str, timing: Timing) -> str:
    return f"round {number} of {repeats}, {label}: {timing.tokens_per_second:,.0f} tokens/s"
