"""Our own attention kernels: interpreted on a CPU, run on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from launcher.training.attention import BACKENDS
from launcher.training.batches import collate, make_shape
from tests.training.builders import make_document, make_pack
from tests.training.triton_beside import needs_triton, run_with_triton


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tried")
def test_interpreted_they_attend_as_plainly_written_and_so_do_their_gradients() -> None:
    run_with_triton("tests/training/attention_cases.py", TRITON_INTERPRET="1")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
def test_on_a_gpu_and_twice_the_same() -> None:
    from tests.training.attention_cases import check_all

    check_all("cuda")


def test_each_token_knows_where_its_document_starts_and_ends() -> None:
    """Empty documents, which fill borders up, are nobody's."""
    pack = make_pack([make_document(length, 1, index) for index, length in enumerate((3, 2, 4))])
    batch = collate([pack], make_shape(np.array([7]), 1, 12, is_packed=True))
    found = BACKENDS["triton"].describe(batch)
    assert found["starts"].tolist() == [0, 0, 0, 3, 3, 5, 5, 5, 5, 9, 9, 9]
    assert found["ends"].tolist() == [3, 3, 3, 5, 5, 9, 9, 9, 9, 12, 12, 12]
    assert found["starts"].dtype == found["ends"].dtype == torch.int32
