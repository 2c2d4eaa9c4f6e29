"""Checks of packages that some plans need: import each and run one small operation."""

from __future__ import annotations

import shutil
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from launcher.core.choices import AttentionBackend
from launcher.training.diagnostics.check import CheckFunction, NotNeededError, Passed, format_version
from launcher.training.diagnostics.device_checks import check_attention


def check_training_packages() -> Passed:
    """Import the packages that every training run needs."""
    names = ("transformers", "accelerate", "peft")
    for name in names:
        import_module(name)
    return Passed(", ".join(f"{name} {format_version(name)}" for name in names))


def check_bitsandbytes() -> Passed:
    """Quantize to NF4 and back; the expected relative error is about 0.1."""
    functional = import_module("bitsandbytes.functional")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = torch.randn(256, 256, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    quantized, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    restored = functional.dequantize_4bit(quantized, state)
    error = float((restored.float() - weights.float()).norm() / weights.float().norm())
    if not 0.01 < error < 0.2:
        raise ArithmeticError(f"NF4 round trip has a relative error of {error:.1e}, about 0.1 is expected")
    return Passed(f"bitsandbytes {format_version('bitsandbytes')}: NF4 round trip has the expected error ({error:.2f})")


def check_deepspeed() -> Passed:
    """Check whether DeepSpeed's CPU optimizer can be compiled, without the minute that compiling takes."""
    _require("deepspeed")
    import_module("deepspeed")
    builders = import_module("deepspeed.ops.op_builder")
    can_build = bool(builders.CPUAdamBuilder().is_compatible(verbose=False))
    tools = [name for name in ("ninja", "g++") if shutil.which(name) is None and find_spec(name) is None]
    missing = f" ({' and '.join(tools)} missing)" if tools else ""
    state = "can be built" if can_build and not tools else "cannot be built here"
    version = format_version("deepspeed")
    figures = {"cpu_adam": float(can_build and not tools)}
    return Passed(f"deepspeed {version}; its CPU optimizer (for offload) {state}{missing}", **figures)


def check_flash_attention(package: str) -> Passed:
    """Import a FlashAttention package and check that its attention keeps packed documents apart."""
    _require(package)
    import_module(package)
    backends: dict[str, AttentionBackend] = {
        "flash_attn": "flash_attention_2",
        "flash_attn_interface": "flash_attention_3",
        "flash_attn.cute": "flash_attention_4",
    }
    passed = check_attention(backends[package])
    distribution = "flash-attn-4" if package == "flash_attn.cute" else "flash_attn"
    return Passed(f"{package} {format_version(distribution)}: {passed.detail}")


def check_fused_loss() -> Passed:
    """Compare the fused cross-entropy and its gradient with the plain ones."""
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    if torch.cuda.get_device_capability() < (8, 0):
        raise NotNeededError("this GPU uses the chunked loss: the fused loss needs compute capability 8.0")
    _require("triton")
    from launcher.training.model.loss import LMHead, fused_cross_entropy

    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(512, (64,), device="cuda")
    loss = fused_cross_entropy(hidden, target, LMHead(weight=head))
    (grad,) = torch.autograd.grad(loss, hidden)
    plain = torch.nn.functional.cross_entropy((hidden @ head.T).float(), target, reduction="sum")
    (expected,) = torch.autograd.grad(plain, hidden)
    if not abs(float(loss) - float(plain)) <= 0.02 * float(plain):
        raise ArithmeticError(f"fused loss is {float(loss):.4f}, plain loss {float(plain):.4f}")
    error = float((grad.float() - expected.float()).norm() / expected.float().norm())
    if not error <= 0.02:
        raise ArithmeticError(f"gradient differs from the plain one by {error:.1e} (relative)")
    return Passed("the Triton kernel gives the same loss and gradient as plain cross-entropy")


def _require(package: str) -> None:
    """Raise ModuleNotFoundError for a missing package before its import can fail for another reason."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of its parent package
        spec = None
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("training packages", check_training_packages),
    ("bitsandbytes", check_bitsandbytes),
    ("deepspeed", check_deepspeed),
    ("flash_attn", partial(check_flash_attention, "flash_attn")),
    ("flash_attn_interface", partial(check_flash_attention, "flash_attn_interface")),
    ("flash_attn.cute", partial(check_flash_attention, "flash_attn.cute")),
    ("fused loss", check_fused_loss),
)
