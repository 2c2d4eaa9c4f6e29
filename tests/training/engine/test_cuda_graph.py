"""CUDA graphs of micro-steps: padding does not change results; on a GPU, replays equal kernel launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.choices import UNRECORDABLE_ATTENTION
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch, collate
from launcher.training.engine.cuda_graph import GraphedMicroSteps, Sizes, grow, measure, pad_to
from tests.training.builders import adapt, build, make_config, make_document, make_pack, make_plan, vary, write_base

TOKENS = 32


def make_batch(lengths: tuple[int, ...], num_trained: int) -> PackedBatch:
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedBatch(
        input_ids=torch.arange(TOKENS)[None],
        position_ids=torch.arange(TOKENS)[None],
        cu_seqlens=borders,
        trained_positions=torch.arange(num_trained),
        targets=torch.arange(1, num_trained + 1),
        max_length=TOKENS,
        document_lengths=lengths,
    )


def test_padding_does_not_change_the_loss() -> None:
    batch = make_batch((20, 12), 9)
    filled = pad_to(batch, Sizes(TOKENS, 6, 16))
    assert measure(filled) == Sizes(TOKENS, 6, 16)
    assert filled.cu_seqlens.tolist() == [0, 20, 32, 32, 32, 32]
    assert filled.cu_seqlens.dtype == torch.int32
    assert filled.targets.tolist() == [*range(1, 10), *[-1] * 7]
    assert filled.trained_positions[9:].tolist() == [0] * 7
    assert torch.equal(filled.input_ids, batch.input_ids)


SIZES = st.builds(Sizes, st.just(2048), st.integers(2, 200), st.integers(0, 2048))


@given(st.lists(SIZES, min_size=1, max_size=30), st.sampled_from([64, 256, 1024]))
def test_sizes_only_grow_and_cover_all_batches(met: list[Sizes], chunk: int) -> None:
    held: Sizes | None = None
    recordings = 0
    for needed in met:
        if held is None or not held.covers(needed):
            before, held = held, grow(needed, held, chunk)
            recordings += 1
            assert before is None or (held.num_trained, held.num_cu_seqlens) > (
                before.num_trained,
                before.num_cu_seqlens,
            )
        assert held.covers(needed)
        assert held.num_trained % chunk == 0 or held.num_trained == 2048
        assert 0 < held.num_trained <= 2048


def test_another_number_of_tokens_needs_another_graph() -> None:
    assert not Sizes(2048, 8, 1024).covers(Sizes(1024, 8, 1024))


def test_a_graph_is_released_after_its_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch unmaps memory that the replay still uses: seen as a misaligned address on an H200."""
    calls: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_given, name=name: calls.append(name))
    graph = SimpleNamespace(reset=lambda: calls.append("reset"))
    steps = GraphedMicroSteps(lambda _batch, total: total, [], loss_chunk=8192)
    steps._captured = SimpleNamespace(sizes=Sizes(1, 1, 1), graph=graph, loss=torch.zeros(()))  # type: ignore[assignment]
    steps._release()
    assert calls == ["synchronize", "reset", "empty_cache"]


def test_kernels_are_launched_if_capturing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """As here, without a GPU: warned about once, and trained anyway."""
    weight = torch.nn.Parameter(torch.ones(3))

    def micro_step(batch: PackedBatch, num_trained: torch.Tensor) -> torch.Tensor:
        loss = (weight * len(batch.targets)).sum() / num_trained
        loss.backward()
        return loss.detach()

    graphs = GraphedMicroSteps(micro_step, [weight], 8192)
    batch = make_batch((20, 12), 9)
    assert [float(graphs(batch, 3)) for _ in range(2)] == [9.0, 9.0]
    assert not graphs.is_active
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 6.0, 6.0], "both micro-steps, added up"
    torch.optim.SGD([weight]).zero_grad(set_to_none=True)
    graphs(batch, 3)
    assert weight.grad.tolist() == [3.0, 3.0, 3.0], "taken away means zero"
    console = capsys.readouterr().err
    assert console.count("cannot capture a CUDA graph, launching kernels one by one: ") == 1


def test_a_replay_uses_weights_loaded_from_a_checkpoint(plan: Plan, store: Store, tmp_path: Path) -> None:
    """A replay does not call the model, which would copy them into its fused weights."""
    built: Any = build(plan, store, tmp_path).engine
    block = built.module.fused_lora.weights[0]
    built.module.fused_lora.refresh()
    engine = replace(built, graphs=lambda _batch, _count: block.materialize().clone())
    up = block.members[0].lora_B["default"].weight
    with torch.no_grad():
        up.fill_(0.25)
    seen = engine.micro_step(None, 1, is_last=True)
    num_in, size, rank = block.members[0].in_features, block.shape.out_features[0], block.shape.rank
    assert bool((seen[:size, num_in : num_in + rank] == 0.25 * block.shape.lora_scale).all())


@pytest.mark.parametrize("small", [True, False])
def test_separate_gradients_accumulate(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured function accumulates at fixed addresses, even if a parameter gets no gradient."""
    monkeypatch.setattr("launcher.training.engine.cuda_graph._SMALL_BYTES", 2**20 if small else 0)
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    had: list[bool] = []

    def micro_step(batch: PackedBatch, num_trained: torch.Tensor) -> torch.Tensor:
        had.append(used.grad is not None)
        loss = (used * len(batch.targets)).sum() / num_trained
        loss.backward()
        return loss.detach()

    graphs = GraphedMicroSteps(micro_step, [used, unused], 8192)
    graphs._keep_gradients()
    kept = used.grad
    for _ in range(2):
        assert float(graphs._accumulate(make_batch((20, 12), 9), torch.tensor(3.0))) == 9.0
    assert used.grad is kept
    assert used.grad is not None
    assert used.grad.tolist() == [6.0, 6.0, 6.0]
    assert unused.grad is not None
    assert unused.grad.tolist() == [0.0, 0.0]
    assert had == [not small] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("small", [True, False])
def test_replays_equal_kernel_launches(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With accumulation, batches of other sizes, and gradients set to None between steps."""
    monkeypatch.setattr("launcher.training.engine.cuda_graph._SMALL_BYTES", 2**20 if small else 0)
    torch.manual_seed(0)
    layer = torch.nn.Embedding(64, 8).cuda()
    head = torch.nn.Linear(8, 64).cuda()
    parameters = [*layer.parameters(), *head.parameters()]

    def micro_step(batch: PackedBatch, num_trained: torch.Tensor) -> torch.Tensor:
        hidden = layer(batch.input_ids[0]).index_select(0, batch.trained_positions)
        counts = (batch.targets >= 0).float()
        losses = torch.nn.functional.cross_entropy(head(hidden), batch.targets.clamp(min=0), reduction="none")
        loss = (losses * counts).sum() / num_trained
        loss.backward()
        return loss.detach()

    batches = [make_batch((20, 12), 9), make_batch((32,), 30), make_batch((8, 8, 8, 8), 4), make_batch((32,), 0)]
    batches = [batch.to(torch.device("cuda")) for batch in batches]
    graphs = GraphedMicroSteps(micro_step, parameters, 8192)
    graphs._chunk = 8
    ours = [graphs(batch, 10) for batch in batches]
    found = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    theirs = [micro_step(batch, torch.tensor(10.0, device="cuda")) for batch in batches]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found, [parameter.grad for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None
    graphs(batches[0], 10)
    once = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    micro_step(batches[0], torch.tensor(10.0, device="cuda"))
    torch.testing.assert_close(once, [parameter.grad for parameter in parameters])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_replays_of_a_real_model_equal_kernel_launches(
    kind: str, checkpointing: str, store: Store, tmp_path: Path
) -> None:
    """Qwen3 with dropout, from the same RNG state, to the bit: three steps, whose batch grows and is captured again."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    plan = make_plan(write_base(tmp_path / "base", make_config(**sizes)))
    backend = plan.attention.backend
    fixed = {"cuda_graph": True, "compile": None, "checkpointing": checkpointing, "loss_kernel": "fused"}
    fixed |= {"attention.backend": "varlen" if backend in UNRECORDABLE_ATTENTION else backend}
    run = build(vary(plan, {**adapt(kind, dropout=0.1), **fixed}), store, tmp_path / "run")
    engine, graphs = run.engine, run.engine.graphs
    assert graphs is not None
    graphs._chunk = 8
    parameters = engine.trained_parameters()
    held = []
    for step, trained in enumerate((4, 20, 50)):
        packs = [make_pack([make_document(60, trained, seed=10 * step + slot)]) for slot in range(4)]
        batch = collate(packs[: run.train.shape.micro_batch_size], run.train.shape).to(engine.device)
        engine.module.fused_lora.refresh()
        graphs._keep_gradients()
        captured = graphs._get_graph(batch, trained)
        assert captured is not None, "the capture failed"
        held.append(captured.sizes.num_trained)
        state = torch.cuda.get_rng_state(engine.device)
        replayed = _run_once(parameters, lambda batch=batch, trained=trained: graphs(batch, trained))
        advanced = torch.cuda.get_rng_state(engine.device)
        other = _run_once(parameters, lambda batch=batch, trained=trained: graphs(batch, trained))
        torch.cuda.set_rng_state(state, engine.device)
        padded, count = pad_to(batch, captured.sizes), torch.full((), float(trained), device=engine.device)
        launched = _run_once(parameters, lambda padded=padded, count=count: graphs._micro_step(padded, count))
        assert all(map(torch.equal, replayed, launched)), "a replay differs from launches"
        assert torch.equal(torch.cuda.get_rng_state(engine.device), advanced), "a replay moves the RNG as launches do"
        # At the first step B is zero: only its gradient depends on the mask.
        assert not all(map(torch.equal, replayed, other)), "the dropout mask is that of the replay before"
        engine.update(launched[0])
    assert graphs.is_active
    assert held == sorted(set(held)), "captured again for each larger batch"


def _run_once(parameters: list[torch.nn.Parameter], action: Any) -> list[torch.Tensor]:
    """Return the loss and the gradients of one micro-step."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss = action().clone()
    return [loss, *(parameter.grad.clone() for parameter in parameters if parameter.grad is not None)]
