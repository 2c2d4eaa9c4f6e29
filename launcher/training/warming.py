"""One micro-batch forward and backward before the first step, so that compiling is seen, timed, and may fail."""

from __future__ import annotations

import time

import torch

from launcher.training.layers import give_up_compiling, is_compiling, uncompiled
from launcher.training.observed import count_graphs
from launcher.training.run import Run


def compile_ahead(run: Run) -> str:
    """What was compiled, in words; empty where nothing is. Gradients and random numbers are as if it had never been.

    The backward pass is compiled only when it first runs, where an error could no longer be caught. DeepSpeed has no
    backward pass without its bookkeeping: there the first step compiles.
    """
    if run.plan.compile is None or run.engine.is_deepspeed:
        return ""
    began = time.monotonic()
    try:
        _pass_through(run)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a backward pass raises whatever its compiler raised
        with uncompiled():
            _pass_through(run)  # an error that is not the compiler's comes again
        give_up_compiling(error)
    if not is_compiling():
        return "failed, the run goes on without it"
    what = "each layer" if run.plan.compile.scope == "layer" else "the whole decoder"
    graphs, breaks = count_graphs()
    return f"{what}: {graphs} graphs, {breaks} graph breaks, {time.monotonic() - began:.0f} s"


def _pass_through(run: Run) -> None:
    engine = run.engine
    try:
        with torch.random.fork_rng(devices=_devices(run)), engine.accelerator.no_sync(engine.model):
            engine.accelerator.backward(engine.model(run.batches()[0].to(engine.device)) * 0.0)
    finally:
        engine.optimizer.zero_grad(set_to_none=True)


def _devices(run: Run) -> list[torch.device]:
    return [run.engine.device] if run.engine.device.type == "cuda" else []
