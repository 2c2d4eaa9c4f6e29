"""Merge an adapter into its base, write the model with tokenizer and model card, and verify the written files."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from launcher.core.choices import Dtype
from launcher.core.errors import InputError, LauncherError, RunFailedError, first_line, hint_for
from launcher.core.run_paths import write_text_atomically
from launcher.corpus.chat_template import TokenizerTemplate
from launcher.corpus.documents import make_planned_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.spec import get_expert_stores_dir
from launcher.corpus.store import find_store
from launcher.corpus.templates import AlpacaTemplate, TurnTemplate
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer, load_planned_tokenizer
from launcher.request.request import base_folders
from launcher.training.checkpoint.weights import make_readable
from launcher.training.export.logits_check import Agreement, check_agreement, compare_logits, compute_logits
from launcher.training.export.model_card import CARD_FILE, CardKind, collect_facts, get_public_name, render_card
from launcher.training.inference.load import (
    get_published_dtype,
    load_from_folder,
    load_trained_model,
    pick_device,
    read_finite_names,
)
from launcher.training.inference.prompt import render_prompt
from launcher.training.inference.trained_run import TrainedRun
from launcher.training.model.base_model import DTYPES
from launcher.training.runtime.process_output import silence_transformers
from launcher.training.verify.packing import select_documents

Report = Callable[[str], None]

# Enough tokens to detect a wrong merge; logits of more would take gigabytes.
_COMPARED_TOKENS = 512
_EXAMPLE = "How many rows are there, and which of them is the oldest?"
# Spaces, line breaks, digits, accents and bytes: where tokenizers differ.
_SAMPLE = "How many  rows?\n\n\tSELECT count(*) FROM t_1 WHERE x >= 2048;\r\n naïve Größe 数据 🙂"
_NO_THINKING = "{%- if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif -%}\n"


def merge_into(folder: Path, run: TrainedRun, requested: Dtype | None, report: Report) -> tuple[Dtype, Agreement]:
    """Merge a run's adapter into its base and write the model to `folder`; raise if its logits or tokens differ."""
    silence_transformers()
    published = get_published_dtype(run)
    dtype = requested or published
    # In the base's own dtype; for another one, in FP32 and rounded once.
    merge_dtype: Dtype = dtype if dtype == published else "fp32"
    device = pick_device(run.plan, merge_dtype)
    tokenizer = load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder)))
    rows = pick_rows(run, tokenizer)
    if run.plan.quantization is not None:
        report(f"trained on a base in NF4: merging into its dequantized weights ({merge_dtype}), as in training")
    report(f"loading {run.plan.base.name} in {merge_dtype} on {device.type}")
    model = load_trained_model(run, merge_dtype, device)
    expected, base = _compute_expected(model, rows, device)
    report("merging" if isinstance(model, PeftModel) else "copying (full fine-tuning: no adapter to merge)")
    _write(folder, _merge(model).to(DTYPES[dtype]), run, dtype, tokenizer)  # type: ignore[arg-type]
    del model
    _free()
    agreement = compare_logits(_compute_written(folder, run, dtype, rows, device), expected, base)
    check_agreement(agreement, dtype)
    _check_tokenizer(folder, tokenizer, run)
    return dtype, agreement


def pick_rows(run: TrainedRun, tokenizer: BaseTokenizer) -> list[Tensor]:
    """Return rows of the run's data, validation rows first; if the data is gone, one example prompt."""
    key = None if run.outcome is None else run.outcome.data_key
    store = None if key is None else find_store(get_expert_stores_dir(run.plan), key)
    splits = () if store is None else tuple(name for name in ("validation", "train") if name in store.splits)
    for split in splits:
        assert store is not None
        file = store.open_split(split)
        if documents := select_documents(file, _COMPARED_TOKENS):
            return [torch.from_numpy(document.input_ids.astype("int64")) for document in documents]
        if len(file):  # all rows are longer
            return [torch.from_numpy(file[0].input_ids[:_COMPARED_TOKENS].astype("int64"))]
    template = make_planned_template(run.plan.data, tokenizer)
    return [torch.tensor(TextEncoder(tokenizer, template).encode_prompt(render_prompt(template, _EXAMPLE)))]


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
    except ValueError as error:  # PEFT found NaN
        raise RunFailedError(f"the adapter cannot be merged: {error}") from None
    return merged


def _write(folder: Path, model: PreTrainedModel, run: TrainedRun, dtype: Dtype, tokenizer: BaseTokenizer) -> None:
    _set_end_token(model, run, tokenizer)
    try:
        model.save_pretrained(str(folder))
        _write_tokenizer(folder, run, tokenizer)
        make_readable(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder.parent} cannot be written: {error}", hint=hint_for(error)) from None
    write_text_atomically(folder / CARD_FILE, render_export_card("merged", run, dtype))


def _write_tokenizer(folder: Path, run: TrainedRun, tokenizer: BaseTokenizer) -> None:
    """Write tokenizer and chat template such that transformers encodes texts to the tokens used in training.

    For some values of tokenizer_class, transformers 5 takes only the vocabulary from tokenizer.json. The class is then
    set to PreTrainedTokenizerFast, which takes all of it.
    """
    tokenizer.write_files(folder)
    _write_template(folder, run, tokenizer)
    file = folder / "tokenizer_config.json"
    if file.is_file() and not _gives_same_tokens(folder, run, tokenizer):
        settings = json.loads(file.read_text(encoding="utf-8"))
        pinned = {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(pinned, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _gives_same_tokens(folder: Path, run: TrainedRun, tokenizer: BaseTokenizer) -> bool:
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=run.trusts_code)
    except Exception:  # of a tokenizer's own code, or of a class that transformers does not know
        return False
    expected: list[int] = tokenizer.backend.encode(_SAMPLE, add_special_tokens=False).ids
    return bool(loaded(_SAMPLE, add_special_tokens=False).input_ids == expected)


def _write_template(folder: Path, run: TrainedRun, tokenizer: BaseTokenizer) -> None:
    """Write the chat template of the training, unless it is the base's, in both places where servers look for one.

    If the base's template has `enable_thinking`, training set it to false; the written template has that as default.
    """
    template, source = make_planned_template(run.plan.data, tokenizer), run.plan.data.chat_template
    if isinstance(template, TurnTemplate | AlpacaTemplate):
        has_bos = TextEncoder(tokenizer, template).adds_bos(render_prompt(template, _EXAMPLE))
        source = ("{{ bos_token }}" if has_bos else "") + template.to_jinja()
    elif isinstance(template, TokenizerTemplate) and "enable_thinking" in template.source:
        source = _NO_THINKING + template.source
    if source is None:
        return
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        changed = {**settings, "chat_template": source}
        config.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_end_token(model: PreTrainedModel, run: TrainedRun, tokenizer: BaseTokenizer) -> None:
    """Add the template's end token, which may differ from the base's, to the generation config."""
    trained = collect_end_ids(tokenizer, make_planned_template(run.plan.data, tokenizer).end_token)
    config = model.generation_config
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(token for token in (*trained, *own) if token is not None))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    try:
        config.validate(strict=True)
    except ValueError:  # some bases have settings that transformers no longer writes
        model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


def write_adapter(folder: Path, run: TrainedRun) -> None:
    """Write the adapter, with the tokenizer and chat template of the training and without paths of this machine."""
    tokenizer = load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder)))
    try:
        shutil.copyfile(run.paths.adapter / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        names = read_finite_names(folder / "adapter_model.safetensors")
        config = json.loads((run.paths.adapter / "adapter_config.json").read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = get_public_name(run.plan)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write_tokenizer(folder, run, tokenizer)
        make_readable(folder)
    except (SafetensorError, ValueError, TypeError) as error:
        raise InputError(f"{run.paths.adapter} is damaged: {first_line(error)}") from None
    except OSError as error:
        raise InputError(f"{folder.parent} cannot be written: {error}", hint=hint_for(error)) from None
    if not names:
        raise InputError(f"{run.paths.adapter} is damaged: it has no weights")
    write_text_atomically(folder / CARD_FILE, render_export_card("adapter", run, run.plan.precision.base_dtype))


def render_export_card(
    kind: CardKind,
    run: TrainedRun,
    dtype: Dtype,
    *,
    files: Sequence[str] = (),
    checks: Sequence[str] = (),
    window: int | None = None,
) -> str:
    """Return the model card of an exported folder."""
    outcome, schedule = run.outcome, run.plan.schedule
    steps_done = 0 if outcome is None else outcome.steps_done
    best = outcome.best_step if outcome is not None and schedule.load_best_model_at_end else None
    facts = collect_facts(
        kind, run.plan, run.manifest, run.paths, steps_done=steps_done, saved_step=best or steps_done, dtype=dtype
    )
    return render_card(replace(facts, is_export=True, files=tuple(files), checks=tuple(checks), window=window))


def _compute_written(
    folder: Path, run: TrainedRun, dtype: Dtype, rows: list[Tensor], device: torch.device
) -> list[Tensor]:
    """Compute the logits of the written files."""
    try:
        return compute_logits(load_from_folder(folder, dtype, device, trusts=run.trusts_code), rows, device)
    except LauncherError as error:
        raise RunFailedError(f"the written model cannot be loaded: {error.title}") from None


def _check_tokenizer(folder: Path, tokenizer: BaseTokenizer, run: TrainedRun) -> None:
    """Raise RunFailedError if the written tokenizer or chat template gives other prompt tokens than in training."""
    template = make_planned_template(run.plan.data, tokenizer)
    prompt = render_prompt(template, _EXAMPLE)
    loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=run.trusts_code)
    encoder = TextEncoder(tokenizer, template)
    expected = encoder.encode_prompt(prompt)
    if loaded(prompt, add_special_tokens=encoder.adds_bos(prompt)).input_ids[: len(expected)] != expected:
        raise RunFailedError("the written tokenizer gives different tokens than the one used in training")
    if isinstance(template, TurnTemplate | AlpacaTemplate) or "strftime_now" not in template.text:  # today's date
        chat = [{"role": "user", "content": _EXAMPLE}]
        if isinstance(template, TokenizerTemplate):  # a note of the preparation says if rows had another prompt
            expected = encoder.encode_prompt(template.render_served_prompt(_EXAMPLE))
        if loaded.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) != expected:
            raise RunFailedError("the written chat template gives a different prompt than the one used in training")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
