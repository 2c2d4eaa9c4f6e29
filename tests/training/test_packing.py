"""Packed, unpacked, one document at a time, or padded by transformers: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.data.collate import BatchShape, PackedBatch, collate
from launcher.training.engine.run import TrainingRun
from launcher.training.model.fused_lora.reference import use_reference_forward
from tests.training.builders import (
    SEQUENCE_LENGTH,
    Document,
    Packs,
    adapt,
    build,
    gradients,
    make_documents,
    make_pack,
    pack_greedily,
    pack_singly,
    relative_difference,
    split,
    vary,
    wake_adapter,
    write_store,
)

# Other kernels and other orders of sums, in fp32 (6e-8): the loss of some 250 positions, gradients of sums over as many
# that cancel in part. Seen: 1e-7 and 1e-6.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5

DOCUMENTS = make_documents(14, seed=3)
Computed = tuple[float, dict[str, Tensor]]


def build_awake(plan: Plan, packs: Packs, root: Path, kind: str, *, is_packed: bool) -> TrainingRun:
    store: Store = write_store(root / "store", packs)
    changes = {**adapt(kind), **split(4, -(-len(packs) // 4)), "batch.packed": is_packed}
    changes["batch.global_batch_size"] = len(packs)
    run = build(vary(plan, changes), store, root / "run", is_checked=True)
    wake_adapter(run)
    return run


def first_step(run: TrainingRun) -> list[PackedBatch]:
    batches = run.batches()
    return [batches[index] for index in range(batches.layout.num_micro_batches)]


def compute(run: TrainingRun, batches: Iterable[PackedBatch]) -> Computed:
    loss = sum(float(run.engine.micro_step(batch, 1, is_last=True)) for batch in batches)
    return loss, gradients(run)


def compute_by_transformers(run: TrainingRun, documents: list[Document]) -> Computed:
    """All rows in one padded batch with a mask, by transformers and PEFT."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(document.ids) for document in documents], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(document.ids)) for document in documents], batch_first=True).long()
    trained = nn.utils.rnn.pad_sequence([torch.tensor(document.trained) for document in documents], batch_first=True)
    run.engine.module.base.set_attn_implementation("eager")
    model: Any = run.engine.module.model
    with use_reference_forward():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = ids.masked_fill(trained == 0, -100)[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.item(), gradients(run)


@pytest.fixture(scope="module", params=["lora", "full"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(plan: Plan, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    run = build_awake(plan, pack_greedily(DOCUMENTS), tmp_path_factory.mktemp("expected"), kind, is_packed=True)
    return compute_by_transformers(run, DOCUMENTS)


def check_same(ours: Computed, expected: Computed) -> None:
    assert ours[0] == pytest.approx(expected[0], rel=LOSS_TOLERANCE)
    assert relative_difference(ours[1], expected[1]) < GRADIENT_TOLERANCE


def test_packed_matches_padded(plan: Plan, tmp_path: Path, kind: str, expected: Computed) -> None:
    packs = pack_greedily(DOCUMENTS)
    assert max(map(len, packs)) > 2, "documents must share a pack"
    run = build_awake(plan, packs, tmp_path, kind, is_packed=True)
    check_same(compute(run, first_step(run)), expected)


def test_unpacked_matches_padded(plan: Plan, tmp_path: Path, kind: str, expected: Computed) -> None:
    run = build_awake(plan, pack_singly(DOCUMENTS), tmp_path, kind, is_packed=False)
    check_same(compute(run, first_step(run)), expected)


def test_single_documents_match_padded(plan: Plan, tmp_path: Path, kind: str, expected: Computed) -> None:
    run = build_awake(plan, pack_greedily(DOCUMENTS), tmp_path, kind, is_packed=True)
    alone = [
        collate(
            [make_pack([document])],
            BatchShape(micro_batch_size=1, sequence_length=len(document.ids), document_sizes=(1,), is_packed=True),
        )
        for document in DOCUMENTS
    ]
    check_same(compute(run, alone), expected)


def test_leaking_documents_would_be_detected(plan: Plan, tmp_path: Path, kind: str, expected: Computed) -> None:
    """With these documents, the tests above fail without document boundaries."""
    run = build_awake(plan, pack_greedily(DOCUMENTS), tmp_path, kind, is_packed=True)
    packs = [
        [Document(ids=sum((d.ids for d in pack), ()), trained=sum((d.trained for d in pack), ()))]
        for pack in pack_greedily(DOCUMENTS)
    ]
    shape = BatchShape(micro_batch_size=1, sequence_length=SEQUENCE_LENGTH, document_sizes=(2,), is_packed=True)
    loss, found = compute(run, [collate([make_pack(pack)], shape) for pack in packs])
    assert abs(loss - expected[0]) / expected[0] > 100 * LOSS_TOLERANCE
    assert relative_difference(found, expected[1]) > 1000 * GRADIENT_TOLERANCE
