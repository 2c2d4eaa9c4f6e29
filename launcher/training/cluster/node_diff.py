"""Find differences between nodes, listed by value so that the deviating node stands out; warn about harmless ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.core.choices import DEEPSPEED_STRATEGIES, EIGHT_BIT_OPTIMIZERS
from launcher.core.errors import Problem
from launcher.core.units import format_gib
from launcher.plan.checkpoints import count_state_bytes
from launcher.plan.model import Plan
from launcher.training.cluster.node_info import NodeInfo

_MAX_CLOCK_OFFSET_SECONDS = 2.0  # beyond it, logs of two nodes cannot be compared
_SHOWN_DIGITS = 12
_MAX_SHOWN = 12
_MAX_NAMED = 3  # nodes listed with their hosts
_CHANGED = "+changes"  # suffix of a commit; the hash of the files shows what was changed
# A trained weight and its two AdamW moments, in FP32.


@dataclass(frozen=True, slots=True)
class ComparedNode:
    """Facts of a node, and how far its clock is from rank 0's."""

    facts: NodeInfo
    clock_offset: float = 0.0  # seconds ahead of rank 0's clock
    clock_error: float = 0.0

    def __str__(self) -> str:
        return f"node {self.facts.node} ({self.facts.host})"


def find_differences(nodes: Sequence[ComparedNode], plan: Plan) -> tuple[Problem, ...]:
    """Return the differences between nodes that make it impossible or pointless to train on them together."""
    return tuple(_find_differences(nodes, plan))


def find_warnings(nodes: Sequence[ComparedNode], plan: Plan) -> tuple[str, ...]:
    """Return warnings about clocks, drivers, unused packages, disk space and memory."""
    return tuple(_find_warnings(nodes, plan))


def format_summary(nodes: Sequence[ComparedNode]) -> str:
    """Return one line about nodes without differences: commit, torch version, data, GPU and clock offset."""
    first = nodes[0].facts
    commit = f"commit {_digits(_commit(first))}" if first.commit else f"launcher {first.versions['launcher']}"
    largest_offset = max(abs(node.clock_offset) + node.clock_error for node in nodes)
    common = f"{commit}, torch {first.versions.get('torch', '?')}, data {_digits(first.data_key)}, {first.device}"
    return f"{len(nodes)} equal ({_name_nodes(nodes)}): {common}; clocks within {max(0.1, largest_offset):.1f} s"


def list_used_packages(plan: Plan) -> tuple[str, ...]:
    """Return the packages that this plan uses."""
    optional = {
        "deepspeed": plan.strategy in DEEPSPEED_STRATEGIES,
        "bitsandbytes": plan.quantization is not None or plan.optimizer.name in EIGHT_BIT_OPTIMIZERS,
        "triton": plan.loss_kernel == "fused" or plan.attention.backend == "triton",
        "flash-attn-4": plan.attention.backend == "flash_attention_4",
        "nccl": plan.hardware.gpu is not None,
    }
    always = ("launcher", "torch", "transformers", "accelerate", "peft", "numpy")
    return (*always, *(name for name, runs in optional.items() if runs))


def estimate_checkpoint_bytes(plan: Plan) -> int:
    """Estimate the disk space of all checkpoints that exist at the same time, and of the final weights."""
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
    return plan.adapter.trainable_parameters * (
        count_state_bytes(plan.precision.trainable_dtype, plan.optimizer.name) * kept + 4
    )


def _find_differences(nodes: Sequence[ComparedNode], plan: Plan) -> Iterator[Problem]:
    facts = [node.facts for node in nodes]
    known = [node for node in nodes if _commit(node.facts)]  # without git, the hash of the files is compared
    yield from _compare("commit", known, (_digits(_commit(node.facts)) for node in known))
    yield from _compare("launcher's files", nodes, (_digits(node.code_sha256) for node in facts))
    yield from _compare("Python", nodes, (".".join(node.versions["python"].split(".")[:2]) for node in facts))
    for name in list_used_packages(plan):
        yield from _compare(name, nodes, (node.versions.get(name, "none") for node in facts))
    yield from _compare("manifest", nodes, (_digits(node.manifest_sha256) for node in facts))
    yield from _find_plan_differences(nodes)
    yield from _compare("data key", nodes, (_digits(node.data_key) for node in facts), _name_changed_parts(nodes))
    yield from _compare("GPU" if plan.hardware.gpu else "CPU", nodes, (node.device for node in facts))
    yield from _compare("ranks", nodes, (str(node.num_ranks) for node in facts))


def _find_plan_differences(nodes: Sequence[ComparedNode]) -> Iterator[Problem]:
    keys = sorted({key for node in nodes for key in node.facts.plan})
    found: list[Problem] = []
    for key in keys:
        found += _compare(f"plan, {key}", nodes, (node.facts.plan.get(key, "absent") for node in nodes))
    yield from found[:_MAX_SHOWN]
    if len(found) > _MAX_SHOWN:
        yield Problem(where="plan", what=f"and {len(found) - _MAX_SHOWN} more")


def _name_changed_parts(nodes: Sequence[ComparedNode]) -> str:
    names = sorted({name for node in nodes for name in node.facts.data_parts})
    changed = [name for name in names if len({node.facts.data_parts.get(name) for node in nodes}) > 1]
    return f" (what differs: {', '.join(changed)})" if changed else ""


def _find_warnings(nodes: Sequence[ComparedNode], plan: Plan) -> Iterator[str]:
    for node in nodes:
        if abs(node.clock_offset) - node.clock_error > _MAX_CLOCK_OFFSET_SECONDS:
            yield f"{node}: its clock differs from node 0's by {node.clock_offset:+.1f} s"
    for problem in _compare("", nodes, (node.facts.driver or "unknown" for node in nodes)):
        yield f"GPU drivers differ: {problem.what}"
    installed = {name for node in nodes for name in node.facts.versions} - set(list_used_packages(plan)) - {"python"}
    for name in sorted(installed):
        for problem in _compare("", nodes, (node.facts.versions.get(name, "none") for node in nodes)):
            yield f"{name} differs, but is not used by this run: {problem.what}"
    yield from _find_shortages(nodes, plan)


def _find_shortages(nodes: Sequence[ComparedNode], plan: Plan) -> Iterator[str]:
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
        if facts.node == 0:  # rank 0 writes all checkpoints
            needs.append(
                ("free for the run", facts.run_free_bytes, "its checkpoints take", estimate_checkpoint_bytes(plan))
            )
        for what, free, purpose, needed in needs:
            if free < needed:
                yield f"{node}: {format_gib(free)} {what}, {purpose} about {format_gib(needed)}"


def _compare(name: str, nodes: Sequence[ComparedNode], values: Iterable[str], more: str = "") -> Iterator[Problem]:
    """Yield a problem that lists each value and its nodes, if the nodes' values differ."""
    groups: dict[str, list[ComparedNode]] = {}
    for node, value in zip(nodes, values, strict=True):
        groups.setdefault(value, []).append(node)
    if len(groups) > 1:
        yield Problem(where=name, what=_format_groups(groups) + more)


def _format_groups(groups: Mapping[str, Sequence[ComparedNode]]) -> str:
    """Return each value with the nodes that have it, such as `2.9 on nodes 0 to 6; 2.8 on node 7`."""
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].facts.node))
    return "; ".join(f"{value} on {_name_nodes(nodes)}" for value, nodes in ordered)


def _name_nodes(nodes: Sequence[ComparedNode]) -> str:
    if len(nodes) <= _MAX_NAMED:
        return ", ".join(map(str, nodes))
    return f"nodes {format_numbers([node.facts.node for node in nodes])}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Format sorted numbers with ranges, as in "0 to 6, 8, 10 to 12"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = (str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return ", ".join(ranges)


def _commit(facts: NodeInfo) -> str:
    return (facts.commit or "").removesuffix(_CHANGED)


def _digits(text: str) -> str:
    return text[:_SHOWN_DIGITS]
