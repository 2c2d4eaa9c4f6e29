"""All Triton kernels compile for every supported GPU and fit its registers and shared memory."""

from __future__ import annotations

import pytest

from tests.training.kernels.triton_path import needs_triton, run_with_triton


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "120"])
def test_every_kernel_compiles_without_register_spills(capability: str) -> None:
    output = run_with_triton("tests/training/compile_cases.py", capability)
    assert "kernels" in output
