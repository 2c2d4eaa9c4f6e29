"""What is done to each decoder layer: recomputing in the backward pass, and compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import InvalidBackend, TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launcher.choices import Checkpointing
from launcher.errors import InputError, first_line, say
from launcher.memory import SELECTIVE_MIN_INNER
from launcher.plan.model import CompilePlan

Forward = Callable[..., Any]
_MARK = "launcher_checkpointing"
_COMPILED_MARK = "launcher_compiled"

# Rows that are not packed come in up to eight sizes, with and without gradients; dynamo stops at eight by default.
_GRAPHS_PER_FUNCTION = 32
_KEPT = (
    "torch_attn._varlen_attn",
    "launcher.flash4",
    "launcher.document_attention",
    "aten._scaled_dot_product",
    "bitsandbytes.gemm_4bit",
    "flash_attn",
)


def prepare_layers(layers: list[nn.Module], checkpointing: Checkpointing, compiling: CompilePlan | None) -> None:
    """Selective checkpointing sits inside the compiled region, where the compiler sees what it may recompute.

    Full checkpointing sits around it: inside, the compiler kept the products of 4-bit weights and gave up on DoRA.
    """
    for layer in layers:
        forward = layer.forward
        if checkpointing == "selective":
            forward = _checkpointed(forward, partial(create_selective_checkpoint_contexts, _policy))
        if compiling is not None and compiling.scope == "layer":
            forward = compiled(forward, compiling)
        if checkpointing == "full":
            forward = _checkpointed(forward, None)
        layer.forward = forward


def compiled(forward: Forward, plan: CompilePlan) -> Forward:
    """Shapes are fixed, so one graph serves all layers. Where compiling fails, the run goes on without, and says so."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_PER_FUNCTION)
    # What products.py remembers between the matrices of one input is forgotten again within the checkpointed layer.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if plan.scope == "layer":  # dynamo would cut it into DDP's buckets, which a layer's gradients fill soon enough
        torch._dynamo.config.optimize_ddp = False
    try:
        fast = torch.compile(forward, dynamic=False, backend=plan.backend, mode=plan.mode)
    except InvalidBackend:
        raise InputError(
            f"training.config.torch_compile_backend: torch knows no compiler {plan.backend} here",
            hint=f"use one of: {', '.join(torch._dynamo.list_backends())}",
        ) from None

    def run(*arguments: Any, **more: Any) -> Any:
        if _Compiling.is_on:
            try:
                return fast(*arguments, **more)
            except TorchDynamoException as error:
                give_up_compiling(error)
        return forward(*arguments, **more)

    _mark(run, getattr(forward, _MARK, None))
    setattr(run, _COMPILED_MARK, True)
    return run


class _Compiling:
    """One for all layers: what the compiler cannot do for one it cannot do for the next."""

    is_on = True


def give_up_compiling(error: Exception) -> None:
    _Compiling.is_on = False
    say(f"torch.compile failed, the run goes on without it: {first_line(error)}")


def is_compiling() -> bool:
    return _Compiling.is_on


@contextmanager
def uncompiled() -> Iterator[None]:
    """For passes whose shapes never come again: a graph of their own would take longer than they do."""
    was_on, _Compiling.is_on = _Compiling.is_on, False
    try:
        yield
    finally:
        _Compiling.is_on = was_on


def _checkpointed(forward: Forward, contexts: Callable[[], Any] | None) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if contexts is not None else {})

    def run(*arguments: Any, **more: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing to recompute for
            return forward(*arguments, **more)
        return checkpoint(forward, *arguments, **options, **more)

    _mark(run, "full" if contexts is None else "selective")
    setattr(run, _COMPILED_MARK, getattr(forward, _COMPILED_MARK, False))
    return run


def _mark(forward: Forward, kind: str | None) -> None:
    setattr(forward, _MARK, kind)


def find_checkpointing(layer: nn.Module) -> str | None:
    """As it is wrapped around or inside this layer's forward."""
    return getattr(layer.forward, _MARK, None)


def is_compiled(module: nn.Module) -> bool:
    """Its forward is handed to the compiler; when it first runs, if not before."""
    return bool(getattr(module.forward, _COMPILED_MARK, False))


def _policy(_context: Any, operation: Any, *arguments: Any, **_more: Any) -> CheckpointPolicy:
    """Keep what is dear to compute: attention, and products over a long inner dimension (not a LoRA's second one)."""
    name = str(operation)
    if name.startswith(_KEPT):
        return CheckpointPolicy.MUST_SAVE
    left = arguments[1] if name.startswith("aten.addmm") else arguments[0] if name.startswith("aten.mm.") else None
    if left is not None and left.shape[-1] >= SELECTIVE_MIN_INNER:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
