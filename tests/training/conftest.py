"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from tests.training.builders import (
    make_document,
    make_plan,
    make_uneven_packs,
    reset_accelerate,
    write_base,
    write_store,
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The bases are too small to benefit from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _without_mkldnn() -> Iterator[None]:
    """On CPUs without BF16, every matmul would fail in oneDNN first, which is slow."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """Reset process-wide state of accelerate, dynamo and torch: TF32, and the linear function that ZeRO-3 replaces."""
    linear = torch.nn.functional.linear
    reset_accelerate()
    torch._dynamo.reset()
    counters.clear()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.nn.functional.linear = linear
    reset_accelerate()
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("qwen3") / "base")


@pytest.fixture(scope="session")
def plan(base: Path) -> Plan:
    """One rank on a CPU: LoRA in fp32, four packs per step, in one micro-batch."""
    return make_plan(base, {"batch.micro_batch_size": 4, "batch.gradient_accumulation_steps": 1})


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Ten packs with very different numbers of trained tokens: the third step of an epoch has only two."""
    return write_store(tmp_path_factory.mktemp("store"), make_uneven_packs())


@pytest.fixture(scope="session")
def short_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Ten packs of 16 tokens, for BF16: CPUs without it need a hundred times longer for a matmul than for FP32."""
    packs = [[make_document(6, 1 + index % 4, 300 + index), make_document(10, 6, 400 + index)] for index in range(10)]
    return write_store(tmp_path_factory.mktemp("short"), packs)
