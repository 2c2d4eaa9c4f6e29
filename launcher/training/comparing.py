"""Are the nodes alike? Every difference at once, grouped so that the odd node is seen; what may differ is warned of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.choices import DEEPSPEED_STRATEGIES
from launcher.errors import Problem
from launcher.plan.model import Plan
from launcher.training.node_facts import NodeFacts
from launcher.units import format_gib

_CLOCK_SECONDS = 2.0  # further apart, logs and metrics of two nodes can no longer be read side by side
_SHOWN_DIGITS = 12
_MAX_SHOWN = 12
_MAX_NAMED = 3  # so many nodes are named one by one, with their hosts
_CHANGED = "+changes"  # behind a commit: compared by the files, which tell what was changed
# A trained weight and AdamW's two moments of it, in FP32.
_CHECKPOINT_BYTES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenNode:
    """As the first rank sees it."""

    facts: NodeFacts
    ahead_seconds: float = 0.0  # of the first rank's clock
    within_seconds: float = 0.0

    def __str__(self) -> str:
        return f"node {self.facts.node} ({self.facts.host})"


def find_problems(nodes: Sequence[SeenNode], plan: Plan) -> tuple[Problem, ...]:
    """What makes it impossible, or senseless, to train together."""
    return tuple(_find_problems(nodes, plan))


def find_warnings(nodes: Sequence[SeenNode], plan: Plan) -> tuple[str, ...]:
    return tuple(_find_warnings(nodes, plan))


def format_alike(nodes: Sequence[SeenNode]) -> str:
    first = nodes[0].facts
    commit = f"commit {_digits(_commit(first))}" if first.commit else f"launcher {first.versions['launcher']}"
    apart = max(abs(node.ahead_seconds) + node.within_seconds for node in nodes)
    alike = f"{commit}, torch {first.versions.get('torch', '?')}, data {_digits(first.data_key)}, {first.device}"
    return f"{len(nodes)} alike ({_name(nodes)}): {alike}; clocks within {max(0.1, apart):.1f} s"


def running_packages(plan: Plan) -> tuple[str, ...]:
    optional = {
        "deepspeed": plan.strategy in DEEPSPEED_STRATEGIES,
        "bitsandbytes": plan.quantization is not None or plan.optimizer.name == "adamw_bnb_8bit",
        "triton": plan.loss_kernel == "fused" or plan.attention.backend == "triton",
        "flash-attn-4": plan.attention.backend == "flash_attention_4",
        "nccl": plan.hardware.gpu is not None,
    }
    always = ("launcher", "torch", "transformers", "accelerate", "peft", "numpy")
    return (*always, *(name for name, runs in optional.items() if runs))


def estimate_checkpoint_bytes(plan: Plan) -> int:
    """All that will lie side by side: those that are kept, the one being written, and what is left at the end."""
    schedule = plan.schedule
    limit = schedule.save_total_limit
    steps, every = schedule.num_steps, schedule.save_every_steps
    if schedule.save_every_epochs is not None:
        count = math.ceil(schedule.epochs / schedule.save_every_epochs)
    elif every is not None and steps is not None:
        count = steps // every
    else:
        count = 0 if every is None else limit or 1
    kept = count if limit is None else min(count, limit + 1)
    return plan.adapter.trainable_parameters * (_CHECKPOINT_BYTES * kept + 4)


def _find_problems(nodes: Sequence[SeenNode], plan: Plan) -> Iterator[Problem]:
    facts = [node.facts for node in nodes]
    known = [node for node in nodes if _commit(node.facts)]  # one without git cannot tell; its files can
    yield from _differ("commit", known, (_digits(_commit(node.facts)) for node in known))
    yield from _differ("launcher's files", nodes, (_digits(one.code_sha256) for one in facts))
    yield from _differ("Python", nodes, (".".join(one.versions["python"].split(".")[:2]) for one in facts))
    for name in running_packages(plan):
        yield from _differ(name, nodes, (one.versions.get(name, "none") for one in facts))
    yield from _differ("manifest", nodes, (_digits(one.manifest_sha256) for one in facts))
    yield from _find_plan_problems(nodes)
    yield from _differ("data key", nodes, (_digits(one.data_key) for one in facts), _name_parts(nodes))
    yield from _differ("GPU" if plan.hardware.gpu else "CPU", nodes, (one.device for one in facts))
    yield from _differ("ranks", nodes, (str(one.num_ranks) for one in facts))


def _find_plan_problems(nodes: Sequence[SeenNode]) -> Iterator[Problem]:
    keys = sorted({key for node in nodes for key in node.facts.plan})
    found: list[Problem] = []
    for key in keys:
        found += _differ(f"plan, {key}", nodes, (node.facts.plan.get(key, "absent") for node in nodes))
    yield from found[:_MAX_SHOWN]
    if len(found) > _MAX_SHOWN:
        yield Problem(where="plan", what=f"and {len(found) - _MAX_SHOWN} more")


def _name_parts(nodes: Sequence[SeenNode]) -> str:
    names = sorted({name for node in nodes for name in node.facts.data_parts})
    apart = [name for name in names if len({node.facts.data_parts.get(name) for node in nodes}) > 1]
    return f" (what differs: {', '.join(apart)})" if apart else ""


def _find_warnings(nodes: Sequence[SeenNode], plan: Plan) -> Iterator[str]:
    for node in nodes:
        if abs(node.ahead_seconds) - node.within_seconds > _CLOCK_SECONDS:
            way = "ahead of" if node.ahead_seconds > 0 else "behind"
            yield f"{node}: its clock is {abs(node.ahead_seconds):.1f} s {way} node 0's"
    for problem in _differ("", nodes, (node.facts.driver or "unknown" for node in nodes)):
        yield f"the driver differs: {problem.what}"
    installed = {name for node in nodes for name in node.facts.versions} - set(running_packages(plan)) - {"python"}
    for name in sorted(installed):
        for problem in _differ("", nodes, (node.facts.versions.get(name, "none") for node in nodes)):
            yield f"{name}, which this run does not use, differs: {problem.what}"
    yield from _find_shortages(nodes, plan)


def _find_shortages(nodes: Sequence[SeenNode], plan: Plan) -> Iterator[str]:
    for node in nodes:
        facts = node.facts
        needs = [
            ("free for the data", facts.data_free_bytes, "preparing it may take", facts.data_needed_bytes),
            (
                "of memory available",
                facts.ram_bytes,
                "the offloaded state takes",
                plan.memory.host_bytes * facts.num_ranks,
            ),
        ]
        if facts.node == 0:  # where the first rank writes all that is saved
            needs.append(
                ("free for the run", facts.run_free_bytes, "its checkpoints take", estimate_checkpoint_bytes(plan))
            )
        for what, free, who, needed in needs:
            if free < needed:
                yield f"{node}: {format_gib(free)} {what}, {who} about {format_gib(needed)}"


def _differ(name: str, nodes: Sequence[SeenNode], values: Iterable[str], more: str = "") -> Iterator[Problem]:
    """Nothing, or one problem."""
    groups: dict[str, list[SeenNode]] = {}
    for node, value in zip(nodes, values, strict=True):
        groups.setdefault(value, []).append(node)
    if len(groups) > 1:
        yield Problem(where=name, what=_format_groups(groups) + more)


def _format_groups(groups: Mapping[str, Sequence[SeenNode]]) -> str:
    """The most common value first: whoever is odd stands behind."""
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].facts.node))
    return "; ".join(f"{value} on {_name(nodes)}" for value, nodes in ordered)


def _name(nodes: Sequence[SeenNode]) -> str:
    if len(nodes) <= _MAX_NAMED:
        return ", ".join(map(str, nodes))
    return f"nodes {format_numbers([node.facts.node for node in nodes])}"


def format_numbers(numbers: Sequence[int]) -> str:
    """0 to 6, 8, 10 to 12."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = (str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return ", ".join(words)


def _commit(facts: NodeFacts) -> str:
    return (facts.commit or "").removesuffix(_CHANGED)


def _digits(text: str) -> str:
    return text[:_SHOWN_DIGITS]
