"""Run all Triton kernels in the interpreter, as one program: importing torch takes longer than most kernels."""

from __future__ import annotations

from tests.training.kernels import attention_cases, triton_cases

if __name__ == "__main__":
    attention_cases.check_all("cpu")
    triton_cases.check_all("cpu")
