"""One training, from a plan and prepared data to saved weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from launcher.corpus.store import Store
from launcher.errors import InputError
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.attention import BACKENDS, Backend
from launcher.training.chronicle import Chronicle
from launcher.training.guards import StopOnSignal
from launcher.training.loop import train
from launcher.training.observed import Operations, count_graphs, observe, observe_operations
from launcher.training.observers.bad_steps import BadSteps
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best import Best
from launcher.training.observers.console import Console
from launcher.training.observers.facts import Facts
from launcher.training.observers.replay import Replay
from launcher.training.observers.saving import Saving
from launcher.training.proof import Proof, lay_out, pick_documents, prove_attention
from launcher.training.resuming import ResumeOptions, begin
from launcher.training.run import Run, build_module, build_run
from launcher.training.starting import start
from launcher.training.topology import check_prepared, check_started
from launcher.training.warming import compile_ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    steps_done: int
    was_cut: bool  # stopped by a signal, to this rank or another


def run_training(
    plan: Plan,
    paths: RunPaths,
    store: Store,
    folders: tuple[Path, ...],
    chronicle: Chronicle,
    vocab_size: int,
    options: ResumeOptions,
) -> Ending:
    accelerator = start(plan)
    check_started(plan, accelerator)
    run, proof = assemble(plan, paths, store, folders, accelerator, vocab_size)
    compiled = compile_ahead(run)
    seen = observe(run, proof, _watch_operations(run), compiled)
    _show(run, seen)
    chronicle.note(data_key=run.data_key, num_steps=run.num_steps, observed=seen)
    beginning = begin(run, options)
    chronicle.begin(beginning.position.step)
    stop, best, facts = StopOnSignal(), Best(plan.schedule), Facts()
    if beginning.best is not None:
        best.restore(beginning.best)
    replay = Replay(beginning.recorded, must_agree=options.verify_steps > 0)
    saving = Saving(best)
    stop.install()
    observers: list[Observer] = [Console(), facts, BadSteps(), replay, best, saving, stop]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    graphs, _ = count_graphs()
    try:
        steps_done = train(run, Observers(observers), beginning.position)
    except Exception:
        saving.close()
        raise
    recompiled = count_graphs()[0] - graphs
    if compiled and recompiled:
        seen["torch.compile"] = f"{compiled}; {recompiled} more graphs while training (evaluation has its own)"
        _say(run, f"torch.compile: {seen['torch.compile']}")
    if best.stopped_early:
        _say(run, best.stopped_early)
    chronicle.note(
        steps_done=steps_done,
        best_step=best.step,
        best_metric=best.value,
        final_loss=facts.last_loss,
        ended_because=best.stopped_early,
        observed=seen,
    )
    # Another rank may have been asked: all of them stopped, and this one does not know by what.
    return Ending(
        steps_done=steps_done,
        was_cut=steps_done < run.num_steps and not best.stopped_early,
    )


def assemble(
    plan: Plan,
    paths: RunPaths,
    store: Store,
    folders: tuple[Path, ...],
    accelerator: Accelerator,
    vocab_size: int | None = None,
) -> tuple[Run, Proof]:
    """Down the attention ladder until a backend runs. One that runs and is wrong ends the run instead.

    `vocab_size` is the tokenizer's; None where tokens are known to be the base's own.
    """
    rungs = (plan.attention.backend, *plan.attention.fallbacks)
    for index, name in enumerate(rungs):
        rung = plan.model_copy(update={"attention": plan.attention.model_copy(update={"backend": name})})
        try:
            return _assemble(rung, paths, store, folders, accelerator, BACKENDS[name], vocab_size)
        except (ImportError, NotImplementedError) as error:
            if index + 1 == len(rungs):
                raise InputError(f"the attention backend {name} cannot run here: {error}") from error
            if accelerator.is_main_process:
                print(f"attention: {name} cannot run here ({error}); {rungs[index + 1]} is tried", file=sys.stderr)
            accelerator.free_memory()
    raise AssertionError("unreachable")


def _assemble(
    plan: Plan,
    paths: RunPaths,
    store: Store,
    folders: tuple[Path, ...],
    accelerator: Accelerator,
    backend: Backend,
    vocab_size: int | None,
) -> tuple[Run, Proof]:
    module = build_module(plan, folders, accelerator.device, backend)
    run = build_run(plan, paths, store, module, accelerator)
    check_prepared(plan, run.engine)
    if vocab_size is not None:
        check_vocabulary(run, vocab_size)
    return run, prove_attention(plan, module, run.engine.model, run.train.file, accelerator.device)


def check_vocabulary(run: Run, vocab_size: int) -> None:
    """A token that the base has no row for would be an error deep in a kernel."""
    embeddings: Any = run.engine.module.base.get_input_embeddings()
    rows = int(embeddings.num_embeddings)
    if vocab_size <= rows:
        return
    largest = max(int(pack.input_ids.max()) for pack in run.train.file)
    if largest >= rows:
        raise InputError(
            f"the tokenizer makes token {largest}, and {run.plan.base.name} has embeddings for {rows}",
            hint="tokenizer and weights are of different models; point both to the same folder",
        )


def _watch_operations(run: Run) -> Operations:
    documents = pick_documents(run.train.file, run.plan.batch.sequence_length)
    return observe_operations(run.engine.model, lay_out(documents[:1], run.plan).to(run.engine.device))


def _show(run: Run, seen: dict[str, str]) -> None:
    width = max(map(len, seen))
    for name, what in seen.items():
        _say(run, f"  {name:<{width}}  {what}")


def _say(run: Run, text: str) -> None:
    if run.engine.is_main:
        print(text, file=sys.stderr, flush=True)
