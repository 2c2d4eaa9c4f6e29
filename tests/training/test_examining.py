"""What `launcher doctor` tries out with torch: right answers pass, wrong ones are found, and nothing else is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher.training import attention, checks_device, checks_packages
from launcher.training.trying import Found, NotNeededError, run_check


def test_whatever_a_check_does_is_what_was_found() -> None:
    def missing() -> Found:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    def broken() -> Found:
        raise OSError("libx.so: cannot open\nand more")

    def idle() -> Found:
        raise NotNeededError("no GPU")

    good = run_check("a", lambda: Found("fine", speed=2.0))
    assert (good.status, good.detail, good.figures) == ("works", "fine", {"speed": 2.0})
    assert (run_check("a", missing).status, run_check("a", missing).detail) == ("missing", "x is not installed")
    assert (run_check("a", broken).status, run_check("a", broken).detail) == ("fails", "OSError: libx.so: cannot open")
    assert (run_check("a", idle).status, run_check("a", idle).detail) == ("not needed", "no GPU")


def test_attention_that_mixes_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "= each alone" in checks_device.check_attention("sdpa").detail

    def mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_more: Any) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    mixing = replace(attention.BACKENDS["sdpa"], kernel=mix)
    monkeypatch.setitem(attention.BACKENDS, "sdpa", mixing)
    check = run_check("attention", lambda: checks_device.check_attention("sdpa"))
    assert check.status == "fails"
    assert "packed documents differ from each alone by" in check.detail


def test_a_product_that_is_wrong_is_found() -> None:
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    assert checks_device._check_product(left @ right, left, right, 1e-5) < 1e-5
    with pytest.raises(ArithmeticError, match="a product is off by"):
        checks_device._check_product(left @ right + 1, left, right, 1e-5)


def test_on_a_cpu_nothing_fails() -> None:
    found = [run_check(name, check) for name, check in (*checks_device.CHECKS, *checks_packages.CHECKS)]
    assert [check.name for check in found if check.status == "fails"] == []
    works = {check.name for check in found if check.status == "works"}
    assert works >= {"BF16", "attention: sdpa", "training packages", "deepspeed"}
