"""The ladder: from the loop that trainings without a launcher have to ours, one optimisation a rung.

A rung takes one value of a plan in place of the unoptimised one. Where the plan keeps the old value, or the hardware
leaves no choice, the rung is not there, and the plan's own reason says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.choices import Checkpointing, LossKernel, OptimizerName
from launcher.plan.model import Plan
from launcher.values import Frozen

SMALL_MICRO_BATCH = 2  # rows: what manifests asked for where memory was not predicted
_WITHOUT_BORDERS = ("sdpa", "eager")  # attention that takes documents in groups of like length, not end to end


class Setup(Frozen):
    """How a rung's loop trains. Rows, sequences a step and what is learnt are the plan's, on every rung."""

    tokenised: Literal["on the fly", "before"] = "on the fly"
    rows: Literal["padded", "packed"] = "padded"
    precision: Literal["fp32", "tf32", "planned"] = "fp32"
    attention: Literal["eager", "sdpa", "planned"] = "eager"
    optimizer: OptimizerName = "adamw_torch"
    loss: LossKernel = "full_logits"
    checkpointing: Checkpointing = "full"
    micro_batch_size: int = SMALL_MICRO_BATCH  # rows where they are padded, sequences where they are packed
    is_compiled: bool = False
    num_workers: int = 0

    def with_change(self, change: Change) -> Setup:
        return Setup.model_validate({**self.model_dump(), **change})


Change = dict[str, str | int | bool]
BEFORE = Setup()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    key: str
    title: str
    change: Change
    missing: str = ""  # why it is not here


def make_rungs(plan: Plan) -> tuple[Rung, ...]:
    """In the order in which they are climbed."""
    return tuple(rung for make in _MAKERS for rung in make(plan))


def _missing(plan: Plan, decision: str, otherwise: str) -> str:
    """By the plan's own words."""
    found = next((one for one in plan.decisions if one.name == decision), None)
    return otherwise if found is None else f"the plan has {found.value}: {found.reason}"


def _tokenising(_plan: Plan) -> Iterator[Rung]:
    yield Rung(key="tokenised", title="tokenised before the run", change={"tokenised": "before"})


def _packing(plan: Plan) -> Iterator[Rung]:
    missing = "" if plan.batch.packed else _missing(plan, "global batch", "the manifest asks for rows one by one")
    yield Rung(key="packing", title="rows packed, not padded", change={"rows": "packed"}, missing=missing)


def _precision(plan: Plan) -> Iterator[Rung]:
    gpu, dtype = plan.hardware.gpu, plan.precision.compute_dtype
    no_tf32 = "no GPU" if gpu is None else "" if gpu.has_tf32 else f"{gpu.title} has no TF32"
    yield Rung(key="tf32", title="FP32 -> TF32", change={"precision": "tf32"}, missing=no_tf32)
    missing = _missing(plan, "precision", "the plan computes in FP32") if dtype == "fp32" else ""
    name = "BF16" if dtype == "fp32" else dtype.upper()
    title = name if no_tf32 else f"TF32 -> {name}"
    yield Rung(key="half", title=title, change={"precision": "planned"}, missing=missing)


def _attention(plan: Plan) -> Iterator[Rung]:
    backends = (plan.attention.backend, *plan.attention.fallbacks)
    capped = "" if set(backends) != {"eager"} else _missing(plan, "attention", "this base allows eager attention alone")
    yield Rung(key="sdpa", title="eager attention -> SDPA", change={"attention": "sdpa"}, missing=capped)
    has_documents = plan.attention.backend not in _WITHOUT_BORDERS
    missing = "" if has_documents else _missing(plan, "attention", "no variable-length kernel here")
    name = plan.attention.backend.replace("_", " ") if has_documents else "variable-length flash"
    yield Rung(key="varlen", title=f"SDPA -> {name}", change={"attention": "planned"}, missing=missing)


def _optimizer(plan: Plan) -> Iterator[Rung]:
    name = plan.optimizer.name
    missing = _missing(plan, "optimizer", f"the plan has {name}") if name == BEFORE.optimizer else ""
    title = "fused AdamW" if name in ("adamw_torch_fused", BEFORE.optimizer) else name
    yield Rung(key="optimizer", title=title, change={"optimizer": name}, missing=missing)


def _loss(plan: Plan) -> Iterator[Rung]:
    missing = _missing(plan, "loss", "the plan holds the logits whole") if plan.loss_kernel == BEFORE.loss else ""
    title = f"full logits -> {plan.loss_kernel} loss"
    yield Rung(key="loss", title=title, change={"loss": plan.loss_kernel}, missing=missing)


def _checkpointing(plan: Plan) -> Iterator[Rung]:
    level = plan.checkpointing
    missing = _missing(plan, "gradient checkpointing", "the plan recomputes all") if level == "full" else ""
    title = f"gradient checkpointing {'off' if level in ('none', 'full') else level}"
    yield Rung(key="checkpointing", title=title, change={"checkpointing": level}, missing=missing)


def _batch(plan: Plan) -> Iterator[Rung]:
    size = plan.batch.micro_batch_size
    missing = "" if size > SMALL_MICRO_BATCH else _missing(plan, "split", f"the plan takes {size} a micro-step")
    yield Rung(
        key="batch",
        title=f"micro-batch {SMALL_MICRO_BATCH} -> {size if not missing else 'largest'}",
        change={"micro_batch_size": size},
        missing=missing,
    )


def _compile(plan: Plan) -> Iterator[Rung]:
    missing = _missing(plan, "torch.compile", "the plan compiles nothing") if plan.compile is None else ""
    yield Rung(key="compile", title="torch.compile", change={"is_compiled": True}, missing=missing)


def _workers(plan: Plan) -> Iterator[Rung]:
    count = plan.loader.num_workers
    missing = "" if count else _missing(plan, "loader workers", "the plan has none")
    yield Rung(
        key="workers",
        title=f"loader workers 0 -> {count or 'N'}",
        change={"num_workers": count},
        missing=missing,
    )


_MAKERS: tuple[Callable[[Plan], Iterator[Rung]], ...] = (
    _tokenising,
    _packing,
    _precision,
    _attention,
    _optimizer,
    _loss,
    _checkpointing,
    _batch,
    _compile,
    _workers,
)

Stack = Literal["cumulative", "alone"]


class Climb(Frozen):
    """One thing to measure: a rung on top of those below it, or alone on top of the unoptimised loop."""

    key: str
    title: str
    stack: Stack
    setup: Setup | None  # None: the launcher's own loop
    missing: str = ""


def make_climbs(rungs: tuple[Rung, ...]) -> tuple[Climb, ...]:
    """Before, each rung on all below it, ours; then each alone; and before again, to see whether the machine drifts."""
    climbs, setup = [Climb(key="before", title="before", stack="cumulative", setup=BEFORE)], BEFORE
    for rung in rungs:
        setup = setup if rung.missing else setup.with_change(rung.change)
        climbs.append(Climb(key=rung.key, title=rung.title, stack="cumulative", setup=setup, missing=rung.missing))
    climbs.append(Climb(key="launcher", title="the launcher's own loop", stack="cumulative", setup=None))
    climbs += [
        Climb(
            key=rung.key,
            title=rung.title,
            stack="alone",
            setup=BEFORE if rung.missing else BEFORE.with_change(rung.change),
            missing=rung.missing,
        )
        for rung in rungs
    ]
    climbs.append(Climb(key="before", title="before, again", stack="alone", setup=BEFORE))
    return tuple(climbs)
