"""One micro-batch forward and backward, and one of the evaluation, before the first step: compiling is seen, timed, and
may fail; and memory that does not suffice is found out before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from launcher.training.feeding import evaluation_batches
from launcher.training.layers import give_up_compiling, is_compiling, uncompiled
from launcher.training.observed import count_graphs
from launcher.training.run import Run

_STATES_OF_ADAM = 2  # each as large as what is trained; they come with the first update


def rehearse_step(run: Run) -> str:
    """What was compiled, in words; empty where nothing is. Gradients and random numbers are as if it had never been.

    The backward pass is compiled only when it first runs, where an error could no longer be caught. DeepSpeed has no
    backward pass without its bookkeeping: there the first step does all this.
    """
    is_ddp = isinstance(run.engine.model, DistributedDataParallel)
    is_needed = run.plan.compile is not None or run.engine.device.type == "cuda" or is_ddp
    if run.engine.is_deepspeed or not is_needed:
        return ""
    began = time.monotonic()
    run.pulse.beat("compiling" if run.plan.compile is not None else "starting")
    try:
        _pass_through(run)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a backward pass raises whatever its compiler raised
        if run.plan.compile is None:
            raise
        with uncompiled():
            _pass_through(run)  # an error that is not the compiler's comes again
        give_up_compiling(error)
    _evaluate_once(run)
    run.pulse.beat("starting")
    if run.plan.compile is None:
        return ""
    if not is_compiling():
        return "failed, the run goes on without it"
    what = "each layer" if run.plan.compile.scope == "layer" else "the whole decoder"
    graphs, breaks = count_graphs()
    return f"{what}: {graphs} graphs, {breaks} graph breaks, {time.monotonic() - began:.0f} s"


def _pass_through(run: Run) -> None:
    engine = run.engine
    try:
        with (
            torch.random.fork_rng(devices=_devices(run)),
            _unsynchronised(run),
            _room_of_states_taken(run),
        ):
            batch = run.batches()[0].to(engine.device)
            engine.accelerator.backward(engine.model(batch) * 0.0)
            if engine.graphs is not None:
                engine.optimizer.zero_grad(set_to_none=True)
                engine.graphs(batch, 1)  # recorded here, so that it is found out here whether there is room
    finally:
        engine.optimizer.zero_grad(set_to_none=True)


def _unsynchronised(run: Run) -> AbstractContextManager[None]:
    """Nothing has to travel; but under FSDP2 each rank would hold all gradients whole until the first step, and DDP
    lays its buckets out anew after the first sum: a run that is taken up again would add its first one up otherwise."""
    engine = run.engine
    if isinstance(engine.model, FSDPModule | DistributedDataParallel):
        return nullcontext()
    return cast(AbstractContextManager[None], engine.accelerator.no_sync(engine.model))


@contextmanager
def _room_of_states_taken(run: Run) -> Iterator[None]:
    """The optimizer makes its states after the first backward pass: the second one has so much less room."""
    if run.engine.device.type != "cuda" or run.plan.optimizer.name == "sgd":
        yield
        return
    per_element = 2 if run.plan.optimizer.name == "adamw_bnb_8bit" else 4 * _STATES_OF_ADAM
    held = sum(_local_elements(parameter) for parameter in run.engine.trained_parameters())
    ballast = torch.empty(held * per_element, dtype=torch.uint8, device=run.engine.device)
    yield
    del ballast


def _local_elements(parameter: torch.nn.Parameter) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _evaluate_once(run: Run) -> None:
    """Its batch has a size of its own. Where it is too large, an evaluation of one process takes a smaller one."""
    split, engine = run.validation, run.engine
    if split is None or engine.device.type != "cuda":
        return
    batch = next(evaluation_batches(split.file, split.costs, split.shape, engine.rank, engine.num_ranks))
    try:
        with engine.evaluating():
            engine.model(batch.to(engine.device))
    except torch.OutOfMemoryError:
        if engine.num_ranks > 1:
            raise


def _devices(run: Run) -> list[torch.device]:
    return [run.engine.device] if run.engine.device.type == "cuda" else []
