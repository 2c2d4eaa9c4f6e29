"""Find all differences between nodes, grouped so that the odd node is visible, and warn about harmless ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from launcher.core.choices import DEEPSPEED_STRATEGIES, EIGHT_BIT_OPTIMIZERS
from launcher.core.errors import Problem
from launcher.plan.model import Plan
from launcher.training.cluster.node_info import NodeInfo

_SHOWN_DIGITS = 12
_MAX_SHOWN = 12
_MAX_NAMED = 3  # nodes listed with their hosts
_CHANGED = "+changes"  # suffix of a commit; the hash of the files shows what was changed


def find_differences(nodes: Sequence[NodeInfo], plan: Plan) -> Iterator[Problem]:
    """Yield all differences that make training together impossible or pointless."""
    known = [node for node in nodes if _commit(node)]  # without git, the hash of the files is compared
    yield from _compare("commit", known, (_digits(_commit(node)) for node in known))
    yield from _compare("launcher's files", nodes, (_digits(node.code_sha256) for node in nodes))
    yield from _compare("Python", nodes, (".".join(node.versions["python"].split(".")[:2]) for node in nodes))
    for name in list_used_packages(plan):
        yield from _compare(name, nodes, (node.versions.get(name, "none") for node in nodes))
    yield from _compare("manifest", nodes, (_digits(node.manifest_sha256) for node in nodes))
    yield from _find_plan_differences(nodes)
    yield from _compare("data key", nodes, (_digits(node.data_key) for node in nodes), _name_changed_parts(nodes))
    yield from _compare("GPU" if plan.hardware.gpu else "CPU", nodes, (node.device for node in nodes))
    yield from _compare("ranks", nodes, (str(node.num_ranks) for node in nodes))


def find_warnings(nodes: Sequence[NodeInfo], plan: Plan) -> Iterator[str]:
    """Yield warnings about drivers and unused packages."""
    for problem in _compare("", nodes, (node.driver or "unknown" for node in nodes)):
        yield f"GPU drivers differ: {problem.what}"
    installed = {name for node in nodes for name in node.versions} - set(list_used_packages(plan)) - {"python"}
    for name in sorted(installed):
        for problem in _compare("", nodes, (node.versions.get(name, "none") for node in nodes)):
            yield f"{name} differs, but is not used by this run: {problem.what}"


def format_summary(nodes: Sequence[NodeInfo]) -> str:
    """Summarize equal nodes in one line."""
    first = nodes[0]
    commit = f"commit {_digits(_commit(first))}" if first.commit else f"launcher {first.versions['launcher']}"
    common = f"{commit}, torch {first.versions.get('torch', '?')}, data {_digits(first.data_key)}, {first.device}"
    return f"{len(nodes)} equal ({_name_nodes(nodes)}): {common}"


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


def _find_plan_differences(nodes: Sequence[NodeInfo]) -> Iterator[Problem]:
    keys = sorted({key for node in nodes for key in node.plan})
    found: list[Problem] = []
    for key in keys:
        found += _compare(f"plan, {key}", nodes, (node.plan.get(key, "absent") for node in nodes))
    yield from found[:_MAX_SHOWN]
    if len(found) > _MAX_SHOWN:
        yield Problem(where="plan", what=f"and {len(found) - _MAX_SHOWN} more")


def _name_changed_parts(nodes: Sequence[NodeInfo]) -> str:
    names = sorted({name for node in nodes for name in node.data_parts})
    changed = [name for name in names if len({node.data_parts.get(name) for node in nodes}) > 1]
    return f" (what differs: {', '.join(changed)})" if changed else ""


def _compare(name: str, nodes: Sequence[NodeInfo], values: Iterable[str], more: str = "") -> Iterator[Problem]:
    """Yield one problem if the values differ."""
    groups: dict[str, list[NodeInfo]] = {}
    for node, value in zip(nodes, values, strict=True):
        groups.setdefault(value, []).append(node)
    if len(groups) > 1:
        yield Problem(where=name, what=_format_groups(groups) + more)


def _format_groups(groups: Mapping[str, Sequence[NodeInfo]]) -> str:
    """Format the values and their nodes, the most common value first."""
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].node))
    return "; ".join(f"{value} on {_name_nodes(nodes)}" for value, nodes in ordered)


def _name_nodes(nodes: Sequence[NodeInfo]) -> str:
    if len(nodes) <= _MAX_NAMED:
        return ", ".join(map(str, nodes))
    return f"nodes {format_numbers([node.node for node in nodes])}"


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


def _commit(node: NodeInfo) -> str:
    return (node.commit or "").removesuffix(_CHANGED)


def _digits(text: str) -> str:
    return text[:_SHOWN_DIGITS]
