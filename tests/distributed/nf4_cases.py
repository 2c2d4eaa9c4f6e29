"""QLoRA with FSDP2, HSDP and ZeRO-3: the same training as with bitsandbytes in one process, with sharded NF4 weights.

Run in a separate process by tests/training/kernels/test_nf4.py, which can import bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.core import metrics
from launcher.plan.model import QuantizationPlan
from tests.distributed.conftest import Reference, fork_server, harness, initial_weights, reference  # noqa: F401
from tests.distributed.harness import Harness, TrainingCase
from tests.distributed.test_matrix import (
    BF16,
    LOSS_BF16,
    InitialWeights,
    Train,
    check_partial_steps,
    check_placement,
    check_same,
    get_case_name,
    largest_difference,
    train,  # noqa: F401
)
from tests.distributed.test_traffic import check_traffic

NF4 = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
CASES = [
    TrainingCase(strategy="fsdp2", changes={"quantization": NF4}),
    TrainingCase(strategy="zero3", changes={"quantization": NF4.stored_for("zero3", "fp32"), "random_weights": True}),
    pytest.param(
        TrainingCase(strategy="zero3", changes={"quantization": NF4.stored_for("zero3", "fp32")}),
        marks=pytest.mark.slow,
    ),
    pytest.param(TrainingCase(strategy="fsdp2", adapter="dora", changes={"quantization": NF4}), marks=pytest.mark.slow),
    pytest.param(TrainingCase(strategy="hsdp", nodes=2, changes={"quantization": NF4}), marks=pytest.mark.slow),
    pytest.param(
        TrainingCase(strategy="fsdp2", config={"torch_compile": True}, changes={"quantization": NF4}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=get_case_name)
def test_sharded_nf4_weights_train_like_one_process(
    train: Train,  # noqa: F811
    reference: Reference,  # noqa: F811
    initial_weights: InitialWeights,  # noqa: F811
    case: Any,
) -> None:
    trained = train(case)
    assert trained.outcome.observed["precision"].endswith("frozen NF4")
    check_same(trained, reference(case), initial_weights(case))
    check_partial_steps(trained)
    check_placement(case, trained)


@pytest.mark.slow  # emulated on a CPU
def test_bytes_of_nf4_weights_are_gathered_unchanged_in_bf16(train: Train, reference: Reference) -> None:  # noqa: F811
    case = TrainingCase(strategy="fsdp2", changes={"quantization": NF4, **BF16})
    trained, single_process = train(case), reference(case)
    assert trained.packs == single_process.packs
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS_BF16


@pytest.mark.slow
def test_nf4_weights_are_gathered_in_their_own_size(harness: Harness) -> None:  # noqa: F811
    """As the plan estimates: 0.52 bytes per weight, with all scales."""
    check_traffic(harness, TrainingCase(strategy="fsdp2", changes={"quantization": NF4}))
