"""Every rung of the ladder trains the same rows to the same loss: what differs is how fast."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from launcher.bench.rungs import Setup
from launcher.corpus.packs import PackFile
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.bench.rung_data import cut_documents, make_batches, tokenise_again
from launcher.training.bench.rung_loop import RungLoop, find_steps
from launcher.training.bench.rung_model import build_rung_model, make_rung_plan
from tests.conftest import ROOT
from tests.training.builders import SEQUENCE_LENGTH, vary

CPU = torch.device("cpu")
DONE = Setup(tokenised="before", rows="packed", attention="sdpa", loss="chunked", checkpointing="none")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "launcher/tiny/tokenizer.json"))


def sum_step(plan: Plan, store: Store, setup: Setup, tokenizer: Tokenizer) -> tuple[float, float]:
    """The first step's loss, and the norm of its gradients."""
    file: PackFile = store.open_split("train")
    rung = make_rung_plan(plan, setup)
    model = build_rung_model(rung, setup, (), CPU)
    batches = make_batches(file, find_steps(plan, file, 1), setup, 2, SEQUENCE_LENGTH, tokenizer)
    total = torch.zeros(())
    for index in range(len(batches)):
        loss = model(batches[index]) / batches.count_trained(0)
        loss.backward()
        total += loss.detach()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return float(total), float(torch.stack(norms).norm())


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(tokenised="before"),
        Setup(rows="packed"),
        Setup(attention="sdpa"),
        Setup(rows="packed", attention="sdpa"),
        Setup(attention="planned"),
        Setup(attention="planned", rows="packed"),
        Setup(attention="planned", rows="packed", loss="chunked"),
        Setup(loss="chunked"),
        Setup(checkpointing="none"),
    ],
    ids=lambda setup: "-".join(f"{value}" for value in setup.model_dump(exclude_defaults=True).values()) or "before",
)
def test_rungs_compute_the_same(plan: Plan, store: Store, tokenizer: Tokenizer, setup: Setup) -> None:
    loss, norm = sum_step(plan, store, DONE, tokenizer)
    assert sum_step(plan, store, setup, tokenizer) == pytest.approx((loss, norm), rel=1e-4)


def test_all_rungs_have_the_rows_of_the_step(plan: Plan, store: Store, tokenizer: Tokenizer) -> None:
    file = store.open_split("train")
    steps = find_steps(plan, file, 2)
    padded = make_batches(file, steps, Setup(), 2, SEQUENCE_LENGTH, tokenizer)
    packed = make_batches(file, steps, DONE, 2, SEQUENCE_LENGTH, tokenizer)
    wanted = [int(file.count("input_ids")[list(packs)].sum()) for packs in steps]
    assert [padded.count_tokens(step) for step in range(2)] == wanted
    assert [packed.count_tokens(step) for step in range(2)] == wanted
    assert padded.count_micro_batches(0) > packed.count_micro_batches(0)


def test_tokenising_again_makes_the_stored_tokens(tokenizer: Tokenizer) -> None:
    """Of a real row, which the tiny base's tokenizer has made."""
    import numpy as np

    from launcher.training.bench.rung_data import RungDocument, _with_texts

    ids = np.array(tokenizer.encode("MATCH (n:Person) RETURN n.name", add_special_tokens=False).ids, dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.uint8)
    trained[len(ids) // 2 :] = 1
    document = _with_texts(RungDocument(ids, trained), tokenizer)
    assert len(document.texts) == 2
    assert tokenise_again(document, tokenizer) == ids.tolist()
    assert tokenise_again(RungDocument(ids, trained), tokenizer) == []


def test_documents_are_cut_where_packs_join_them(store: Store) -> None:
    pack = store.open_split("train")[0]
    documents = list(cut_documents(pack))
    assert [len(document.ids) for document in documents] == pack.document_lengths.tolist()
    assert all(document.trained[0] == 0 for document in documents)


def test_warm_steps_are_dropped_and_time_is_kept(plan: Plan, store: Store, tokenizer: Tokenizer) -> None:
    file = store.open_split("train")
    rung = vary(make_rung_plan(plan, DONE), {"optimizer.name": "adamw_torch"})
    batches = make_batches(file, find_steps(plan, file, 6), DONE, 2, SEQUENCE_LENGTH, tokenizer)
    whole = RungLoop(build_rung_model(rung, DONE, (), CPU), rung, batches, CPU)
    timing = whole.run(warm_steps=2, timed_steps=4, seconds=600)
    assert (len(timing.seconds), timing.tokens) == (4, tuple(batches.count_tokens(step) for step in range(2, 6)))
    assert (
        len(whole.run(warm_steps=2, timed_steps=4, seconds=0).seconds) == 2
    )  # one warm step, two timed ones, and no more


def test_steps_that_take_too_long_are_cut(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr("launcher.training.bench.rung_loop.PROBED", 1)
    file = store.open_split("train")
    rung = vary(make_rung_plan(plan, DONE), {"optimizer.name": "adamw_torch"})
    batches = make_batches(file, find_steps(plan, file, 8), DONE, 1, SEQUENCE_LENGTH, tokenizer)
    assert batches.count_micro_batches(0) > 2
    timing = RungLoop(build_rung_model(rung, DONE, (), CPU), rung, batches, CPU).run(
        warm_steps=1, timed_steps=4, seconds=0
    )
    first = batches.count_micro_batches(0) + 1  # the first step is probed, a piece of the next one warm
    assert timing.tokens == tuple(batches.count_micro_batch_tokens(index) for index in (first, first + 1))
    assert timing.note == f"of a step's {batches.count_micro_batches(0)} micro-batches 1 are timed, and an update"
