"""The torch checks of `launcher doctor` pass on correct results and fail on wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher.training.diagnostics import device_checks, package_checks
from launcher.training.diagnostics.check import NotNeededError, Passed, run_check
from launcher.training.model import attention


def test_every_outcome_of_a_check_becomes_a_status() -> None:
    def missing() -> Passed:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    def broken() -> Passed:
        raise OSError("libx.so: cannot open\nand more")

    def idle() -> Passed:
        raise NotNeededError("no GPU")

    good = run_check("a", lambda: Passed("fine", speed=2.0))
    assert (good.status, good.detail, good.figures) == ("works", "fine", {"speed": 2.0})
    assert (run_check("a", missing).status, run_check("a", missing).detail) == ("missing", "x is not installed")
    assert (run_check("a", broken).status, run_check("a", broken).detail) == ("fails", "OSError: libx.so: cannot open")
    assert (run_check("a", idle).status, run_check("a", idle).detail) == ("not needed", "no GPU")


def test_attention_across_documents_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "packed documents equal separate ones" in device_checks.check_attention("sdpa").detail

    def mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_more: Any) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    mixing = replace(attention.BACKENDS["sdpa"], kernel=mix)
    monkeypatch.setitem(attention.BACKENDS, "sdpa", mixing)
    check = run_check("attention", lambda: device_checks.check_attention("sdpa"))
    assert check.status == "fails"
    assert "packed documents differ from separate ones by" in check.detail


def test_wrong_matmul_fails() -> None:
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    assert device_checks._check_matmul(left @ right, left, right, 1e-5) < 1e-5
    with pytest.raises(ArithmeticError, match="matmul has a relative error"):
        device_checks._check_matmul(left @ right + 1, left, right, 1e-5)


def test_no_check_fails_on_a_cpu() -> None:
    checks = [run_check(name, check) for name, check in (*device_checks.CHECKS, *package_checks.CHECKS)]
    assert [check.name for check in checks if check.status == "fails"] == []
    works = {check.name for check in checks if check.status == "works"}
    assert works >= {"BF16", "attention: sdpa", "training packages", "deepspeed"}
