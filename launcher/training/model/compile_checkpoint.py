"""Activation checkpointing and torch.compile, applied to each decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import InvalidBackend, TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launcher.core.choices import Checkpointing
from launcher.core.errors import InputError, first_line
from launcher.core.log import get_logger
from launcher.plan.estimate.memory.recipe import SELECTIVE_MIN_INNER
from launcher.plan.model import CompilePlan

log = get_logger(__name__)

Forward = Callable[..., Any]
_CHECKPOINTING_MARK = "launcher_checkpointing"
_COMPILED_MARK = "launcher_compiled"

# Unpacked rows come in up to eight sizes, each with and without gradients; dynamo stops at eight graphs by default.
_RECOMPILE_LIMIT = 32
_SAVED_OPS = (
    "torch_attn._varlen_attn",
    "launcher.flash_attention_4",
    "launcher.varlen_attention",
    "aten._scaled_dot_product",
    "bitsandbytes.gemm_4bit",
    "flash_attn",
)


def prepare_layers(layers: list[nn.Module], checkpointing: Checkpointing, compile_plan: CompilePlan | None) -> None:
    """Wrap the forward of each layer for checkpointing and compilation.

    Selective checkpointing is inside the compiled region, where the compiler sees what it may recompute. Full
    checkpointing is outside: inside, the compiler saved the matmuls of 4-bit weights and failed on DoRA.
    """
    for layer in layers:
        forward = layer.forward
        if checkpointing == "selective":
            forward = _checkpointed(forward, partial(create_selective_checkpoint_contexts, _policy))
        if compile_plan is not None and compile_plan.scope == "layer":
            forward = compile_forward(forward, compile_plan)
        if checkpointing == "full":
            forward = _checkpointed(forward, None)
        layer.forward = forward


def compile_forward(forward: Forward, plan: CompilePlan) -> Forward:
    """Compile a forward for fixed shapes, so that one graph serves all layers; fall back to eager if that fails."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    # The outputs that fused_lora/linear.py caches are dropped again within the checkpointed layer.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if plan.scope == "layer":  # no need to split layers at DDP's buckets
        torch._dynamo.config.optimize_ddp = False
    try:
        compiled = torch.compile(forward, dynamic=False, backend=plan.backend, mode=plan.mode)
    except InvalidBackend:
        raise InputError(
            f"training.config.torch_compile_backend: torch has no compiler backend {plan.backend}",
            hint=f"use one of: {', '.join(torch._dynamo.list_backends())}",
        ) from None

    def run(*arguments: Any, **more: Any) -> Any:
        if _CompileSwitch.is_on:
            try:
                return compiled(*arguments, **more)
            except TorchDynamoException as error:
                fall_back_to_eager(error)
        return forward(*arguments, **more)

    setattr(run, _CHECKPOINTING_MARK, getattr(forward, _CHECKPOINTING_MARK, None))
    setattr(run, _COMPILED_MARK, True)
    return run


class _CompileSwitch:
    """Whether layers run compiled code. All share this flag: if one fails to compile, the others would fail, too."""

    is_on = True


def fall_back_to_eager(error: Exception) -> None:
    """Disable compiled code for the rest of the run and log why."""
    _CompileSwitch.is_on = False
    log.info(f"torch.compile failed, continuing without it: {first_line(error)}")


def is_compile_enabled() -> bool:
    """Return whether compiled code is used."""
    return _CompileSwitch.is_on


@contextmanager
def compile_disabled() -> Iterator[None]:
    """Run without torch.compile inside the context, for shapes that occur too rarely to be worth compiling."""
    was_on, _CompileSwitch.is_on = _CompileSwitch.is_on, False
    try:
        yield
    finally:
        _CompileSwitch.is_on = was_on


class _CheckpointingSwitch:
    is_on = True


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Disable activation checkpointing inside the context, where a recomputation would not run in the same mode."""
    _CheckpointingSwitch.is_on = False
    try:
        yield
    finally:
        _CheckpointingSwitch.is_on = True


def _checkpointed(forward: Forward, context_fn: Callable[[], Any] | None) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False} | ({} if context_fn is None else {"context_fn": context_fn})

    def run(*arguments: Any, **more: Any) -> Any:
        if not (torch.is_grad_enabled() and _CheckpointingSwitch.is_on):  # without gradients nothing is saved
            return forward(*arguments, **more)
        return checkpoint(forward, *arguments, **options, **more)

    setattr(run, _CHECKPOINTING_MARK, "full" if context_fn is None else "selective")
    setattr(run, _COMPILED_MARK, getattr(forward, _COMPILED_MARK, False))
    return run


def get_checkpointing(layer: nn.Module) -> str | None:
    """Return whether a layer's activation checkpointing is "full" or "selective"; None if it has none."""
    return getattr(layer.forward, _CHECKPOINTING_MARK, None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile is applied to a module's forward, even if no graph has been compiled yet."""
    return bool(getattr(module.forward, _COMPILED_MARK, False))


def _policy(_context: Any, operation: Any, *arguments: Any, **_more: Any) -> CheckpointPolicy:
    """Return whether selective checkpointing saves an op's output: that of attention and of large matmuls is saved."""
    name = str(operation)
    if name.startswith(_SAVED_OPS):
        return CheckpointPolicy.MUST_SAVE
    left = arguments[1] if name.startswith("aten.addmm") else arguments[0] if name.startswith("aten.mm.") else None
    if left is not None and left.shape[-1] >= SELECTIVE_MIN_INNER:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
