"""Our attention kernels compiled on a GPU; test_interpreted.py runs them on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from launcher.training.data.collate import choose_batch_shape, collate
from launcher.training.model.attention import BACKENDS
from tests.training.builders import make_document, make_pack


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
def test_compiled_kernels_match_plain_attention_and_are_deterministic() -> None:
    from tests.training.kernels.attention_cases import check_all

    check_all("cuda")


def test_metadata_holds_document_bounds_per_token() -> None:
    """Empty documents, which pad cu_seqlens, own no token."""
    pack = make_pack([make_document(length, 1, index) for index, length in enumerate((3, 2, 4))])
    batch = collate([pack], choose_batch_shape(np.array([7]), 1, 12, is_packed=True))
    metadata = BACKENDS["triton"].build_metadata(batch)
    assert metadata["doc_starts"].tolist() == [0, 0, 0, 3, 3, 5, 5, 5, 5, 9, 9, 9]
    assert metadata["doc_ends"].tolist() == [3, 3, 3, 5, 5, 9, 9, 9, 9, 12, 12, 12]
    assert metadata["doc_starts"].dtype == metadata["doc_ends"].dtype == torch.int32
