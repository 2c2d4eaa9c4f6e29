"""docs/gpus.md: what the plan makes of usual cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import DoesNotFitError
from launcher.guides.environment import plain_environment
from launcher.inputs import Request, plan_request
from launcher.plan import Plan
from launcher.plan.model import ScalePoint
from launcher.units import format_count, format_gib

ROOT = Path(__file__).resolve().parents[2]
EXPERT = "experts/neo4j/manifest.json"
SEVERAL = ("rtx4080super", "rtx4090", "a5000", "rtx5090", "a100", "h100")
CARDS = ("rtx3060", "rtx4070", "rtx4080super", "rtx4090", "a5000", "rtx5090", "a100", "h100", "h200")
_RAM_GIB = 64.0  # of the machine around the card: room for what is offloaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    title: str
    base: str | None = None
    overrides: tuple[str, ...] = ()


WORKS = (
    Work(title="the expert as it is: Qwen3-0.6B, LoRA"),
    Work(title="Qwen3-8B, LoRA in BF16", base="Qwen/Qwen3-8B"),
    Work(title="Qwen3-8B, QLoRA (NF4)", base="Qwen/Qwen3-8B", overrides=("base_models.0.quantization=int4",)),
)
_HEAD = """# Cards

What `launcher plan neo4j --gpu CARD` decides for usual cards: 48 sequences of 2,048 tokens a step, whatever the
card. Made by `make docs`; `make check` holds it. Memory is predicted (79 configurations on an H200, before they
ran: median error 0.3 %, worst 3.2 %); speed is measured on an H200 and scaled by data sheet for every other card, so
take it as a hint. None of the others was at hand.
"""
_SEVERAL = """## Several cards

`launcher plan neo4j --gpu CARD --gpus 8 --base Qwen/Qwen3-8B`: tokens a second, and in brackets what each card does of
what one alone does. On paper: no run on more than one card was measured by us. The plan says what is sent over which
link, how much of it is waited for, and what it assumes ([PERFORMANCE.md](PERFORMANCE.md)).

| card | 1 | 2 | 4 | 8 | link, as counted on |
|---|---|---|---|---|---|
"""
_TAIL = """## When it does not go well

- **Out of memory.** Nothing has to be done: the run goes on one rung lower (smaller micro-batch, then gradient
  checkpointing, then offload), with the same global batch, and remembers it for the next plan. `launcher plan`
  shows the rungs. Other programs on the card are named by `launcher doctor`.
- **Unstable loss.** Steps whose loss or gradients are no numbers are passed over (`--max-bad-steps`); `launcher
  doctor --run RUN` tells a loss that jumps. Then: `--set training.config.learning_rate=…` halved, `--set
  training.config.warmup_ratio=0.1`, `max_grad_norm` 0.5. Cards before Ampere have no BF16: FP16 with loss scaling,
  as the plan says.
- **A CPU that starves the GPU.** Rows are tokenised and packed once and read from a memory map, so two workers
  suffice (data wait was under 0.3 % of a step on an H200). Where `time/data_wait_share` is high all the same:
  `--set training.config.dataloader_num_workers=4`, prepared data on a local disk (`LAUNCHER_DATA_DIR`), a larger
  /dev/shm in containers.
- **Slow, and the card is not busy.** `launcher train … --profile-steps 10:15` says what cost most and how long it
  waited.
"""


def render_cards() -> str:
    with plain_environment():
        works = [_render_work(work) for work in WORKS]
        return "\n".join([_HEAD, *works, _SEVERAL + _render_several(), _TAIL])


def _render_several() -> str:
    rows = []
    for card in SEVERAL:
        request = Request(expert=str(ROOT / EXPERT), gpu=card, gpus_per_node=8, base=WORKS[1].base)
        scaling = plan_request(request).plan.speed.scaling
        assert scaling is not None
        cells = [_render_point(point, scaling.reference_ranks) for point in scaling.points]
        last = scaling.points[-1]
        rows.append(f"| `{card}` | {' | '.join(cells)} | {last.link}, {last.link_gb_per_second:.0f} GB/s |\n")
    return "".join(rows)


def _render_point(point: ScalePoint, reference_ranks: int) -> str:
    """Strategies that differ from row to row are named."""
    how = "offload" if point.offload != "none" else "" if point.strategy in ("single", "ddp") else point.strategy
    share = f"{100 * point.efficiency:.0f} %" if point.num_ranks > reference_ranks else ""
    more = ", ".join(filter(None, (share, how)))
    return format_count(point.tokens_per_second) + (f" ({more})" if more else "")


def _render_work(work: Work) -> str:
    base = f" --base {work.base}" if work.base else ""
    more = "".join(f" --set {override}" for override in work.overrides)
    lines = [
        f"## {work.title[0].upper()}{work.title[1:]}",
        "",
        f"`launcher plan neo4j --gpu CARD{base}{more}`",
        "",
        "| card | memory | micro-batch x steps | recomputed | strategy | predicted | tokens/s, about |",
        "|---|---|---|---|---|---|---|",
        *_render_cards(work),
        "",
    ]
    return "\n".join(lines)


def _render_cards(work: Work) -> Iterator[str]:
    for card in CARDS:
        request = Request(
            expert=str(ROOT / EXPERT),
            gpu=card,
            base=work.base,
            overrides=work.overrides,
            cpu_cores_per_node=16,
            ram_gib_per_node=_RAM_GIB,
        )
        try:
            yield _render_plan(card, plan_request(request).plan)
        except DoesNotFitError:
            yield f"| `{card}` | | does not fit | | | | |"


def _render_plan(card: str, plan: Plan) -> str:
    batch, rate = plan.batch, plan.speed.tokens_per_second
    strategy = "one process" if plan.strategy == "single" else plan.strategy
    moved = {"none": "", "optimizer": ", optimizer on the CPU", "optimizer_and_parameters": ", all on the CPU"}
    cells = (
        f"`{card}`",
        format_gib(plan.memory.card_bytes),
        f"{batch.micro_batch_size} x {batch.gradient_accumulation_steps}",
        {"none": "nothing", "selective": "cheap parts", "full": "every layer"}[plan.checkpointing],
        f"{strategy}{moved[plan.offload]}",
        format_gib(plan.memory.total_bytes),
        "" if rate is None else format_count(rate),
    )
    return f"| {' | '.join(cells)} |"
