"""Work saved by the stages of an ablation, counted instead of timed: small machines are too noisy."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from launcher.bench.ablation_stages import LoopConfig
from launcher.bench.workers.ablation_data import StageBatches, make_batches
from launcher.bench.workers.ablation_loop import list_steps
from launcher.bench.workers.ablation_model import build_stage_model, derive_stage_plan
from launcher.corpus.store import Store
from launcher.launch.prepare_data import prepare_planned
from launcher.plan.model import Plan
from launcher.request.request import Request, plan_request
from tests.conftest import EXPERTS, ROOT

CPU = torch.device("cpu")


class CountingTokenizer:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_texts = tokenizer, 0

    def encode(self, text: str, *, add_special_tokens: bool) -> object:
        self.num_texts += 1
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "launcher/base_models/tiny_base/tokenizer.json"))


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "json")) for name in EXPERTS]
)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Store]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        planned = plan_request(Request(expert=str(ROOT / "experts" / request.param / "manifest.json")))
        return planned.plan, prepare_planned(planned, lambda _text: None, lambda _rows: None).store


def make_stage_batches(
    sample: tuple[Plan, Store], config: LoopConfig, tokenizer: object, micro_batch_size: int = 2
) -> StageBatches:
    plan, store = sample
    file = store.open_split("train")
    epoch = len(file) // plan.batch.global_batch_size
    return make_batches(
        file,
        list_steps(plan, file, epoch),
        config,
        micro_batch_size,
        plan.batch.sequence_length,
        tokenizer,  # type: ignore[arg-type]
    )


def count_positions(batches: StageBatches) -> int:
    return sum(batches[index].input_ids.numel() for index in range(len(batches)))


def test_packing_removes_padding(sample: tuple[Plan, Store], tokenizer: Tokenizer) -> None:
    padded = make_stage_batches(sample, LoopConfig(tokenization="before"), tokenizer)
    packed = make_stage_batches(sample, LoopConfig(tokenization="before", rows="packed"), tokenizer)
    num_tokens = sum(map(packed.count_tokens, range(len(packed.steps))))
    assert num_tokens == sum(map(padded.count_tokens, range(len(padded.steps))))
    assert num_tokens >= 0.94 * count_positions(packed)
    assert count_positions(padded) > count_positions(packed)  # pairs of rows; more rows need more padding
    eight = make_stage_batches(sample, LoopConfig(tokenization="before"), tokenizer, micro_batch_size=8)
    assert count_positions(eight) >= 1.1 * count_positions(packed)


def test_nothing_is_tokenized_in_a_step_if_tokenized_before(sample: tuple[Plan, Store], tokenizer: Tokenizer) -> None:
    counts = {}
    for tokenization in ("on the fly", "before"):
        counting = CountingTokenizer(tokenizer)
        batches = make_stage_batches(sample, LoopConfig(tokenization=tokenization), counting)
        for index in range(len(batches)):
            batches[index]
        counts[tokenization] = counting.num_texts
    assert counts["before"] == 0
    assert counts["on the fly"] >= sum(len(rows) for rows in make_stage_batches(sample, LoopConfig(), tokenizer).steps)


@pytest.mark.slow
def test_gradient_accumulation_costs_no_flops_with_packing(sample: tuple[Plan, Store], tokenizer: Tokenizer) -> None:
    """Eight micro-steps need as many FLOPs as one; with padding, a larger micro-batch needs more."""
    plan, _ = sample
    config = LoopConfig(tokenization="before", rows="packed", attention="sdpa", loss="chunked", checkpointing="none")
    model = build_stage_model(derive_stage_plan(plan, config), config, (), CPU)
    work = []
    for size in (1, plan.batch.global_batch_size):
        batches = make_stage_batches(sample, config, tokenizer, micro_batch_size=size)
        with FlopCounterMode(display=False) as counter:
            for index in range(batches.count_micro_batches(0)):
                model(batches[index]).backward()
        products = counter.get_flop_counts()["Global"]
        work.append(sum(flops for name, flops in products.items() if "attention" not in str(name)))
    assert work[0] == pytest.approx(work[1], rel=1e-6)
