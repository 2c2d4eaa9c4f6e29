"""What the ladder's rungs save, as work that is counted, not timed: clocks of small machines say too little."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from launcher.bench.rungs import Setup
from launcher.corpus.store import Store
from launcher.inputs import Request, plan_request
from launcher.plan.model import Plan
from launcher.preparing import prepare_planned
from launcher.training.bench.rung_data import RungBatches, make_batches
from launcher.training.bench.rung_loop import find_steps
from launcher.training.bench.rung_model import build_rung_model, make_rung_plan
from tests.conftest import ROOT

CPU = torch.device("cpu")
EXPERTS = ("json", "neo4j", "sql", "typescript")


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_texts = tokenizer, 0

    def encode(self, text: str, *, add_special_tokens: bool) -> object:
        self.num_texts += 1
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "launcher/tiny/tokenizer.json"))


@pytest.fixture(scope="module", params=EXPERTS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Store]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        planned = plan_request(Request(expert=str(ROOT / "experts" / request.param / "manifest.json")))
        return planned.plan, prepare_planned(planned, lambda _text: None, lambda _rows: None).store


def make(sample: tuple[Plan, Store], setup: Setup, tokenizer: object, micro_batch_size: int = 2) -> RungBatches:
    plan, store = sample
    file = store.open_split("train")
    epoch = len(file) // plan.batch.global_batch_size
    return make_batches(
        file,
        find_steps(plan, file, epoch),
        setup,
        micro_batch_size,
        plan.batch.sequence_length,
        tokenizer,  # type: ignore[arg-type]
    )


def count_positions(batches: RungBatches) -> int:
    return sum(batches[index].input_ids.numel() for index in range(len(batches)))


def test_packing_leaves_no_position_to_padding(sample: tuple[Plan, Store], tokenizer: Tokenizer) -> None:
    padded = make(sample, Setup(tokenised="before"), tokenizer)
    packed = make(sample, Setup(tokenised="before", rows="packed"), tokenizer)
    num_tokens = sum(map(packed.count_tokens, range(len(packed.steps))))
    assert num_tokens == sum(map(padded.count_tokens, range(len(padded.steps))))
    assert num_tokens >= 0.94 * count_positions(packed)
    assert count_positions(padded) > count_positions(packed)  # pairs of rows; more rows waste more
    eight = make(sample, Setup(tokenised="before"), tokenizer, micro_batch_size=8)
    assert count_positions(eight) >= 1.1 * count_positions(packed)


def test_tokenised_before_nothing_is_tokenised_in_a_step(sample: tuple[Plan, Store], tokenizer: Tokenizer) -> None:
    counts = {}
    for tokenised in ("on the fly", "before"):
        counting = Counting(tokenizer)
        batches = make(sample, Setup(tokenised=tokenised), counting)
        for index in range(len(batches)):
            batches[index]
        counts[tokenised] = counting.num_texts
    assert counts["before"] == 0
    assert counts["on the fly"] >= sum(len(rows) for rows in make(sample, Setup(), tokenizer).steps)


@pytest.mark.parametrize("sample", ["json"], indirect=True)
def test_a_split_of_the_batch_costs_no_work_where_rows_are_packed(
    sample: tuple[Plan, Store], tokenizer: Tokenizer
) -> None:
    """Accumulating: eight micro-steps multiply as much as one; padded, a larger micro-batch multiplies more."""
    plan, _ = sample
    setup = Setup(tokenised="before", rows="packed", attention="sdpa", loss="chunked", checkpointing="none")
    model = build_rung_model(make_rung_plan(plan, setup), setup, (), CPU)
    work = []
    for size in (1, plan.batch.global_batch_size):
        batches = make(sample, setup, tokenizer, micro_batch_size=size)
        with FlopCounterMode(display=False) as counter:
            for index in range(batches.count_micro_batches(0)):
                model(batches[index]).backward()
        products = counter.get_flop_counts()["Global"]
        work.append(sum(flops for name, flops in products.items() if "attention" not in str(name)))
    assert work[0] == pytest.approx(work[1], rel=1e-6)
