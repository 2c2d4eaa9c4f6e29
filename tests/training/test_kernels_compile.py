"""Our Triton kernels, compiled for GPUs that are not there: they fit registers and shared memory of each."""

from __future__ import annotations

import pytest

from tests.training.triton_beside import needs_triton, run_with_triton

RARER = [pytest.param(capability, marks=pytest.mark.slow) for capability in ("80", "86", "89", "120")]


@needs_triton
@pytest.mark.parametrize("capability", ["90", *RARER])
def test_every_kernel_compiles_and_spills_nothing(capability: str) -> None:
    told = run_with_triton("tests/training/compile_cases.py", capability)
    assert "kernels" in told
