"""One training with every strategy: the same packs, losses, gradients and weights as in one process.

Global batch 5 on two ranks (an empty slot), three micro-batches per step, and an epoch of 8 packs: its last step has 3,
so that one rank has empty micro-batches. Measured in fp32 on two x86-64 cores, as relative differences
to one process: losses 2e-7, gradient norms 2e-6, validation loss 2e-7.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher.core import metrics
from launcher.core.choices import FSDP_STRATEGIES, SHARDED_STRATEGIES, Strategy
from launcher.render import Rendezvous
from tests.distributed.conftest import Reference
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, get_free_port, make_command
from tests.faults.fork_server import ForkServer
from tests.training.builders import moved_difference

Train = Callable[[TrainingCase], TrainedRun]
InitialWeights = Callable[[TrainingCase], dict[str, Tensor]]

LOSS = 1e-4
NORM = 3e-4  # ZeRO sums over one flat tensor: on some CPUs rounding loses 1e-4 of the sum
# Relative to the distance the weights moved. Adam's first steps have the same size for gradients of 1e-9 and of 1: if
# rounding changes a sign, the weight moves in the other direction.
MOVED = 5e-3
LOSS_BF16 = 1e-2

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CASES = [TrainingCase(strategy="single", ranks_per_node=1)] + [
    TrainingCase(strategy=strategy, adapter=adapter) for adapter in ("lora", "full") for strategy in STRATEGIES
]
# `make test` runs each engine once; `make test-all` runs all combinations.
FAST_CASES = ("single-1-lora", "ddp-2-lora", "fsdp2-2-lora", "zero2-2-lora", "zero3-2-full")
SLOW_CASES = [case for case in CASES if case.name not in FAST_CASES]
# Deferred as with CUDA graphs. On a CPU no graph is captured; all else is the same.
DEFERRED = TrainingCase(strategy="ddp", changes={"defer_gradient_sync": True})
DORA = [TrainingCase(strategy=strategy, adapter="dora") for strategy in STRATEGIES]
OFFLOADED = [
    TrainingCase(strategy="zero2", changes={"offload": "optimizer"}),
    TrainingCase(strategy="zero3", changes={"offload": "optimizer"}, adapter="full"),
    TrainingCase(strategy="zero3", changes={"offload": "optimizer_and_parameters"}),
    TrainingCase(strategy="zero3", changes={"offload": "optimizer_and_parameters"}, adapter="full"),
]
# The overhead of an engine is measured on one GPU: one rank must run the engine, and not fall back to "single".
ONE_RANK = [TrainingCase(strategy=strategy, ranks_per_node=1) for strategy in STRATEGIES]
_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTURES = [
    TrainingCase(strategy="ddp", base="mixture", config={"target_modules": ["q_proj"], "target_parameters": _STACKS}),
    TrainingCase(strategy="fsdp2", base="mixture", config={"target_modules": "all-linear"}),
]
# ZeRO-3 gathers and frees parameters between graphs: the compiled layers must use the same ones.
COMPILED = [
    TrainingCase(strategy="zero3", adapter=adapter, config={"torch_compile": True}) for adapter in ("lora", "full")
]
# Two replicas of two shards.
HSDP = [TrainingCase(strategy="hsdp", adapter=adapter, nodes=2) for adapter in ("lora", "full")]
# Emulated on a CPU, twenty times slower than fp32.
BF16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
IN_BF16 = [TrainingCase(strategy=strategy, changes=BF16) for strategy in ("ddp", "fsdp2", "zero2", "zero3")]
# A rounding error of FP32 can select the next code of FP8. Measured: 3e-4 with FSDP2 and HSDP, 1e-7 with DDP.
LOSS_FP8 = 5e-3
FP8_LAYERS = {"precision.fp8_layers": True}
IN_FP8 = [
    TrainingCase(strategy="ddp", adapter="full", changes=FP8_LAYERS),
    TrainingCase(strategy="fsdp2", adapter="full", changes=FP8_LAYERS),
    TrainingCase(strategy="hsdp", adapter="full", nodes=2, changes=FP8_LAYERS),
]
# 96 slots for 90 packs: accumulation 8. The second step has the rest of an epoch of 101 packs.
MANY_RANKS = [
    TrainingCase(
        strategy=strategy,
        ranks_per_node=4,
        global_batch=90,
        micro_batch=3,
        num_rows=120,
        config={"max_seq_length": 192, "max_steps": 2, "eval_steps": 2, "save_steps": 2},
    )
    for strategy in ("ddp", "fsdp2")
]


@pytest.fixture(scope="module")
def train(harness: Harness, fork_server: ForkServer) -> Train:
    """Return a function that trains a case with one agent per node, all forked."""

    def launch(case: TrainingCase) -> TrainedRun:
        planned, paths = harness.write(case)
        port = get_free_port()
        rendezvous = Rendezvous(host="127.0.0.1", port=port) if case.nodes > 1 else None
        with ExitStack() as stack:
            commands = [make_command(planned, paths, rendezvous=rendezvous, machine_rank=n) for n in range(case.nodes)]
            agents = [stack.enter_context(fork_server.started(command)) for command in commands]
            for agent in agents:
                assert agent.wait() == 0, "\n".join(agent.console for agent in agents)
        return TrainedRun(paths)

    return launch


def get_case_name(case: TrainingCase) -> str:
    return case.name


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in SLOW_CASES else case for case in CASES],
    ids=get_case_name,
)
def test_strategy_matches_one_process(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> None:
    trained = train(case)
    check_same(trained, reference(case), initial_weights(case))
    check_partial_steps(trained)
    check_placement(case, trained)


def test_deferred_gradient_sync_matches_one_process(
    train: Train, reference: Reference, initial_weights: InitialWeights
) -> None:
    case = DEFERRED
    trained = train(case)
    assert "after each step" in trained.outcome.observed["gradients"]
    check_same(trained, reference(case), initial_weights(case))
    check_partial_steps(trained)
    check_placement(case, trained)


@pytest.mark.parametrize(
    "case", [IN_FP8[1], *(pytest.param(case, marks=pytest.mark.slow) for case in IN_FP8[::2])], ids=get_case_name
)
def test_fp8_layers_match_one_process(train: Train, reference: Reference, case: TrainingCase) -> None:
    trained, single_process = train(case), reference(case)
    assert "outputs and input gradients of" in trained.outcome.observed["FP8"]
    assert trained.packs == single_process.packs
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS_FP8
    check_partial_steps(trained)
    check_placement(case, trained)


@pytest.mark.slow  # HSDP below runs on two nodes, too
def test_two_nodes_match_one_process(train: Train, reference: Reference, initial_weights: InitialWeights) -> None:
    check_two_nodes(train, reference, initial_weights, TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2))


@pytest.mark.parametrize("case", [HSDP[0], pytest.param(HSDP[1], marks=pytest.mark.slow)], ids=get_case_name)
def test_hsdp_on_two_nodes_matches_one_process(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> None:
    check_partial_steps(check_two_nodes(train, reference, initial_weights, case))


@pytest.mark.slow
def test_ranks_started_by_exec_match_one_process(
    harness: Harness, reference: Reference, initial_weights: InitialWeights
) -> None:
    """As a user starts them; the other tests fork them."""
    case = TrainingCase(strategy="zero3", adapter="full")
    ended, trained = harness.train(case)
    assert ended.returncode == 0, ended.console
    check_same(trained, reference(case), initial_weights(case))
    check_placement(case, trained)


@pytest.mark.slow
def test_two_nodes_with_c10d_match_one_process(
    harness: Harness, reference: Reference, initial_weights: InitialWeights
) -> None:
    """By exec, as on two machines."""
    case = TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2)
    planned, paths = harness.write(case)
    ended = harness.launch_nodes(planned, paths, "c10d")
    assert ended.returncode == 0, ended.console
    check_same(TrainedRun(paths), reference(case), initial_weights(case))
    check_placement(case, TrainedRun(paths))


@pytest.mark.slow
@pytest.mark.parametrize("case", DORA + OFFLOADED + ONE_RANK + MIXTURES, ids=get_case_name)
def test_other_cases_match_one_process(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> None:
    trained = train(case)
    check_same(trained, reference(case), initial_weights(case))
    check_placement(case, trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "pissa_niter_4"},
        {"modules_to_save": ["embed_tokens"]},
        {"new_tokens": ["RETURN", "WHERE"]},
        {"new_tokens": ["RETURN", "WHERE"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
def test_options_of_lora_match_one_process(train: Train, reference: Reference, config: dict[str, Any]) -> None:
    case = TrainingCase(strategy="ddp", config=config)
    trained = train(case)
    for name, limit in ((metrics.TRAIN_LOSS, LOSS), (metrics.GRAD_NORM, NORM), (metrics.EVAL_LOSS, LOSS)):
        assert largest_difference(trained, reference(case), name) < limit
    if "new_tokens" in config:
        assert_new_tokens_were_trained(trained)


def assert_new_tokens_were_trained(trained: TrainedRun) -> None:
    """Both embeddings start as the same mean; tokens that the rows do not contain would keep it."""
    tensors = load_file(trained.paths.adapter / "adapter_model.safetensors")
    (rows,) = [tensor for name, tensor in tensors.items() if "embed_tokens" in name]
    tokens = json.loads((trained.paths.adapter / "tokenizer.json").read_text())["added_tokens"]
    first, second = (token["id"] for token in tokens[-2:]) if len(rows) > 2 else (0, 1)  # two rows: only theirs
    assert not torch.equal(rows[first], rows[second])


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=get_case_name)
def test_compiled_training_matches_one_process(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> None:
    """Compare with one process without torch.compile."""
    trained = train(case)
    assert "per layer" in trained.outcome.observed["torch.compile"]
    check_same(trained, reference(replace(case, config={})), initial_weights(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY_RANKS, ids=get_case_name)
def test_global_batch_90_on_four_ranks(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> None:
    trained = train(case)
    assert len(trained.packs[0]) == 90
    assert 0 < len(trained.packs[1]) < 90
    check_same(trained, reference(case), initial_weights(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_BF16, ids=get_case_name)
def test_bf16_loss_matches_one_process(train: Train, reference: Reference, case: TrainingCase) -> None:
    trained = train(case)
    single_process = reference(case)
    assert trained.packs == single_process.packs
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS_BF16


def check_two_nodes(
    train: Train, reference: Reference, initial_weights: InitialWeights, case: TrainingCase
) -> TrainedRun:
    trained = train(case)
    check_same(trained, reference(case), initial_weights(case))
    check_placement(case, trained)
    return trained


def check_same(trained: TrainedRun, single_process: TrainedRun, initial_weights: dict[str, Tensor]) -> None:
    assert trained.packs == single_process.packs
    assert trained.values(metrics.LEARNING_RATE) == single_process.values(metrics.LEARNING_RATE)
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS
    assert largest_difference(trained, single_process, metrics.GRAD_NORM) < NORM
    assert len(trained.values(metrics.EVAL_LOSS)) == 1
    assert largest_difference(trained, single_process, metrics.EVAL_LOSS) < LOSS
    difference = moved_difference(
        *(drop_lm_head(found) for found in (trained.weights, single_process.weights, initial_weights))
    )
    assert difference < MOVED
    assert trained.files == single_process.files
    assert trained.outcome.status == "done"


def drop_lm_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the LM head: tied to the embeddings, it is saved once."""
    return {name: weight.float() for name, weight in weights.items() if name != "lm_head.weight"}


def check_partial_steps(trained: TrainedRun) -> None:
    sizes = [len(packs) for packs in trained.packs]
    assert sorted(sizes) == [3, 5, 5]
    assert max(trained.values(metrics.GRAD_NORM)) > 0.5  # else clipping would not be tested


def check_placement(case: TrainingCase, trained: TrainedRun) -> None:
    """Check which parameters each rank holds and updates, as recorded in the live process."""
    for rank in range(case.num_ranks):
        held = trained.placement(rank)
        everything = held["num_parameters"]
        share = case.ranks_per_node if case.strategy == "hsdp" else case.num_ranks
        is_sharded = case.strategy in SHARDED_STRATEGIES
        assert held["num_dtensors"] == (everything if case.strategy in FSDP_STRATEGIES else 0)
        assert held["num_partitioned"] == (everything if case.strategy == "zero3" else 0)
        assert (held["num_empty"] > 0) == (case.strategy == "zero3")
        assert is_close_to(held["held_elements"], held["total_elements"] / (share if is_sharded else 1))
        steps_all = case.strategy in ("single", "ddp")
        assert is_close_to(held["stepped_elements"], held["trained_elements"] / (1 if steps_all else share))
        if "quantization" not in case.changes:  # bitsandbytes imports it
            assert not held["loads_compiler"], "importing it takes more than a second"
        assert held["splits_gradients"] == (case.strategy == "zero2")  # the difference to ZeRO-1


def is_close_to(number: float, expected: float) -> bool:
    """Compare with a tolerance for the padding of shards."""
    return expected <= number < 1.05 * expected


def largest_difference(trained: TrainedRun, single_process: TrainedRun, name: str) -> float:
    pairs = zip(trained.values(name), single_process.values(name), strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)
