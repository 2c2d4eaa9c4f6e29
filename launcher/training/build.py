"""Build a `TrainingRun` of base, adapter, engine and data, with the first planned attention backend that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from launcher.core.choices import UNRECORDABLE_ATTENTION, AttentionBackend
from launcher.core.errors import InputError
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.run import TrainingRun, assemble_run, build_model
from launcher.training.runtime.startup_timer import startup
from launcher.training.topology_check import check_engine
from launcher.training.verify.attention_grads import check_attention_grads, collect_variants
from launcher.training.verify.lora_grads import check_fp8_grads, check_lora_grads
from launcher.training.verify.packing import PackingCheck, check_packing, check_rope

log = get_logger(__name__)


def build_run(
    plan: Plan,
    paths: RunPaths,
    store: Store,
    folders: tuple[Path, ...],
    accelerator: Accelerator,
    vocab_size: int | None = None,
) -> tuple[TrainingRun, PackingCheck]:
    """Build a run with the first attention backend that works here. A backend with wrong results ends the run.

    `vocab_size` is the tokenizer's; None skips the check that every token of the data has an embedding.
    """
    backends = (plan.attention.backend, *plan.attention.fallbacks)
    for index, name in enumerate(backends):
        attention = plan.attention.model_copy(update={"backend": name})
        cuda_graph = plan.cuda_graph and name not in UNRECORDABLE_ATTENTION
        varied = plan.model_copy(update={"attention": attention, "cuda_graph": cuda_graph})
        try:
            return _build_and_check(varied, paths, store, folders, accelerator, vocab_size)
        except (ImportError, NotImplementedError, RuntimeError) as error:
            if not _is_unsupported(name, error):
                raise
            if index + 1 == len(backends):
                raise InputError(f"attention backend {name} does not work here: {error}") from error
            if accelerator.is_main_process:
                log.info(f"attention backend {name} does not work here ({error}); trying {backends[index + 1]}")
            accelerator.free_memory()
    raise AssertionError("unreachable")


def _is_unsupported(backend: AttentionBackend, error: Exception) -> bool:
    """Return whether an error means that a backend cannot run here, such as FlexAttention kernels that do not fit."""
    if isinstance(error, (ImportError, NotImplementedError)):
        return True
    return backend == "flex" and not isinstance(error, torch.OutOfMemoryError)


def _build_and_check(
    plan: Plan,
    paths: RunPaths,
    store: Store,
    folders: tuple[Path, ...],
    accelerator: Accelerator,
    vocab_size: int | None,
) -> tuple[TrainingRun, PackingCheck]:
    module = build_model(plan, folders, accelerator.device)
    startup.end_phase("model")
    run = assemble_run(plan, paths, store, module, accelerator)
    check_engine(plan, run.engine)
    startup.end_phase("engine")
    if vocab_size is not None:
        _check_vocabulary(run, vocab_size)
    splits = (run.train, run.validation)
    check_rope(plan, module, [split.file for split in splits if split is not None])
    # First, because wrong fused layers fall back to PEFT and must not be attributed to attention.
    lora_grads = check_lora_grads(plan, module, run.train.file, accelerator.device)
    fp8_grads = check_fp8_grads(plan, module, run.train.file, accelerator.device)
    check = check_packing(plan, module, run.engine.model, run.train.file, accelerator.device)
    check_attention_grads(plan, module.backend, accelerator.device, collect_variants(module))
    startup.end_phase("checks")
    return run, replace(check, lora_grads=lora_grads, fp8_grads=fp8_grads)


def _check_vocabulary(run: TrainingRun, vocab_size: int) -> None:
    """Fail if the data contains a token without an embedding, which would be an error deep in a kernel."""
    embeddings: Any = run.engine.module.base.get_input_embeddings()
    weight = embeddings.weight
    num_embeddings = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 has only a part of it here
    if vocab_size <= num_embeddings:
        return
    largest = max(int(pack.input_ids.max()) for pack in run.train.file)
    if largest >= num_embeddings:
        raise InputError(
            f"the data contains token {largest}, but {run.plan.base.name} has only {num_embeddings} embeddings",
            hint="tokenizer and weights belong to different models; use the same folder for both",
        )
