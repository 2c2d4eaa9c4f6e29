"""Communication time per step: the collectives of a strategy, the link they use, and how much overlaps with compute.

The traffic is counted and checked against real runs of two ranks (tests/distributed/test_traffic.py). We never measured
its duration on several GPUs: the constants below come from published tables of other trainers
(tests/data/scaling_published.json). Pure, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal

from launcher.core.choices import DTYPE_BYTES, NF4_BYTES, ZERO_BUCKET_ELEMENTS, AdapterKind, Strategy
from launcher.core.units import MIB
from launcher.hardware.model import Gpu, Hardware
from launcher.plan.estimate.step_time import Workload

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]
Moment = Literal["micro-step", "last micro-step", "after the step"]
Scope = Literal["all ranks", "inside a node", "between nodes"]

# Share of a link's stated bandwidth that collectives reach.
LINK_EFFICIENCY = 0.7
# Share of a micro-step's compute that communication can overlap with.
OVERLAP = 0.8
# Share of overlapped communication that still costs time: it uses compute units and memory bandwidth.
INTERFERENCE = 0.5
# Waiting for the slowest rank, as a share of compute.
STRAGGLING = 0.02
# Latency of a collective, and of each of its hops.
_MESSAGE_SECONDS = 15e-6
_HOP_SECONDS = 4e-6
_NODE_HOP_SECONDS = 20e-6
# Between nodes: 200 Gb/s InfiniBand per GPU in data centres, one 25 GbE port per machine elsewhere. Assumed.
_GPU_NETWORK_GB_PER_SECOND = 25.0
_NODE_NETWORK_GB_PER_SECOND = 3.0
# DDP sends gradients in buckets of this size.
_DDP_BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Bytes of the weights and gradients that ranks exchange."""

    adapter: AdapterKind
    num_layers: int
    layer_bytes: float  # weights of all layers, as they are gathered
    other_bytes: float  # embeddings, head, last norm
    num_trained: float
    compute_bytes: float  # of one number in the compute dtype
    reduced_bytes: float = 4.0  # of one gradient, where ranks add them up: always in FP32

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of the base weights."""
        return self.layer_bytes + self.other_bytes

    @property
    def adapter_bytes(self) -> float:
        """Return the bytes of the adapter, which FSDP2 gathers with the layers' weights; 0 in full fine-tuning."""
        return 0.0 if self.adapter == "full" else self.num_trained * self.compute_bytes


def make_exchange(workload: Workload, num_trained: float) -> Exchange:
    """Return the sizes of what ranks exchange; embeddings, head and norms are never quantized."""
    shape, compute = workload.shape, float(DTYPE_BYTES[workload.compute_dtype])
    matrices = sum(linear.in_features * linear.out_features for linear in shape.linears)
    stored = NF4_BYTES if workload.quantization == "int4" else compute
    layer = matrices * stored + (shape.layer_parameters - matrices) * compute
    return Exchange(
        adapter=workload.adapter,
        num_layers=shape.num_layers,
        layer_bytes=shape.num_layers * layer,
        other_bytes=(shape.num_parameters - shape.num_layers * shape.layer_parameters) * compute,
        num_trained=num_trained,
        compute_bytes=compute,
    )


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation of a strategy, with its bytes and messages per optimizer step or micro-step."""

    kind: CollectiveKind
    what: str
    num_bytes: float  # of what all ranks together hold of it
    num_messages: int
    moment: Moment
    scope: Scope = "all ranks"  # the ranks that it connects

    def moved_bytes(self, num_ranks: int) -> float:
        """Return the bytes sent by each rank in a ring; an all-reduce is a reduce-scatter and an all-gather."""
        return (2 if self.kind == "all-reduce" else 1) * self.num_bytes * (num_ranks - 1) / num_ranks


def make_collectives(strategy: Strategy, exchange: Exchange, *, replays: bool = False) -> tuple[Collective, ...]:
    """Return a strategy's collectives: DDP all-reduces gradients once per step; FSDP2 and ZeRO-3 also gather weights.

    HSDP runs FSDP2's collectives inside each node, and all-reduces gradient shards between nodes once per step.

    DDP ranks that replay a CUDA graph all-reduce in one message after the replay (training/engine/collectives.py).
    """
    layers = exchange.num_layers
    if strategy == "single":
        return ()
    if strategy == "ddp":
        size = exchange.reduced_bytes * exchange.num_trained
        if replays:
            return (Collective("all-reduce", "gradients", size, 1, "after the step"),)
        count = max(1, ceil(size / _DDP_BUCKET_BYTES))
        return (Collective("all-reduce", "gradients", size, count, "last micro-step"),)
    if strategy == "hsdp":
        inside = (replace(one, scope="inside a node") for one in make_collectives("fsdp2", exchange))
        size = exchange.reduced_bytes * exchange.num_trained
        between = Collective("all-reduce", "gradient shards", size, layers, "last micro-step", scope="between nodes")
        return (*inside, between)
    if strategy == "fsdp2":  # the root's weights stay from the forward to the backward pass
        moment: Moment = "micro-step" if exchange.adapter == "full" else "last micro-step"
        layer_bytes = exchange.layer_bytes + exchange.adapter_bytes
        return (
            Collective("all-gather", "weights", 2 * layer_bytes, 2 * layers, "micro-step"),
            Collective("all-gather", "weights", exchange.other_bytes, 1, "micro-step"),
            Collective("reduce-scatter", "gradients", exchange.reduced_bytes * exchange.num_trained, layers, moment),
        )
    size, buckets = exchange.reduced_bytes * exchange.num_trained, ceil(exchange.num_trained / ZERO_BUCKET_ELEMENTS)
    if strategy == "zero3":
        return (
            Collective("all-gather", "weights", 2 * exchange.weight_bytes, 2 * (layers + 1), "micro-step"),
            Collective("reduce-scatter", "gradients", size, max(1, buckets), "micro-step"),
        )
    # DeepSpeed all-reduces full gradients and keeps its shard; ZeRO-2 does so for every micro-step to save memory.
    moment = "micro-step" if strategy == "zero2" else "last micro-step"
    return (
        Collective("all-reduce", "gradients", size, max(1, buckets), moment),
        Collective(
            "all-gather",
            "updated weights",
            exchange.compute_bytes * exchange.num_trained,
            max(1, buckets),
            "after the step",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The slowest link of a ring over all ranks, and its stated bandwidth."""

    name: str
    gb_per_second: float  # as stated

    @property
    def reached_gb_per_second(self) -> float:
        return self.gb_per_second * LINK_EFFICIENCY


def get_slowest_link(hardware: Hardware) -> Link | None:
    """Return the slowest link of a ring over all ranks, which uses all network cards of a node; None for one rank."""
    gpu = hardware.gpu
    if gpu is None or hardware.num_ranks == 1:
        return None
    inside = None
    if hardware.gpus_per_node > 1:
        names = {"nvlink": "NVLink", "pcie-p2p": "PCIe", "pcie-host": "PCIe and host memory"}
        stated = gpu.interconnect_gb_per_second / (1 if gpu.has_p2p else 2)  # in and out of host memory
        inside = Link(name=names[gpu.interconnect], gb_per_second=stated)
    if hardware.nodes == 1:
        return inside
    between = _make_network_link(gpu, hardware)
    return between if inside is None or between.gb_per_second < inside.gb_per_second else inside


def _make_network_link(gpu: Gpu, hardware: Hardware) -> Link:
    """Return the network link of a node, which its ranks share; its bandwidth is assumed if it is not known."""
    gb_per_second = hardware.network_gb_per_second
    if gb_per_second is None:
        is_center = gpu.gpu_class == "datacenter"
        per_gpu = _GPU_NETWORK_GB_PER_SECOND * hardware.gpus_per_node
        gb_per_second = per_gpu if is_center else _NODE_NETWORK_GB_PER_SECOND
    return Link(name="the network between nodes", gb_per_second=gb_per_second)


def reached_gb_per_second(hardware: Hardware) -> float:
    """Return the bus bandwidth in GB/s that a collective is assumed to reach; infinite for one rank."""
    link = get_slowest_link(hardware)
    return float("inf") if link is None else link.reached_gb_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Time of one optimizer step on one rank."""

    compute_seconds: float
    communication_seconds: float = 0.0  # time the links are busy
    hidden_seconds: float = 0.0  # of that, overlapped with compute
    straggling_seconds: float = 0.0

    @property
    def waiting_seconds(self) -> float:
        """Return the time spent waiting for links and other ranks."""
        return self.communication_seconds - self.hidden_seconds + self.straggling_seconds

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds


def estimate_step_time(
    collectives: Iterable[Collective],
    hardware: Hardware,
    *,
    micro_step_seconds: float,
    num_micro_steps: int,
    num_layers: int,
) -> StepTime:
    """Return the step time; collectives overlap with compute of their micro-step, except those after the step."""
    compute = micro_step_seconds * num_micro_steps
    if hardware.gpu is None or hardware.num_ranks == 1:
        return StepTime(compute_seconds=compute)
    times: dict[Moment, float] = {"micro-step": 0.0, "last micro-step": 0.0, "after the step": 0.0}
    for one in collectives:
        times[one.moment] += _estimate_collective(one, hardware)
    often, once, after = times["micro-step"], times["last micro-step"], times["after the step"]
    hidden = num_micro_steps * _hide(often, micro_step_seconds, num_layers)
    hidden += _hide(once, max(0.0, micro_step_seconds - often / OVERLAP), num_layers)
    return StepTime(
        compute_seconds=compute,
        communication_seconds=num_micro_steps * often + once + after,
        hidden_seconds=hidden,
        straggling_seconds=STRAGGLING * compute,
    )


def _estimate_collective(one: Collective, hardware: Hardware) -> float:
    """Return the seconds that all messages of a collective take on the slowest link between its ranks."""
    if one.scope == "inside a node":
        hardware = hardware.model_copy(update={"nodes": 1})
    link = get_slowest_link(hardware)
    if one.scope == "between nodes":  # each GPU of a node sends its shard, over the network that they share
        assert hardware.gpu is not None
        link = _make_network_link(hardware.gpu, hardware)
        hardware = hardware.model_copy(update={"gpus_per_node": 1})
    assert link is not None
    size = one.moved_bytes(hardware.num_ranks)
    return size / (link.reached_gb_per_second * 1e9) + one.num_messages * _latency(one, hardware)


def _hide(seconds: float, compute_seconds: float, num_layers: int) -> float:
    """Return the seconds of communication hidden by compute; the first weights and last gradients cannot overlap."""
    return (1 - INTERFERENCE) * min(seconds * (1 - 1 / (num_layers + 1)), OVERLAP * compute_seconds)


def _latency(one: Collective, hardware: Hardware) -> float:
    """Return the latency of one message: rings pass every rank, all-reduce uses trees of logarithmic depth."""
    ranks, nodes = hardware.num_ranks, hardware.nodes
    if one.kind == "all-reduce":
        inside, between = 2 * log2(max(2, ranks // nodes)), 2 * log2(nodes) if nodes > 1 else 0.0
    else:
        inside, between = float(ranks - nodes), float(nodes if nodes > 1 else 0)
    return _MESSAGE_SECONDS + inside * _HOP_SECONDS + between * _NODE_HOP_SECONDS
