"""Seconds that ranks spend on each other: what a strategy exchanges, over which link, and what of it is waited for.

What is exchanged is counted, and held to real runs of two ranks (tests/distributed/test_traffic.py). How long it takes
was never measured by us on more than one GPU: the constants below are set by published tables of other trainers
(tests/data/scaling_published.json), and the plan names them as assumptions. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from launcher.choices import DTYPE_BYTES, NF4_BYTES, ZERO_BUCKET_ELEMENTS, AdapterKind, Quantization, Strategy
from launcher.hardware import Hardware
from launcher.speed import Workload
from launcher.units import MIB

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]
Moment = Literal["micro-step", "last micro-step", "behind the step"]

# Share of a link's stated bandwidth that collectives reach.
LINK_EFFICIENCY = 0.7
# Share of a micro-step's compute beside which something may be on its way.
OVERLAP = 0.8
# Of what travels beside compute, the share that is lost all the same: it takes compute units and memory bandwidth.
INTERFERENCE = 0.5
# Ranks that wait for each other wait for the slowest: share of compute, whatever is exchanged.
STRAGGLING = 0.02
# A collective's own time, whatever its size, and that of each hop on its way around.
_MESSAGE_SECONDS = 15e-6
_HOP_SECONDS = 4e-6
_NODE_HOP_SECONDS = 20e-6
# Between nodes: 200 Gb/s InfiniBand for each GPU in data centres, one 25 GbE port a machine elsewhere. Assumed.
_GPU_NETWORK_GB_PER_SECOND = 25.0
_NODE_NETWORK_GB_PER_SECOND = 3.0
# DDP sends gradients in buckets of this size.
_DDP_BUCKET_BYTES = 25 * MIB

# Bytes of one weight of a layer's matrices, as it is stored and so travels; None: as it is computed with.
_STORED_BYTES: dict[Quantization, float | None] = {"none": None, "int8": 1.0, "int4": NF4_BYTES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What there is to exchange: sizes of a model and of what is trained of it, whatever the strategy."""

    adapter: AdapterKind
    num_layers: int
    layer_bytes: float  # weights of all layers, as they are gathered
    other_bytes: float  # embeddings, head, last norm
    num_trained: float
    compute_bytes: float  # of one number in the compute dtype
    reduced_bytes: float = 4.0  # of one gradient, where DDP and FSDP2 add them up: always in FP32

    @property
    def weight_bytes(self) -> float:
        """Of the base."""
        return self.layer_bytes + self.other_bytes

    @property
    def adapter_bytes(self) -> float:
        """Which lies in the layers."""
        return 0.0 if self.adapter == "full" else self.num_trained * self.compute_bytes


def make_exchange(workload: Workload, num_trained: float) -> Exchange:
    """Quantisation touches the matrices of the layers; embeddings, head and norms travel as they are computed with."""
    shape, compute = workload.shape, float(DTYPE_BYTES[workload.compute_dtype])
    matrices = sum(linear.in_features * linear.out_features for linear in shape.linears)
    stored = _STORED_BYTES[workload.quantization]
    layer = shape.layer_parameters * compute if stored is None else matrices * stored
    if stored is not None:
        layer += (shape.layer_parameters - matrices) * compute
    return Exchange(
        adapter=workload.adapter,
        num_layers=shape.num_layers,
        layer_bytes=shape.num_layers * layer,
        other_bytes=(shape.num_parameters - shape.num_layers * shape.layer_parameters) * compute,
        num_trained=num_trained,
        compute_bytes=compute,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of exchange, all its messages of one step or micro-step together."""

    kind: CollectiveKind
    what: str
    num_bytes: float  # of what all ranks together hold of it
    num_messages: int
    moment: Moment

    def moved_bytes(self, num_ranks: int) -> float:
        """By each rank, in one direction, as rings move it: adding up and handing out again is twice the way."""
        return (2 if self.kind == "all-reduce" else 1) * self.num_bytes * (num_ranks - 1) / num_ranks


def make_collectives(strategy: Strategy, exchange: Exchange, *, replays: bool = False) -> tuple[Collective, ...]:
    """As they were counted: replicas exchange gradients once a step, shards gather weights for every micro-step.

    Replicas that replay a graph do so in one message, behind it (training/exchange.py).
    """
    layers = exchange.num_layers
    if strategy == "single":
        return ()
    if strategy == "ddp":
        size = exchange.reduced_bytes * exchange.num_trained
        if replays:
            return (_collective("all-reduce", "gradients", size, 1, "behind the step"),)
        count = max(1, ceil(size / _DDP_BUCKET_BYTES))
        return (_collective("all-reduce", "gradients", size, count, "last micro-step"),)
    if strategy == "fsdp2":  # the root's weights stay from the forward to the backward pass
        moment: Moment = "micro-step" if exchange.adapter == "full" else "last micro-step"
        layer_bytes = exchange.layer_bytes + exchange.adapter_bytes
        return (
            _collective("all-gather", "weights", 2 * layer_bytes, 2 * layers, "micro-step"),
            _collective("all-gather", "weights", exchange.other_bytes, 1, "micro-step"),
            _collective("reduce-scatter", "gradients", exchange.reduced_bytes * exchange.num_trained, layers, moment),
        )
    size, buckets = exchange.compute_bytes * exchange.num_trained, ceil(exchange.num_trained / ZERO_BUCKET_ELEMENTS)
    if strategy == "zero3":
        return (
            _collective("all-gather", "weights", 2 * exchange.weight_bytes, 2 * (layers + 1), "micro-step"),
            _collective("reduce-scatter", "gradients", size, max(1, buckets), "micro-step"),
        )
    # DeepSpeed adds gradients up whole and keeps its part of them; with ZeRO-2 there is no room to wait with it.
    moment = "micro-step" if strategy == "zero2" else "last micro-step"
    return (
        _collective("all-reduce", "gradients", size, max(1, buckets), moment),
        _collective("all-gather", "updated weights", size, max(1, buckets), "behind the step"),
    )


def _collective(kind: CollectiveKind, what: str, num_bytes: float, num_messages: int, moment: Moment) -> Collective:
    return Collective(kind=kind, what=what, num_bytes=num_bytes, num_messages=num_messages, moment=moment)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The narrowest place that a ring of all ranks passes, as what each rank sends through it."""

    name: str
    gb_per_second: float  # as stated
    is_assumed: bool  # nobody said what is between the nodes

    @property
    def reached_gb_per_second(self) -> float:
        return self.gb_per_second * LINK_EFFICIENCY


def find_link(hardware: Hardware, node_gb_per_second: float | None = None) -> Link | None:
    """None where there is nothing to reach. A ring enters and leaves each node by all its network cards at once."""
    gpu = hardware.gpu
    if gpu is None or hardware.num_ranks == 1:
        return None
    inside = None
    if hardware.gpus_per_node > 1:
        names = {"nvlink": "NVLink", "pcie-p2p": "PCIe", "pcie-host": "PCIe and host memory"}
        stated = gpu.interconnect_gb_per_second / (1 if gpu.has_p2p else 2)  # in and out of host memory
        inside = Link(name=names[gpu.interconnect], gb_per_second=stated, is_assumed=False)
    if hardware.nodes == 1:
        return inside
    if node_gb_per_second is None:
        node_gb_per_second = hardware.network_gb_per_second
    is_assumed = node_gb_per_second is None
    if node_gb_per_second is None:
        is_center = gpu.gpu_class == "datacenter"
        per_gpu = _GPU_NETWORK_GB_PER_SECOND * hardware.gpus_per_node
        node_gb_per_second = per_gpu if is_center else _NODE_NETWORK_GB_PER_SECOND
    between = Link(name="the network between nodes", gb_per_second=node_gb_per_second, is_assumed=is_assumed)
    return between if inside is None or between.gb_per_second < inside.gb_per_second else inside


def reached_gb_per_second(hardware: Hardware) -> float:
    """What a collective is counted on to reach: its bus bandwidth."""
    link = find_link(hardware)
    return float("inf") if link is None else link.reached_gb_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step of one rank."""

    compute_seconds: float
    communication_seconds: float  # that links are busy
    hidden_seconds: float  # of those, gained by computing meanwhile
    straggling_seconds: float
    moved_bytes: float
    num_messages: int

    @property
    def exposed_seconds(self) -> float:
        return self.communication_seconds - self.hidden_seconds

    @property
    def waiting_seconds(self) -> float:
        """For links and for other ranks."""
        return self.exposed_seconds + self.straggling_seconds

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds


def estimate_step(
    collectives: Iterable[Collective],
    hardware: Hardware,
    *,
    micro_step_seconds: float,
    num_micro_steps: int,
    num_layers: int,
    node_gb_per_second: float | None = None,
) -> StepTime:
    """Each micro-step hides what travels with it; what is sent once goes beside the last, or behind all of them."""
    compute = micro_step_seconds * num_micro_steps
    link = find_link(hardware, node_gb_per_second)
    if link is None:
        return StepTime(
            compute_seconds=compute,
            communication_seconds=0.0,
            hidden_seconds=0.0,
            straggling_seconds=0.0,
            moved_bytes=0.0,
            num_messages=0,
        )
    times: dict[Moment, float] = {"micro-step": 0.0, "last micro-step": 0.0, "behind the step": 0.0}
    moved, messages = 0.0, 0
    for one in collectives:
        size, count = one.moved_bytes(hardware.num_ranks), num_micro_steps if one.moment == "micro-step" else 1
        times[one.moment] += size / (link.reached_gb_per_second * 1e9) + one.num_messages * _latency(one, hardware)
        moved, messages = moved + count * size, messages + count * one.num_messages
    often, once, behind = times["micro-step"], times["last micro-step"], times["behind the step"]
    hidden = num_micro_steps * _hide(often, micro_step_seconds, num_layers)
    hidden += _hide(once, max(0.0, micro_step_seconds - often / OVERLAP), num_layers)
    return StepTime(
        compute_seconds=compute,
        communication_seconds=num_micro_steps * often + once + behind,
        hidden_seconds=hidden,
        straggling_seconds=STRAGGLING * compute,
        moved_bytes=moved,
        num_messages=messages,
    )


def _hide(seconds: float, compute_seconds: float, num_layers: int) -> float:
    """The first layer's weights and the last layer's gradients have no compute beside them."""
    return (1 - INTERFERENCE) * min(seconds * (1 - 1 / (num_layers + 1)), OVERLAP * compute_seconds)


def _latency(one: Collective, hardware: Hardware) -> float:
    """Of one message: rings pass every rank; adding up takes trees, which are as deep as their logarithm."""
    ranks, nodes = hardware.num_ranks, hardware.nodes
    if one.kind == "all-reduce":
        inside, between = 2 * log2(max(2, ranks // nodes)), 2 * log2(nodes) if nodes > 1 else 0.0
    else:
        inside, between = float(ranks - nodes), float(nodes if nodes > 1 else 0)
    return _MESSAGE_SECONDS + inside * _HOP_SECONDS + between * _NODE_HOP_SECONDS
