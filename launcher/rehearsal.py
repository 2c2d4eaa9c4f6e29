"""A cluster's training, tried on this machine: the same engine and files, CPU ranks, the tiny base, a few steps.

What a rehearsal finds: a wrong configuration file, a wrap policy that fits no layer, an engine that does not take the
adapter, weights that cannot be saved. What it cannot find: whether it fits the GPUs, and how fast it is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

from launcher.choices import Checkpointing
from launcher.errors import InputError, LauncherError, Problem
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.launch import fill_run
from launcher.metrics import EVAL_LOSS, TRAIN_LOSS, load_metrics
from launcher.nodes import Node
from launcher.paths import RunPaths, create_next_run, make_run_id, write_files
from launcher.plan.model import Plan
from launcher.probe import probe_hardware
from launcher.render import Rendezvous, render
from launcher.runs import input_texts
from launcher.values import flatten

PREFIX = "rehearsal"
CLUSTER_FOLDER = "cluster"  # in the run directory: the files of which this is the rehearsal
_MAX_RANKS = 4
_MAX_NODES = 2
_RANKS_PER_CORE = 2
_JOIN_SECONDS = 120
_LOOPBACK = "127.0.0.1"

_CHECKPOINTING: Mapping[Checkpointing, str] = {"none": "false", "selective": '"selective"', "full": "true"}

# The keys of the files in which a rehearsal may differ. Any other difference would make it prove nothing.
_PRECISION = frozenset({"bf16", "fp16", "mixed_precision"})
_COUNTS_AND_PLACE = frozenset(
    {
        "deepspeed_config.deepspeed_config_file",
        "gradient_accumulation_steps",
        "num_machines",
        "num_processes",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_cpu",
    }
)
_LAYER_CLASS = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of a rendered file, between the cluster's and the rehearsal's. None: the key is not there."""

    file: str
    key: str
    cluster: object
    rehearsal: object

    def __str__(self) -> str:
        return f"{self.key} {_word(self.cluster)}→{_word(self.rehearsal)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    cluster: PlannedRun
    planned: PlannedRun
    notes: tuple[str, ...]  # what is not as on the cluster, and why
    differences: tuple[Difference, ...]


def plan_rehearsal(request: Request, *, num_ranks: int | None = None, num_steps: int = 3) -> Rehearsal:
    cluster = plan_request(replace(request, cpu_ranks_per_node=None))
    if cluster.plan.hardware.gpu is None:
        raise InputError(
            "this machine has no GPU, so there is no cluster to rehearse",
            hint="name it: --gpu h100 --gpus 8 --nodes 2; without GPUs `launcher train` is the training itself",
        )
    stage = _make_stage(cluster.plan, num_ranks)
    planned = plan_request(_make_request(request, cluster.plan, stage, num_steps))
    # Nothing is recorded on a CPU, and all the same gradients travel as they will there.
    as_there = {"adds_up_behind": cluster.plan.adds_up_behind}
    planned = replace(planned, plan=planned.plan.model_copy(update=as_there))
    _check_same_way(cluster.plan, planned.plan)
    differences = tuple(find_differences(cluster.plan, planned.plan))
    check_differences(differences, same_base=cluster.plan.base.model_type == planned.plan.base.model_type)
    notes = (*stage.notes, *_explain_replaced(cluster.plan, planned.plan))
    return Rehearsal(cluster=cluster, planned=planned, notes=notes, differences=differences)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """The machine's part: how many ranks play how many nodes."""

    num_nodes: int
    ranks_per_node: int
    cores_per_node: int
    notes: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def _make_stage(plan: Plan, asked: int | None) -> _Stage:
    cores = probe_hardware().cpu_cores_per_node
    wanted, nodes = plan.hardware.num_ranks, min(plan.hardware.nodes, _MAX_NODES)
    fewest = 1 if plan.strategy == "single" else 2  # an engine is planned for two ranks or more
    if asked is not None:
        _check_ranks(asked, nodes, fewest, max(wanted, fewest), cores)
    ranks = asked or max(fewest, min(wanted, _MAX_RANKS, cores) // nodes * nodes)
    notes = []
    if ranks != wanted:
        why = "asked for by --ranks" if asked else _explain_ranks(ranks, wanted, cores)
        notes.append(f"{wanted} {'ranks are' if wanted > 1 else 'rank is'} rehearsed as {ranks}: {why}")
    if nodes != plan.hardware.nodes:
        notes.append(f"{plan.hardware.nodes} nodes are rehearsed as {nodes}: two show all that nodes do to each other")
    if nodes > 1:
        notes.append(f"the {nodes} nodes are {nodes} agents on this machine, which meet on {_LOOPBACK}")
    return _Stage(
        num_nodes=nodes, ranks_per_node=ranks // nodes, cores_per_node=max(1, cores // nodes), notes=tuple(notes)
    )


def _check_ranks(asked: int, nodes: int, fewest: int, most: int, cores: int) -> None:
    rules = (
        (asked > most, f"the cluster has {most}"),
        (asked < fewest, f"at least {fewest}: what ranks do together cannot be tried by one"),
        (asked > _RANKS_PER_CORE * cores, f"at most {_RANKS_PER_CORE} a core, and this machine has {cores}"),
        (asked % nodes != 0, f"they do not spread over {nodes} nodes"),
    )
    problems = tuple(Problem(where=f"--ranks {asked}", what=what) for is_broken, what in rules if is_broken)
    if problems:
        raise InputError("it cannot be rehearsed so", problems)


def _explain_ranks(ranks: int, wanted: int, cores: int) -> str:
    if ranks > wanted:
        return "one CPU rank runs without the engine"
    return f"this machine has {cores} core{'s' if cores > 1 else ''}" if cores < _MAX_RANKS else "so many show it all"


def _make_request(request: Request, cluster: Plan, stage: _Stage, num_steps: int) -> Request:
    """The same training but for its sizes, which are the smoke profile's; saved and evaluated on the way."""
    every = max(1, num_steps - 1)
    config = {
        "offload": cluster.offload,
        "gradient_checkpointing": _CHECKPOINTING[cluster.checkpointing],
        "logging_steps": 1,
        "save_steps": every,
        "eval_steps": every,
        "wandb.mode": "disabled",  # a rehearsal is no run that anybody would look for
    }
    return replace(
        request,
        overrides=(*request.overrides, *(f"training.config.{key}={value}" for key, value in config.items())),
        base=None,
        max_steps=num_steps,
        profile="smoke",
        gpu=None,
        gpus_per_node=None,
        nodes=stage.num_nodes,
        cpu_cores_per_node=stage.cores_per_node,
        ram_gib_per_node=None,
        strategy=None if cluster.strategy == "single" else cluster.strategy,
        price_per_gpu_hour=None,
        tokens_per_row=None,
        random_weights=False,
        cpu_ranks_per_node=stage.ranks_per_node if stage.num_ranks > 1 else None,
    )


def _check_same_way(cluster: Plan, planned: Plan) -> None:
    pairs = {
        "strategy": (cluster.strategy, planned.strategy),
        "offload": (cluster.offload, planned.offload),
        "checkpointing": (cluster.checkpointing, planned.checkpointing),
        "adapter": (cluster.adapter.kind, planned.adapter.kind),
        "packed": (cluster.batch.packed, planned.batch.packed),
    }
    problems = tuple(
        Problem(where=name, what=f"{there} on the cluster, {here} here")
        for name, (there, here) in pairs.items()
        if there != here
    )
    if problems:
        raise LauncherError("a rehearsal of another training than the cluster's", problems)


def _explain_replaced(cluster: Plan, planned: Plan) -> Iterator[str]:
    """What a CPU has not, and the base's weights: not rehearsed, and said so."""
    if cluster.quantization is not None:
        yield f"{cluster.quantization.kind} weights are rehearsed unquantised: bitsandbytes needs a CUDA GPU"
    pairs = {
        "precision": (cluster.precision.compute_dtype, planned.precision.compute_dtype),
        "attention": (cluster.attention.backend, planned.attention.backend),
        "loss": (cluster.loss_kernel, planned.loss_kernel),
        "optimizer": (cluster.optimizer.name, planned.optimizer.name),
        "CUDA graph": ("on" if cluster.cuda_graph else "off", "on" if planned.cuda_graph else "off"),
        "torch.compile": ("off" if cluster.compile is None else "on", "off" if planned.compile is None else "on"),
        "base": (cluster.base.name, planned.base.name),
    }
    changed = [f"{name} ({here}, there {there})" for name, (there, here) in pairs.items() if there != here]
    if changed:
        yield f"not as on the cluster: {', '.join(changed)}"


def find_differences(cluster: Plan, planned: Plan) -> Iterator[Difference]:
    """Of the files that accelerate and DeepSpeed read, key by key."""
    paths = RunPaths(Path(PREFIX))
    there, here = render(cluster, paths), render(planned, paths)
    for name in (paths.accelerate.name, paths.deepspeed.name):
        keys_there, keys_here = _read(name, there.get(name)), _read(name, here.get(name))
        for key in sorted(keys_there.keys() | keys_here.keys()):
            if keys_there.get(key) != keys_here.get(key):
                yield Difference(file=name, key=key, cluster=keys_there.get(key), rehearsal=keys_here.get(key))


def _read(name: str, text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    return flatten(json.loads(text) if name.endswith(".json") else yaml.safe_load(text))


def check_differences(differences: tuple[Difference, ...], *, same_base: bool) -> None:
    """Counts, the CPU and its precision, and the class of another base's layers; anything else is our bug."""
    wrong = tuple(
        Problem(where=difference.file, what=str(difference))
        for difference in differences
        if difference.key.split(".")[0] not in _PRECISION
        and (difference.key not in _COUNTS_AND_PLACE)
        and (difference.key != _LAYER_CLASS or same_base)
    )
    if wrong:
        raise LauncherError("the rehearsal's files differ from the cluster's in more than counts and precision", wrong)


def write_rehearsal(rehearsal: Rehearsal, runs_dir: Path) -> RunPaths:
    """runs/rehearsal-<expert>-<time>-<cluster>/, with the cluster's plan and files beside the rehearsal's own."""
    hardware = rehearsal.cluster.plan.hardware
    assert hardware.gpu is not None
    name = f"{hardware.nodes}x{hardware.gpus_per_node}x{hardware.gpu.key}"
    run_id = make_run_id(f"{PREFIX}-{rehearsal.cluster.plan.expert}", name, datetime.now(UTC))
    paths = create_next_run(runs_dir, run_id)
    fill_run(rehearsal.planned, paths)
    cluster = RunPaths(paths.root / CLUSTER_FOLDER)
    cluster.root.mkdir()
    texts = input_texts(rehearsal.cluster, cluster)
    write_files(cluster.root, texts | render(rehearsal.cluster.plan, cluster))
    return paths


def find_feats(paths: RunPaths) -> tuple[str, ...]:
    """What was really done beside the steps, read from the files that it left."""
    steps = load_metrics(paths.metrics) if paths.metrics.is_file() else []
    losses = [loss for step in steps if (loss := step.get(TRAIN_LOSS)) is not None]
    feats = (
        (bool(losses), f"loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""),
        (any(step.get(EVAL_LOSS) is not None for step in steps), "evaluated"),
        (paths.checkpoints.is_dir() and any(paths.checkpoints.iterdir()), "checkpoint saved"),
        (paths.adapter.is_dir(), "weights saved"),
    )
    return tuple(what for is_done, what in feats if is_done)


def make_nodes(plan: Plan) -> tuple[Node, ...]:
    """All nodes of the rehearsal, on this machine's loopback; none where one node is rehearsed."""
    if plan.hardware.nodes == 1:
        return ()
    rendezvous = Rendezvous(host=_LOOPBACK, port=_find_free_port(), join_timeout_seconds=_JOIN_SECONDS)
    return tuple(Node(rank=rank, rendezvous=rendezvous) for rank in range(plan.hardware.nodes))


def _find_free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _word(value: object) -> str:
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
