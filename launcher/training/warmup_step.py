"""Run one micro-batch forward and backward, and one evaluation batch, before step 1.

This compiles the model while a compile error can still be handled, and detects out of memory before training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from launcher.training.data.loader import iterate_eval_batches
from launcher.training.engine.run import TrainingRun
from launcher.training.model.compile_checkpoint import compile_disabled, fall_back_to_eager, is_compile_enabled
from launcher.training.monitoring.runtime_report import CompileResult, count_compiled_graphs

_ADAM_STATES = 2  # each as large as the trained weights; created by the first update


def run_warmup_step(run: TrainingRun) -> CompileResult:
    """Compile the model and check memory; gradients and random numbers stay unchanged.

    The backward pass is compiled when it first runs, where an error could not be handled any more. With DeepSpeed there
    is no backward pass outside a step, so the first step does all this.
    """
    is_ddp = isinstance(run.engine.model, DistributedDataParallel)
    is_needed = run.plan.compile is not None or run.engine.device.type == "cuda" or is_ddp
    if run.engine.is_deepspeed or not is_needed:
        return CompileResult()
    started = time.monotonic()
    run.heartbeat.beat("compiling" if run.plan.compile is not None else "starting")
    try:
        _run_micro_batch(run)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a backward pass raises whatever its compiler raised
        if run.plan.compile is None:
            raise
        with compile_disabled():
            _run_micro_batch(run)  # raises again if the compiler was not the cause
        fall_back_to_eager(error)
    _run_eval_batch(run)
    run.heartbeat.beat("starting")
    if run.plan.compile is None:
        return CompileResult()
    if not is_compile_enabled():
        return CompileResult(description="failed; training without it", has_failed=True)
    scope = "per layer" if run.plan.compile.scope == "layer" else "decoder"
    graphs, breaks = count_compiled_graphs()
    description = f"{scope}: {graphs} graphs, {breaks} graph breaks, {time.monotonic() - started:.0f} s"
    return CompileResult(description=description, graphs=graphs)


def _run_micro_batch(run: TrainingRun) -> None:
    engine = run.engine
    devices = [engine.device] if engine.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), _no_sync(run), _reserve_optimizer_states(run):
            batch = run.batches()[0].to(engine.device)
            engine.accelerator.backward(engine.model(batch) * 0.0)
            if engine.graphs is not None:
                engine.optimizer.zero_grad(set_to_none=True)
                engine.graphs(batch, 1)  # captured here, to detect out of memory
    finally:
        engine.optimizer.zero_grad(set_to_none=True)


def _no_sync(run: TrainingRun) -> AbstractContextManager[None]:
    """Return accelerate's no_sync() context, or one without effect for FSDP2 and DDP, which must sync gradients.

    FSDP2 would keep unsharded gradients until the first step. DDP rebuilds its buckets after the first all-reduce, so a
    resumed run would reduce its first step in a different order.
    """
    engine = run.engine
    if isinstance(engine.model, FSDPModule | DistributedDataParallel):
        return nullcontext()
    return cast(AbstractContextManager[None], engine.accelerator.no_sync(engine.model))


@contextmanager
def _reserve_optimizer_states(run: TrainingRun) -> Iterator[None]:
    """Allocate as much memory as the optimizer states, which are created only after the first backward pass."""
    name = run.plan.optimizer.name
    if run.engine.device.type != "cuda" or name in ("sgd", "paged_adamw_8bit"):  # no state on the GPU
        yield
        return
    bytes_per_element = 2 if name == "adamw_bnb_8bit" else 4 * _ADAM_STATES
    trained = run.engine.trained_parameters()
    num_elements = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in trained)
    reserved = torch.empty(num_elements * bytes_per_element, dtype=torch.uint8, device=run.engine.device)
    yield
    del reserved


def _run_eval_batch(run: TrainingRun) -> None:
    """Evaluate one batch, to check memory. On one rank, out of memory is ignored: evaluation will halve the batch."""
    split, engine = run.validation, run.engine
    if split is None or engine.device.type != "cuda":
        return
    batch = next(iterate_eval_batches(split.file, split.costs, split.shape, engine.rank, engine.num_ranks))
    try:
        with engine.eval_mode():
            engine.model(batch.to(engine.device))
    except torch.OutOfMemoryError:
        if engine.num_ranks > 1:
            raise
