"""Packages that some plans need: imported, and made to do one small thing each."""

from __future__ import annotations

import shutil
from importlib import import_module
from importlib.util import find_spec

import torch

from launcher.choices import AttentionBackend
from launcher.training.checks_device import check_attention
from launcher.training.trying import CheckFunction, Found, NotNeededError, format_version


def check_training_packages() -> Found:
    names = ("transformers", "accelerate", "peft")
    for name in names:
        import_module(name)
    return Found(", ".join(f"{name} {format_version(name)}" for name in names))


def check_bitsandbytes() -> Found:
    """NF4 there and back: four bits leave about a tenth of a weight's size as error."""
    functional = import_module("bitsandbytes.functional")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = torch.randn(256, 256, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    packed, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    back = functional.dequantize_4bit(packed, state)
    error = float((back.float() - weights.float()).norm() / weights.float().norm())
    if not 0.01 < error < 0.2:
        raise ArithmeticError(f"NF4 there and back is off by {error:.1e} (relative), about 0.1 is expected")
    return Found(
        f"bitsandbytes {format_version('bitsandbytes')}: NF4 there and back is off by {error:.2f}, as it should be"
    )


def check_deepspeed() -> Found:
    """Asks whether its CPU optimizer could be built, without building it: that takes a minute."""
    _need("deepspeed")
    import_module("deepspeed")
    builders = import_module("deepspeed.ops.op_builder")
    can_build = bool(builders.CPUAdamBuilder().is_compatible(verbose=False))
    tools = [name for name in ("ninja", "g++") if shutil.which(name) is None and find_spec(name) is None]
    lacks = f"; to build it {' and '.join(tools)} are missing" if tools else ""
    words = "can be built" if can_build and not tools else "cannot be built here"
    version = format_version("deepspeed")
    figures = {"cpu_adam": float(can_build and not tools)}
    return Found(f"deepspeed {version}; its CPU optimizer, for offloading, {words}{lacks}", **figures)


def check_flash_attention(package: str) -> Found:
    _need(package)
    import_module(package)
    backends: dict[str, AttentionBackend] = {
        "flash_attn": "flash_attention_2",
        "flash_attn_interface": "flash_attention_3",
        "flash_attn.cute": "flash_attention_4",
    }
    found = check_attention(backends[package])
    distribution = "flash-attn-4" if package == "flash_attn.cute" else "flash_attn"
    return Found(f"{package} {format_version(distribution)}: {found.detail}")


def check_fused_loss() -> Found:
    """And its gradient: other code, which can be wrong alone."""
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    if torch.cuda.get_device_capability() < (8, 0):
        raise NotNeededError("this GPU takes the loss in chunks (needs compute capability 8.0)")
    _need("triton")
    from launcher.training.loss import Head, fused_cross_entropy

    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(512, (64,), device="cuda")
    loss = fused_cross_entropy(hidden, target, Head(weight=head))
    (grad,) = torch.autograd.grad(loss, hidden)
    plain = torch.nn.functional.cross_entropy((hidden @ head.T).float(), target, reduction="sum")
    (wanted,) = torch.autograd.grad(plain, hidden)
    if not abs(float(loss) - float(plain)) <= 0.02 * float(plain):
        raise ArithmeticError(f"it is {float(loss):.4f}, the plain one {float(plain):.4f}")
    error = float((grad.float() - wanted.float()).norm() / wanted.float().norm())
    if not error <= 0.02:
        raise ArithmeticError(f"its gradient differs from the plain one's by {error:.1e} (relative)")
    return Found("Triton's kernel gives the plain loss and its gradient")


def _need(package: str) -> None:
    """Missing is told as missing, also where the import would stumble over something else first."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # of what it is a part of
        found = None
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("training packages", check_training_packages),
    ("bitsandbytes", check_bitsandbytes),
    ("deepspeed", check_deepspeed),
    ("flash_attn", lambda: check_flash_attention("flash_attn")),
    ("flash_attn_interface", lambda: check_flash_attention("flash_attn_interface")),
    ("flash_attn.cute", lambda: check_flash_attention("flash_attn.cute")),
    ("fused loss", check_fused_loss),
)
