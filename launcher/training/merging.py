"""Merges an adapter into its base, writes one model with its tokenizer and card, and compares what was written."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from launcher.choices import Dtype
from launcher.corpus.documents import make_template
from launcher.corpus.preparation import data_root
from launcher.corpus.store import find_store
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.errors import InputError, LauncherError, RunFailedError
from launcher.inputs import base_folders
from launcher.paths import write_text_atomically
from launcher.training.agreement import Agreement, check_agreement, compute_logits, measure
from launcher.training.card import render_card
from launcher.training.describing import CARD_FILE, gather_facts
from launcher.training.finished import FinishedRun
from launcher.training.loading import DTYPES
from launcher.training.prompts import make_prompt
from launcher.training.proof import pick_documents
from launcher.training.quiet import quiet_transformers
from launcher.training.reloading import find_published_dtype, load_expert, load_folder, pick_device
from launcher.training.saved import let_others_read

Say = Callable[[str], None]

_TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# Enough tokens to tell a right merge from a wrong one; the logits of more would be gigabytes.
_COMPARED_TOKENS = 512
_EXAMPLE = "How many rows are there, and which of them is the oldest?"


def merge_into(folder: Path, run: FinishedRun, wanted: Dtype | None, say: Say) -> tuple[Dtype, Agreement]:
    """Leaves a whole model in `folder`, or raises."""
    quiet_transformers()
    published = find_published_dtype(run)
    dtype = wanted or published
    # In the base's own dtype; where another one is wanted, in fp32, and rounded once.
    merged_in: Dtype = dtype if dtype == published else "fp32"
    device = pick_device(run.plan, merged_in)
    tokenizer = load_tokenizer(run.plan.base.name, base_folders(Path(run.plan.data.folder)))
    rows = pick_rows(run, tokenizer)
    if run.plan.quantization is not None:
        say(f"trained on a base of {run.plan.quantization.kind}; merged into the full one, as published ({published})")
    say(f"loading {run.plan.base.name} in {merged_in} on {device.type}")
    model = load_expert(run, merged_in, device)
    expected, base = _compute_expected(model, rows, device)
    say("merging" if isinstance(model, PeftModel) else "copying: every weight was trained, there is nothing to merge")
    _write(folder, _merge(model).to(DTYPES[dtype]), run, dtype, tokenizer)  # type: ignore[arg-type]
    del model
    _free()
    agreement = measure(_compute_written(folder, run, dtype, rows, device), expected, base)
    check_agreement(agreement, dtype)
    _check_tokenizer(folder, tokenizer, run)
    return dtype, agreement


def pick_rows(run: FinishedRun, tokenizer: BaseTokenizer) -> list[Tensor]:
    """Rows of the run's own data, held-out ones first; where its store is gone, one question in its template."""
    key = None if run.outcome is None else run.outcome.data_key
    store = None if key is None else find_store(data_root(run.plan), key)
    splits = () if store is None else tuple(name for name in ("validation", "train") if name in store.splits)
    for split in splits:
        assert store is not None
        file = store.open_split(split)
        if documents := pick_documents(file, _COMPARED_TOKENS):
            return [torch.from_numpy(document.input_ids.astype("int64")) for document in documents]
        if len(file):  # all rows are longer than that
            return [torch.from_numpy(file[0].input_ids[:_COMPARED_TOKENS].astype("int64"))]
    prompt = make_prompt(make_template(run.plan.data.prompt_template, tokenizer), _EXAMPLE)
    return [torch.tensor(tokenizer.backend.encode(prompt, add_special_tokens=False).ids)]


def _compute_expected(
    model: PreTrainedModel | PeftModel, rows: list[Tensor], device: torch.device
) -> tuple[list[Tensor], list[Tensor] | None]:
    expected = compute_logits(model, rows, device)
    if not isinstance(model, PeftModel):
        return expected, None
    with model.disable_adapter():
        return expected, compute_logits(model, rows, device)


def _merge(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    if not isinstance(model, PeftModel):
        return model
    try:
        merged: Any = model.merge_and_unload(safe_merge=True)
    except ValueError as error:  # PEFT looked for not-a-number
        raise RunFailedError(f"the adapter cannot be merged: {error}") from None
    return merged


def _write(folder: Path, model: PreTrainedModel, run: FinishedRun, dtype: Dtype, tokenizer: BaseTokenizer) -> None:
    _stop_where_trained(model, run, tokenizer)
    try:
        model.save_pretrained(str(folder))
        for pattern in _TOKENIZER_FILES:
            for file in tokenizer.folder.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        let_others_read(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder.parent} cannot be written: {error}", hint="is the disk full?") from None
    write_text_atomically(folder / CARD_FILE, _render_card(run, dtype))


def _stop_where_trained(model: PreTrainedModel, run: FinishedRun, tokenizer: BaseTokenizer) -> None:
    """Training ends answers with the template's end token, which need not be the base's own."""
    end = tokenizer.backend.token_to_id(make_template(run.plan.data.prompt_template, tokenizer).end_token)
    config = model.generation_config
    given = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(token for token in (end, *given) if token is not None))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    try:
        config.validate(strict=True)
    except ValueError:  # some bases are published with settings that transformers no longer writes
        model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


def _render_card(run: FinishedRun, dtype: Dtype) -> str:
    outcome, schedule = run.outcome, run.plan.schedule
    steps_done = 0 if outcome is None else outcome.steps_done
    best = outcome.best_step if outcome is not None and schedule.load_best_model_at_end else None
    facts = gather_facts(
        "merged", run.plan, run.manifest, run.paths, steps_done=steps_done, saved_step=best or steps_done, dtype=dtype
    )
    return render_card(facts)


def _compute_written(
    folder: Path, run: FinishedRun, dtype: Dtype, rows: list[Tensor], device: torch.device
) -> list[Tensor]:
    """Of the files themselves: what somebody else will load."""
    try:
        return compute_logits(load_folder(folder, dtype, device, trusts=run.plan.trust_remote_code), rows, device)
    except LauncherError as error:
        raise RunFailedError(f"what was written cannot be loaded: {error.title}") from None


def _check_tokenizer(folder: Path, tokenizer: BaseTokenizer, run: FinishedRun) -> None:
    prompt = make_prompt(make_template(run.plan.data.prompt_template, tokenizer), _EXAMPLE)
    loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=run.plan.trust_remote_code)
    if (
        loaded(prompt, add_special_tokens=False).input_ids
        != tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    ):
        raise RunFailedError("the tokenizer that was written makes other tokens than the one of the training")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
