"""Base, adapter, engine and data put together for a plan, and proven: down the attention ladder until one runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from launcher.choices import UNRECORDABLE_ATTENTION
from launcher.corpus.store import Store
from launcher.errors import InputError
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.attention import BACKENDS, Backend
from launcher.training.gradient_proof import find_variants, prove_gradients
from launcher.training.product_proof import prove_products
from launcher.training.proof import Proof, prove_attention
from launcher.training.run import Run, build_module, build_run
from launcher.training.topology import check_prepared


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
        rung = plan.model_copy(
            update={
                "attention": plan.attention.model_copy(update={"backend": name}),
                "cuda_graph": plan.cuda_graph and name not in UNRECORDABLE_ATTENTION,
            }
        )
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
    # First: products that are wrong are left to PEFT, and nobody shall blame attention for them.
    products = prove_products(plan, module, run.train.file, accelerator.device)
    proof = prove_attention(plan, module, run.engine.model, run.train.file, accelerator.device)
    prove_gradients(plan, backend, accelerator.device, find_variants(module))
    return run, replace(proof, products=products)


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
