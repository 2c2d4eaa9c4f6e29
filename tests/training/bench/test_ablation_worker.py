"""Every stage of an ablation trains the same rows to the same loss."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from launcher.bench.ablation_stages import LoopConfig
from launcher.bench.workers.ablation_data import make_batches, split_documents, tokenize
from launcher.bench.workers.ablation_loop import PlainLoop, list_steps
from launcher.bench.workers.ablation_model import build_stage_model, derive_stage_plan
from launcher.corpus.pack_file import PackFile
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from tests.conftest import ROOT
from tests.training.builders import SEQUENCE_LENGTH, vary

CPU = torch.device("cpu")
LAST = LoopConfig(tokenization="before", rows="packed", attention="sdpa", loss="chunked", checkpointing="none")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "launcher/base_models/tiny_base/tokenizer.json"))


def compute_step(plan: Plan, store: Store, config: LoopConfig, tokenizer: Tokenizer) -> tuple[float, float]:
    """Return the loss of the first step and the norm of its gradients."""
    file: PackFile = store.open_split("train")
    stage_plan = derive_stage_plan(plan, config)
    model = build_stage_model(stage_plan, config, (), CPU)
    batches = make_batches(file, list_steps(plan, file, 1), config, 2, SEQUENCE_LENGTH, tokenizer)
    total = torch.zeros(())
    for index in range(len(batches)):
        loss = model(batches[index]) / batches.count_trained(0)
        loss.backward()
        total += loss.detach()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return float(total), float(torch.stack(norms).norm())


@pytest.mark.parametrize(
    "config",
    [
        LoopConfig(),
        LoopConfig(tokenization="before"),
        LoopConfig(rows="packed"),
        LoopConfig(attention="sdpa"),
        LoopConfig(rows="packed", attention="sdpa"),
        LoopConfig(attention="planned"),
        LoopConfig(attention="planned", rows="packed"),
        LoopConfig(attention="planned", rows="packed", loss="chunked"),
        LoopConfig(loss="chunked"),
        LoopConfig(checkpointing="none"),
    ],
    ids=lambda config: "-".join(f"{value}" for value in config.model_dump(exclude_defaults=True).values()) or "before",
)
def test_stages_compute_the_same_loss_and_gradients(
    plan: Plan, store: Store, tokenizer: Tokenizer, config: LoopConfig
) -> None:
    loss, norm = compute_step(plan, store, LAST, tokenizer)
    assert compute_step(plan, store, config, tokenizer) == pytest.approx((loss, norm), rel=1e-4)


def test_padded_and_packed_steps_have_the_same_tokens(plan: Plan, store: Store, tokenizer: Tokenizer) -> None:
    file = store.open_split("train")
    steps = list_steps(plan, file, 2)
    padded = make_batches(file, steps, LoopConfig(), 2, SEQUENCE_LENGTH, tokenizer)
    packed = make_batches(file, steps, LAST, 2, SEQUENCE_LENGTH, tokenizer)
    expected = [int(file.count("input_ids")[list(packs)].sum()) for packs in steps]
    assert [padded.count_tokens(step) for step in range(2)] == expected
    assert [packed.count_tokens(step) for step in range(2)] == expected
    assert padded.count_micro_batches(0) > packed.count_micro_batches(0)


def test_tokenizing_on_the_fly_gives_the_stored_tokens(tokenizer: Tokenizer) -> None:
    import numpy as np

    from launcher.bench.workers.ablation_data import Document, _add_texts

    ids = np.array(tokenizer.encode("MATCH (n:Person) RETURN n.name", add_special_tokens=False).ids, dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.uint8)
    trained[len(ids) // 2 :] = 1
    document = _add_texts(Document(ids, trained), tokenizer)
    assert len(document.texts) == 2
    assert tokenize(document, tokenizer) == ids.tolist()
    assert tokenize(Document(ids, trained), tokenizer) == []


def test_packs_are_split_into_their_documents(store: Store) -> None:
    pack = store.open_split("train")[0]
    documents = list(split_documents(pack))
    assert [len(document.ids) for document in documents] == pack.document_lengths.tolist()
    assert all(document.trained[0] == 0 for document in documents)


def test_warmup_steps_are_dropped_and_the_time_limit_is_kept(plan: Plan, store: Store, tokenizer: Tokenizer) -> None:
    file = store.open_split("train")
    stage_plan = vary(derive_stage_plan(plan, LAST), {"optimizer.name": "adamw_torch"})
    batches = make_batches(file, list_steps(plan, file, 6), LAST, 2, SEQUENCE_LENGTH, tokenizer)
    loop = PlainLoop(build_stage_model(stage_plan, LAST, (), CPU), stage_plan, batches, CPU)
    timing = loop.run(warmup_steps=2, timed_steps=4, seconds=600)
    assert (len(timing.seconds), timing.tokens) == (4, tuple(batches.count_tokens(step) for step in range(2, 6)))
    assert len(loop.run(warmup_steps=2, timed_steps=4, seconds=0).seconds) == 2  # one warm-up step, two timed ones


def test_long_steps_are_shortened(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr("launcher.bench.workers.ablation_loop.PROBED_MICRO_BATCHES", 1)
    file = store.open_split("train")
    stage_plan = vary(derive_stage_plan(plan, LAST), {"optimizer.name": "adamw_torch"})
    batches = make_batches(file, list_steps(plan, file, 8), LAST, 1, SEQUENCE_LENGTH, tokenizer)
    assert batches.count_micro_batches(0) > 2
    timing = PlainLoop(build_stage_model(stage_plan, LAST, (), CPU), stage_plan, batches, CPU).run(
        warmup_steps=1, timed_steps=4, seconds=0
    )
    first = batches.count_micro_batches(0) + 1  # the first step is the probe, a part of the next one the warm-up
    assert timing.tokens == tuple(batches.count_micro_batch_tokens(index) for index in (first, first + 1))
    assert timing.note == f"timed 1 of {batches.count_micro_batches(0)} micro-batches per step, with the update"
