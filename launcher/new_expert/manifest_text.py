"""Render a proposal as manifest.json. JSON has no comments: keys that begin with `_` give the reasons."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from launcher.core.choices import ALL_LINEAR
from launcher.corpus.sources import Format
from launcher.judges.registry import JUDGED_NAMES
from launcher.manifest.parse_json import Json
from launcher.new_expert.proposal import Proposal

_RANK = 16
_SCHEMA_FILE = "manifest.schema.json"
_MIN_COMMON_PARTS = 2  # more than / and home
TEMPLATE_FILE = "chat_template.jinja"
_MAX_WIDTH = 100  # of a list on one line


def render_manifest(expert: str, proposal: Proposal, folder: Path, cli_name: str, data_format: Format | None) -> str:
    """Return the text of a manifest in `folder`; `cli_name` is the expert's name or path in commands."""
    head: dict[str, Json] = {}
    if (folder.parent / _SCHEMA_FILE).is_file():
        head["$schema"] = f"../{_SCHEMA_FILE}"
    quoted = shlex.quote(cli_name)
    tree: dict[str, Json] = {
        **head,
        "_comment": f"Created by `launcher new {expert}` from {proposal.num_rows:,} rows. Keys that begin with _ are "
        f"comments. `launcher validate {quoted}` checks it, `launcher plan {quoted}` shows what would run, and why.",
        "name": expert if expert.startswith("expert-") else f"expert-{expert}",
        "version": "0.1.0",
        "schema_version": "2.0",
        "description": _describe(proposal),
        "base_models": [_make_base(proposal)],
        "training": {"dataset": _make_dataset(proposal, folder, data_format), "config": _make_config(proposal)},
    }
    evaluation = _make_evaluation(expert, proposal)
    if evaluation:
        tree["evaluation"] = evaluation
    return _dump(tree) + "\n"


def resolve_folder(file: Path) -> Path:
    """Return the absolute path of a file; a symbolic link keeps its own name, because its target may have no suffix."""
    return file.parent.resolve() / file.name


def _make_path(file: Path, folder: Path) -> str:
    """Return a path relative to the manifest's folder if both share a home directory, else the absolute path."""
    target, start = resolve_folder(file), folder.resolve()
    common = Path(os.path.commonpath([target, start]))
    return os.path.relpath(target, start) if len(common.parts) > _MIN_COMMON_PARTS else str(target)


def _describe(proposal: Proposal) -> str:
    mapping = proposal.roles.mapping
    if mapping.messages is not None:
        return "Answers like the conversations that it is trained on."
    if mapping.text is not None:
        return "Answers like the texts that it is trained on."
    context = f" and {mapping.input}" if mapping.input else ""
    return f"From {mapping.instruction or 'input'}{context} to {mapping.answer or proposal.roles.reader.answer}."


def _make_base(proposal: Proposal) -> Json:
    return {
        "name": proposal.base.name,
        "quantization": "none",
        "_quantization_comment": "int4 (NF4, QLoRA) trains large base models on small GPUs.",
        "prompt_template": proposal.template.name,
        **({"chat_template": TEMPLATE_FILE} if proposal.options.chat_template is not None else {}),
        "_template_comment": f"{proposal.template.reason}. chatml, qwen3, llama3, alpaca or tokenizer (its own).",
    }


def _make_dataset(proposal: Proposal, folder: Path, data_format: Format | None) -> Json:
    profile, options = proposal.profile, proposal.options
    tree: dict[str, Json] = {"path": _make_path(profile.source.path, folder)}
    if Path(str(tree["path"])).is_absolute():
        tree["_path_comment"] = "Absolute path. Elsewhere, copy the file next to this manifest and write only its name."
    if data_format is not None:
        tree["format"] = data_format
    if options.validation is not None:
        tree["validation_path"] = _make_path(options.validation, folder)
    else:
        tree["_validation_comment"] = (
            "Without validation_path, 10 % of the rows are split off for validation, by a hash of the prompt."
            if proposal.num_validation is not None
            else "No validation split: too few distinct prompts. Set validation_path to a file."
        )
    if options.test is not None:
        tree["test_path"] = _make_path(options.test, folder)
    mapping = proposal.roles.mapping.model_dump(exclude_none=True)
    if mapping:
        tree["field_mapping"] = mapping
    fields = proposal.options.fields
    if fields is not None and fields.system_prompt:
        tree["system_prompt"] = fields.system_prompt
    tree["_fields_comment"] = "; ".join(
        f"{guess.name}: {guess.value} ({guess.reason})" for guess in proposal.roles.guesses
    )
    if profile.source.path.suffix not in (".jsonl", ".csv"):  # for these the plan counts the lines
        tree["splits"] = {"train": proposal.num_rows}
    return tree


def _make_config(proposal: Proposal) -> Json:
    sizes, base = proposal.hyperparameters, proposal.base
    tree: dict[str, Json] = {
        "method": "sft",
        "adapter_type": "lora",
        "rank": _RANK,
        "alpha": 2 * _RANK,
        "dropout": 0.0,
        "target_modules": ALL_LINEAR if base.basis == "approximate" else list(dict.fromkeys(base.linear_names)),
        "epochs": sizes.epochs,
        "_epochs_comment": sizes.epochs_reason,
        "learning_rate": 0.0002,
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "seed": 42,
        "batch_size": sizes.global_batch_size,
        "_batch_comment": f"Sequences per step on any hardware (global batch): {sizes.batch_reason}.",
        "max_seq_length": sizes.max_seq_length,
        "_length_comment": f"{sizes.length_reason} (estimated from their bytes).",
        "packing": True,
        "loss_on": "all" if proposal.trains_all else "completion",
        "_loss_comment": "completion: loss on answers and their end token; prompts are masked. all: on every token.",
        "save_strategy": "epoch",
    }
    if proposal.has_validation:
        tree |= {"evaluation_strategy": "epoch", "load_best_model_at_end": True}
    else:
        tree["evaluation_strategy"] = "no"
    tree["_execution_comment"] = "Precision, attention, compilation and checkpointing are decided by the plan."
    return tree


def _make_evaluation(expert: str, proposal: Proposal) -> Json:
    """Return the manifest's `evaluation`: the judge's name, or none if the expert's name would select a wrong judge."""
    language = proposal.language
    if language is not None:
        comment = f"{language.reason}. Judges: QUALITY.md of the documentation."
        return {"judge": language.name, "_judge_comment": comment}
    if expert.removeprefix("expert-") in JUDGED_NAMES:
        return {"task_rows": 0, "_judge_comment": "The answers are not in the language of the expert's name."}
    return None


def _dump(node: Json, indent: str = "") -> str:
    """Dump as JSON with short lists on one line."""
    below = indent + "  "
    if isinstance(node, dict) and node:
        lines = [f"{below}{json.dumps(key)}: {_dump(value, below)}" for key, value in node.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    flat = json.dumps(node, ensure_ascii=False)
    if isinstance(node, list) and node and (len(flat) > _MAX_WIDTH or any(isinstance(item, dict) for item in node)):
        return "[\n" + ",\n".join(below + _dump(item, below) for item in node) + f"\n{indent}]"
    return flat
