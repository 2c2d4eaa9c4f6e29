"""All Triton kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.training.kernels.triton_path import needs_triton, run_with_triton


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested instead")
def test_interpreted_kernels_match_plain_torch() -> None:
    run_with_triton("tests/training/kernels/interpreted_cases.py", TRITON_INTERPRET="1")
