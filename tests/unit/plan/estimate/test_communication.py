"""Estimated communication: volumes, links, and published scaling tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest

from launcher.base_models.families import Linear
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import Strategy
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.plan.estimate.communication import (
    INTERFERENCE,
    LINK_EFFICIENCY,
    STRAGGLING,
    Collective,
    Exchange,
    StepTime,
    estimate_step_time,
    get_slowest_link,
    make_collectives,
    make_exchange,
    reached_gb_per_second,
)
from launcher.plan.estimate.step_time import MICRO_STEP_SECONDS, Workload
from tests.conftest import ROOT

PUBLISHED = json.loads((ROOT / "tests/data/scaling_published.json").read_text())
TABLES: list[dict[str, Any]] = PUBLISHED["tables"]
EXCHANGE = Exchange(
    adapter="full", num_layers=10, layer_bytes=80.0, other_bytes=20.0, num_trained=50.0, compute_bytes=2.0
)


def make_shape(name: str) -> ModelShape:
    sizes = PUBLISHED["models"][name]
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["hidden_size"] // sizes["num_heads"]
    narrow = head * sizes["num_kv_heads"]
    matrices = [("q", hidden, hidden), ("k", hidden, narrow), ("v", hidden, narrow), ("o", hidden, hidden)]
    matrices += [("up", hidden, inner), ("down", inner, hidden)]
    matrices += [("gate", hidden, inner)] if sizes["gated_mlp"] else []
    return ModelShape(
        name=name,
        model_type="llama",
        head_dim=head,
        max_positions=65536,
        linears=tuple(Linear(name=f"{n}_proj", in_features=a, out_features=b) for n, a, b in matrices),
        norm_parameters_per_layer=2 * hidden,
        other_parameters=hidden,
        basis="config",
        **sizes,
    )


def make_workload(shape: ModelShape, **changes: Any) -> Workload:
    work = Workload(
        shape=shape,
        adapter="full",
        quantization="none",
        compute_dtype="bf16",
        compiled=True,
        checkpointing="none",
        document_tokens=2048,
    )
    return replace(work, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    name: str
    is_alike: bool  # has the micro-batch of the row that it is compared with
    published: float
    estimated: float

    @property
    def deviation(self) -> float:
        return self.estimated - self.published


def estimate_rate(table: dict[str, Any], model: str, row: dict[str, Any], seconds_per_token: float) -> float:
    """Return tokens/s per GPU."""
    shape = make_shape(model)
    gpus = min(row["gpus"], table["gpus_per_node"])
    nodes = row["gpus"] // gpus
    exchange = replace(
        make_exchange(make_workload(shape), shape.num_parameters), reduced_bytes=float(table["gradient_bytes"])
    )
    strategy: Strategy = table["strategy"] if row["gpus"] > 1 else "single"
    tokens = row["micro_batch_size"] * table["sequence_length"]
    hardware = make_hardware(lookup_gpu(table["gpu"]), gpus_per_node=gpus, nodes=nodes)
    time = estimate_step_time(
        make_collectives(strategy, exchange),
        hardware.model_copy(update={"network_gb_per_second": table["node_gb_per_second"]}),
        micro_step_seconds=MICRO_STEP_SECONDS + tokens * seconds_per_token,
        num_micro_steps=row["accumulation_steps"],
        num_layers=shape.num_layers,
    )
    return float(tokens * row["accumulation_steps"] / time.seconds)


def solve_compute(table: dict[str, Any], model: str, row: dict[str, Any]) -> float:
    """Return the seconds per token at which the estimate matches this row, because scaling is tested, not kernels."""
    low, high = 0.0, 1.0 / row["tokens_per_second_per_gpu"]
    for _ in range(60):
        middle = (low + high) / 2
        too_fast = estimate_rate(table, model, row, middle) > row["tokens_per_second_per_gpu"]
        low, high = (middle, high) if too_fast else (low, middle)
    return low


def compare_tables() -> Iterator[Compared]:
    for table in TABLES:
        for series in table["series"]:
            first, *others = series["rows"]
            base = first["tokens_per_second_per_gpu"]
            compute = solve_compute(table, series["model"], first)
            for row in others:
                yield Compared(
                    name=f"{series['model']} on {row['gpus']} {table['gpu']}",
                    is_alike=row["micro_batch_size"] == first["micro_batch_size"],
                    published=row["tokens_per_second_per_gpu"] / base,
                    estimated=estimate_rate(table, series["model"], row, compute) / base,
                )


def test_estimated_efficiency_agrees_with_published_tables() -> None:
    """Errors are in percentage points of the rate on the fewest GPUs, as in docs/PERFORMANCE.md."""
    rows = list(compare_tables())
    assert len(rows) == 51
    misses = sorted(abs(row.deviation) for row in rows)
    assert median(misses) <= 0.02
    assert sum(miss <= 0.10 for miss in misses) >= 45
    assert max(misses) <= 0.35
    # Rows in which only the number of GPUs differs, not the micro-batch:
    assert max(abs(row.deviation) for row in rows if row.is_alike) <= 0.10


def test_simpler_models_fit_published_tables_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simpler models: perfect scaling, and a ring that leaves a node through one NIC only."""
    rows = list(compare_tables())
    ours = median(abs(row.deviation) for row in rows)
    assert ours < 0.4 * median(abs(1.0 - row.published) for row in rows)
    narrow = [{**table, "node_gb_per_second": table["node_gb_per_second"] / table["gpus_per_node"]} for table in TABLES]
    monkeypatch.setitem(globals(), "TABLES", narrow)
    assert ours < 0.2 * median(abs(row.deviation) for row in compare_tables())


def test_shapes_have_the_published_parameter_counts() -> None:
    stated = {"mpt-125m": 125.3e6, "mpt-7b": 6.659e9, "mpt-70b": 64.86e9, "llama3-8b": 8.03e9, "qwen2.5-1.5b": 1.54e9}
    for name, count in stated.items():
        assert make_shape(name).num_parameters == pytest.approx(count, rel=0.02)


def of(strategy: Strategy, **changes: Any) -> list[tuple[str, float, str]]:
    found = make_collectives(strategy, replace(EXCHANGE, **changes))
    return [(one.kind, one.num_bytes, one.moment) for one in found]


def test_each_strategy_uses_its_collectives() -> None:
    assert of("single") == []
    assert of("ddp") == [("all-reduce", 200.0, "last micro-step")]
    gathers = [("all-gather", 160.0, "micro-step"), ("all-gather", 20.0, "micro-step")]
    assert of("fsdp2") == [*gathers, ("reduce-scatter", 200.0, "micro-step")]
    with_adapter = [("all-gather", 2 * (80.0 + 100.0), "micro-step"), gathers[1]]
    assert of("fsdp2", adapter="lora") == [*with_adapter, ("reduce-scatter", 200.0, "last micro-step")]
    between = ("all-reduce", 200.0, "last micro-step")
    assert of("hsdp") == [*of("fsdp2"), between]
    assert of("hsdp", adapter="lora") == [*of("fsdp2", adapter="lora"), between]
    updated = ("all-gather", 100.0, "after the step")
    assert of("zero1") == [("all-reduce", 200.0, "last micro-step"), updated]
    assert of("zero2") == [("all-reduce", 200.0, "micro-step"), updated]
    assert of("zero3") == [("all-gather", 200.0, "micro-step"), ("reduce-scatter", 200.0, "micro-step")]


def test_hsdp_gathers_inside_a_node_and_all_reduces_shards_between_nodes() -> None:
    hardware = make_hardware(lookup_gpu("h100"), gpus_per_node=8, nodes=4)
    gather, *_, reduce = make_collectives("hsdp", replace(EXCHANGE, adapter="lora"))
    assert (gather.scope, reduce.scope) == ("inside a node", "between nodes")

    def estimate_seconds(one: Collective) -> float:
        big = replace(one, num_bytes=1e12)
        time = estimate_step_time([big], hardware, micro_step_seconds=1.0, num_micro_steps=1, num_layers=99)
        return time.communication_seconds

    assert estimate_seconds(gather) == pytest.approx(1e12 * 7 / 8 / (450e9 * LINK_EFFICIENCY), rel=0.01)
    shard = 2 * (1e12 / 8) * 3 / 4  # sent by each GPU
    network = 200e9 * LINK_EFFICIENCY / 8  # the share of each GPU
    assert estimate_seconds(reduce) == pytest.approx(shard / network, rel=0.01)


def test_ring_moves_all_but_the_own_shard() -> None:
    def moved(kind: Any, ranks: int) -> float:
        one = Collective(kind=kind, what="", num_bytes=100.0, num_messages=1, moment="micro-step")
        return one.moved_bytes(ranks)

    assert moved("all-gather", 4) == moved("reduce-scatter", 4) == 75.0
    assert moved("all-reduce", 4) == 150.0
    assert moved("all-reduce", 1) == 0.0


def test_quantized_base_is_gathered_quantized_except_embeddings() -> None:
    shape = make_shape("qwen2.5-1.5b")
    whole, small = (make_exchange(make_workload(shape, quantization=kind), 0) for kind in ("none", "int4"))
    assert whole.weight_bytes == 2 * shape.num_parameters
    assert small.other_bytes == whole.other_bytes
    assert 0.25 < small.layer_bytes / whole.layer_bytes < 0.27


def test_slowest_link_limits_bandwidth() -> None:
    h100, consumer = lookup_gpu("h100"), lookup_gpu("rtx4090")
    assert get_slowest_link(make_hardware(h100, gpus_per_node=1, nodes=1)) is None
    assert reached_gb_per_second(make_hardware(h100, gpus_per_node=1, nodes=1)) == float("inf")
    inside = get_slowest_link(make_hardware(h100, gpus_per_node=8, nodes=1))
    assert inside is not None
    assert (inside.name, inside.gb_per_second) == ("NVLink", 450)
    # A ring leaves a node through all its NICs at once: eight of 25 GB/s.
    between = get_slowest_link(make_hardware(h100, gpus_per_node=8, nodes=2))
    assert between is not None
    assert between.gb_per_second == 200
    assert between.reached_gb_per_second == pytest.approx(200 * LINK_EFFICIENCY)
    host = get_slowest_link(make_hardware(consumer, gpus_per_node=2, nodes=1))
    assert host is not None
    assert (host.name, host.gb_per_second) == ("PCIe and host memory", 16)
    network = get_slowest_link(make_hardware(consumer, gpus_per_node=2, nodes=2))
    assert network is not None
    assert network.gb_per_second == 3


def time_of(kind: Any, num_bytes: float, moment: Any = "micro-step", steps: int = 1, seconds: float = 1.0) -> StepTime:
    one = Collective(kind=kind, what="", num_bytes=num_bytes, num_messages=1, moment=moment)
    hardware = make_hardware(lookup_gpu("h100"), gpus_per_node=8, nodes=1)
    return estimate_step_time([one], hardware, micro_step_seconds=seconds, num_micro_steps=steps, num_layers=99)


def test_overlapped_communication_is_partly_hidden() -> None:
    link = 450e9 * LINK_EFFICIENCY
    short = time_of("all-gather", 0.1 * link * 8 / 7)
    assert short.communication_seconds == pytest.approx(0.1, rel=1e-3)
    assert short.hidden_seconds == pytest.approx(0.099 * (1 - INTERFERENCE), rel=1e-3)
    assert short.seconds == pytest.approx(1 + STRAGGLING + 0.1 - short.hidden_seconds, rel=1e-3)
    long = time_of("all-gather", 10 * link * 8 / 7)
    assert long.hidden_seconds == pytest.approx(0.8 * (1 - INTERFERENCE))
    exposed = time_of("all-gather", 0.1 * link * 8 / 7, "after the step")
    assert exposed.hidden_seconds == 0


def test_gradients_reduced_once_do_not_grow_with_micro_steps() -> None:
    once, often = (time_of("all-reduce", 1e9, moment, steps=4) for moment in ("last micro-step", "micro-step"))
    assert often.communication_seconds == pytest.approx(4 * once.communication_seconds)


def test_many_small_messages_cost_latency() -> None:
    few, many = (
        estimate_step_time(
            [Collective(kind="all-gather", what="", num_bytes=1.0, num_messages=count, moment="micro-step")],
            make_hardware(lookup_gpu("h100"), gpus_per_node=8, nodes=nodes),
            micro_step_seconds=1.0,
            num_micro_steps=1,
            num_layers=10,
        ).communication_seconds
        for count, nodes in ((1, 1), (100, 16))
    )
    assert few < 1e-4
    assert 0.03 < many < 0.3
