"""Rehearsal of a cluster's training on this machine: same engine and configs, CPU ranks, a tiny base, a few steps.

A rehearsal finds a wrong config file, a wrap policy that matches no layer, an engine that does not accept the adapter,
and weights that cannot be saved. It cannot show whether the training fits the GPUs, or how fast it is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

from launcher.core.choices import Checkpointing
from launcher.core.errors import InputError, LauncherError, Problem
from launcher.core.frozen_model import flatten
from launcher.core.metrics import EVAL_LOSS, TRAIN_LOSS, load_metrics
from launcher.core.run_paths import RunPaths, create_next_run, make_run_id, removed_on_failure, write_files
from launcher.hardware.probe import probe_hardware
from launcher.launch.nodes import Node
from launcher.launch.write_run import write_run_files
from launcher.plan.model import Plan
from launcher.render import Rendezvous, render
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.request.run_directory import input_texts

PREFIX = "rehearsal"
CLUSTER_FOLDER = "cluster"  # in the run directory: the files of the cluster
_MAX_RANKS = 4
_MAX_NODES = 2
_RANKS_PER_CORE = 2
_JOIN_SECONDS = 120
_LOOPBACK = "127.0.0.1"

_CHECKPOINTING: Mapping[Checkpointing, str] = {"none": "false", "selective": '"selective"', "full": "true"}

# Keys of the config files in which a rehearsal may differ; any other difference would make it meaningless.
_PRECISION = frozenset({"bf16", "fp16", "mixed_precision", "communication_data_type", "data_types"})
_COUNTS_AND_DEVICE = frozenset(
    {
        "deepspeed_config.deepspeed_config_file",
        "gradient_accumulation_steps",
        "num_machines",
        "num_processes",
        "parallelism_config.parallelism_config_dp_replicate_size",
        "parallelism_config.parallelism_config_dp_shard_size",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_cpu",
    }
)
_LAYER_CLASS = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A config key with different values on the cluster and in the rehearsal; a value is None if the key is missing."""

    file: str
    key: str
    cluster: object
    rehearsal: object

    def __str__(self) -> str:
        return f"{self.key} {_format_value(self.cluster)}→{_format_value(self.rehearsal)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The cluster's plan, the plan that is run here, and how they differ."""

    cluster: PlannedRun
    planned: PlannedRun
    notes: tuple[str, ...]  # what differs from the cluster, and why
    differences: tuple[Difference, ...]


def plan_rehearsal(request: Request, *, num_ranks: int | None = None, num_steps: int = 3) -> Rehearsal:
    """Plan the cluster's training and its rehearsal, and check that they differ only where they must."""
    cluster = plan_request(replace(request, cpu_ranks_per_node=None))
    if cluster.plan.hardware.gpu is None:
        raise InputError(
            "no cluster to rehearse: this machine has no GPU",
            hint="describe it: --gpu h100 --gpus 8 --nodes 2; to train without a GPU use `launcher train`",
        )
    stage = _choose_ranks(cluster.plan, num_ranks)
    planned = plan_request(_make_request(request, cluster.plan, stage, num_steps))
    # Nothing is recorded on a CPU, and all the same gradients travel as they will there.
    as_there = {"defer_gradient_sync": cluster.plan.defer_gradient_sync}
    planned = replace(planned, plan=planned.plan.model_copy(update=as_there))
    _check_same_setup(cluster.plan, planned.plan)
    differences = tuple(find_differences(cluster.plan, planned.plan))
    check_differences(differences, same_base=cluster.plan.base.model_type == planned.plan.base.model_type)
    notes = (*stage.notes, *_explain_replaced(cluster.plan, planned.plan))
    return Rehearsal(cluster=cluster, planned=planned, notes=notes, differences=differences)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """Number of nodes, of ranks and of CPU cores of the rehearsal on this machine."""

    num_nodes: int
    ranks_per_node: int
    cores_per_node: int
    notes: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def _choose_ranks(plan: Plan, requested: int | None) -> _Ranks:
    cores = probe_hardware().cpu_cores_per_node
    planned, nodes = plan.hardware.num_ranks, min(plan.hardware.nodes, _MAX_NODES)
    # An engine is planned for two ranks or more; HSDP shards inside each node.
    fewest = {"single": 1, "hsdp": 2 * nodes}.get(plan.strategy, 2)
    if requested is not None:
        _check_ranks(requested, nodes, fewest, max(planned, fewest), cores)
    ranks = requested or max(fewest, min(planned, _MAX_RANKS, cores) // nodes * nodes)
    notes = []
    if ranks != planned:
        reason = "requested by --ranks" if requested else _explain_ranks(ranks, planned, cores)
        notes.append(f"{planned} {'ranks are' if planned > 1 else 'rank is'} rehearsed as {ranks}: {reason}")
    if nodes != plan.hardware.nodes:
        notes.append(
            f"{plan.hardware.nodes} nodes are rehearsed as {nodes}: two exercise all communication between nodes"
        )
    if nodes > 1:
        notes.append(f"the {nodes} nodes are {nodes} agents on this machine, connected over {_LOOPBACK}")
    return _Ranks(
        num_nodes=nodes, ranks_per_node=ranks // nodes, cores_per_node=max(1, cores // nodes), notes=tuple(notes)
    )


def _check_ranks(requested: int, nodes: int, fewest: int, most: int, cores: int) -> None:
    rules = (
        (requested > most, f"more ranks than the cluster has ({most})"),
        (requested < fewest, f"at least {fewest}: fewer cannot exercise all communication"),
        (
            requested > _RANKS_PER_CORE * cores,
            f"at most {_RANKS_PER_CORE} ranks per core; cores of this machine: {cores}",
        ),
        (requested % nodes != 0, f"not divisible by {nodes} nodes"),
    )
    problems = tuple(Problem(where=f"--ranks {requested}", what=what) for is_broken, what in rules if is_broken)
    if problems:
        raise InputError("cannot rehearse with these options", problems)


def _explain_ranks(ranks: int, planned: int, cores: int) -> str:
    if ranks > planned:
        return "a single CPU rank would run without this strategy"
    return (
        f"this machine has {cores} core{'s' if cores > 1 else ''}"
        if cores < _MAX_RANKS
        else "enough to exercise everything"
    )


def _make_request(request: Request, cluster: Plan, stage: _Ranks, num_steps: int) -> Request:
    """Return the rehearsal's request: the smoke profile with the cluster's settings, a checkpoint and an evaluation."""
    every = max(1, num_steps - 1)
    config = {
        "offload": cluster.offload,
        "gradient_checkpointing": _CHECKPOINTING[cluster.checkpointing],
        "logging_steps": 1,
        "wandb.mode": "disabled",  # a rehearsal is not worth logging
    }
    schedule = cluster.schedule
    if schedule.save_every_steps or schedule.save_every_epochs:
        config |= {"save_strategy": "steps", "save_steps": every}
    if schedule.evaluate_every_steps or schedule.evaluate_every_epochs:
        config |= {"evaluation_strategy": "steps", "eval_steps": every}
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
        price_per_node_hour=None,
        tokens_per_row=None,
        random_weights=False,
        cpu_ranks_per_node=stage.ranks_per_node if stage.num_ranks > 1 else None,
    )


def _check_same_setup(cluster: Plan, planned: Plan) -> None:
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
        raise LauncherError("the rehearsal is a different training than the cluster's", problems)


def _explain_replaced(cluster: Plan, planned: Plan) -> Iterator[str]:
    """Yield notes on what a rehearsal replaces: what needs a GPU, such as quantization, and the base model."""
    if cluster.quantization is not None:
        yield f"{cluster.quantization.kind} weights are rehearsed unquantized: bitsandbytes needs a CUDA GPU"
    pairs = {
        "precision": (cluster.precision.name, planned.precision.name),
        "attention": (cluster.attention.backend, planned.attention.backend),
        "loss": (cluster.loss_kernel, planned.loss_kernel),
        "optimizer": (cluster.optimizer.name, planned.optimizer.name),
        "CUDA graph": ("on" if cluster.cuda_graph else "off", "on" if planned.cuda_graph else "off"),
        "torch.compile": ("off" if cluster.compile is None else "on", "off" if planned.compile is None else "on"),
        "base": (cluster.base.name, planned.base.name),
    }
    changed = [f"{name} ({here} instead of {there})" for name, (there, here) in pairs.items() if there != here]
    if changed:
        yield f"different from the cluster: {', '.join(changed)}"


def find_differences(cluster: Plan, planned: Plan) -> Iterator[Difference]:
    """Yield the keys in which the accelerate and DeepSpeed configs of cluster and rehearsal differ."""
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
    """Raise LauncherError if configs differ in more than counts, device, precision and another base's layer class."""
    wrong = tuple(
        Problem(where=difference.file, what=str(difference))
        for difference in differences
        if difference.key.split(".")[0] not in _PRECISION
        and (difference.key not in _COUNTS_AND_DEVICE)
        and (difference.key != _LAYER_CLASS or same_base)
    )
    if wrong:
        raise LauncherError(
            "the rehearsal's config files differ from the cluster's in more than the number of ranks and the precision",
            wrong,
        )


def write_rehearsal(rehearsal: Rehearsal, runs_dir: Path) -> RunPaths:
    """Write runs/rehearsal-<expert>-<time>-<cluster>/, with the cluster's plan and files in a subfolder."""
    hardware = rehearsal.cluster.plan.hardware
    assert hardware.gpu is not None
    name = f"{hardware.nodes}x{hardware.gpus_per_node}x{hardware.gpu.key}"
    run_id = make_run_id(f"{PREFIX}-{rehearsal.cluster.plan.expert}", name, datetime.now(UTC))
    paths = create_next_run(runs_dir, run_id)
    with removed_on_failure(paths):
        write_run_files(rehearsal.planned, paths)
    cluster = RunPaths(paths.root / CLUSTER_FOLDER)
    cluster.root.mkdir()
    texts = input_texts(rehearsal.cluster, cluster)
    write_files(cluster.root, texts | render(rehearsal.cluster.plan, cluster))
    return paths


def list_achievements(paths: RunPaths) -> tuple[str, ...]:
    """List what a rehearsal achieved (loss, evaluation, checkpoint, weights), read from the files that it wrote."""
    steps = load_metrics(paths.metrics) if paths.metrics.is_file() else []
    losses = [loss for step in steps if (loss := step.get(TRAIN_LOSS)) is not None]
    achievements = (
        (bool(losses), f"loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""),
        (any(step.get(EVAL_LOSS) is not None for step in steps), "evaluated"),
        (paths.checkpoints.is_dir() and any(paths.checkpoints.iterdir()), "checkpoint saved"),
        (paths.adapter.is_dir(), "weights saved"),
    )
    return tuple(what for is_done, what in achievements if is_done)


def make_nodes(plan: Plan) -> tuple[Node, ...]:
    """Return the nodes of a rehearsal, with a rendezvous on the loopback interface; empty for a single node."""
    if plan.hardware.nodes == 1:
        return ()
    rendezvous = Rendezvous(host=_LOOPBACK, port=_find_free_port(), join_timeout_seconds=_JOIN_SECONDS)
    return tuple(Node(rank=rank, rendezvous=rendezvous) for rank in range(plan.hardware.nodes))


def _find_free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _format_value(value: object) -> str:
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
