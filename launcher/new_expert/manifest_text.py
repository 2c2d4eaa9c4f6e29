"""A proposal -> the text of a manifest. JSON has no comments: keys that begin with `_` are ours, and say why."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from launcher.corpus.sources import Format
from launcher.new_expert.proposal import Proposal
from launcher.quality.judges import LANGUAGE_NAMES

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_RANK = 16
_SCHEMA_FILE = "manifest.schema.json"
_WIDTH = 100  # of a list on one line


def render_manifest(expert: str, proposal: Proposal, folder: Path, called: str, data_format: Format | None) -> str:
    """`folder` is where it will lie: paths of data start there. `called` is what verbs take."""
    head: dict[str, Json] = {}
    if (folder.parent / _SCHEMA_FILE).is_file():
        head["$schema"] = f"../{_SCHEMA_FILE}"
    verb = shlex.quote(called)
    tree: dict[str, Json] = {
        **head,
        "_comment": f"Made by `launcher new {expert}` from {proposal.num_rows:,} rows. Keys that begin with _ are "
        f"comments. `launcher validate {verb}` checks it, `launcher plan {verb}` shows what would run, and why.",
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


def name_path(file: Path, folder: Path) -> str:
    """From the manifest's folder where both lie below the working directory: they move together. Else in full."""
    here, target = Path.cwd().resolve(), file.resolve()
    inside = target.is_relative_to(here) and folder.resolve().is_relative_to(here)
    return os.path.relpath(target, folder.resolve()) if inside else str(target)


def _describe(proposal: Proposal) -> str:
    mapping = proposal.roles.mapping
    if mapping.messages is not None:
        return "Answers as the conversations do that it was trained on."
    if mapping.text is not None:
        return "Answers as the texts do that it was trained on."
    context = f" and {mapping.input}" if mapping.input else ""
    return f"From {mapping.instruction or 'input'}{context} to {mapping.answer or proposal.roles.reader.answer}."


def _make_base(proposal: Proposal) -> Json:
    return {
        "name": proposal.base.name,
        "quantization": "none",
        "_quantization_comment": "int4 (NF4) trains large bases on small cards: QLoRA.",
        "prompt_template": proposal.template,
        "_template_comment": f"{proposal.template_why}. chatml, qwen3, llama3, alpaca, or tokenizer: the base's own.",
    }


def _make_dataset(proposal: Proposal, folder: Path, data_format: Format | None) -> Json:
    seen, wishes = proposal.seen, proposal.wishes
    tree: dict[str, Json] = {"path": name_path(seen.source.path, folder)}
    if data_format is not None:  # else the files' names tell it
        tree["format"] = data_format
    if wishes.validation is not None:
        tree["validation_path"] = name_path(wishes.validation, folder)
    else:
        tree["_validation_comment"] = (
            "Without validation_path a tenth of the rows is held out, by a hash of the prompt."
            if proposal.num_held_out is not None
            else "Nothing is held out: the prompts are too few or too much alike. validation_path names a file."
        )
    if wishes.test is not None:
        tree["test_path"] = name_path(wishes.test, folder)
    mapping = proposal.roles.mapping.model_dump(exclude_none=True)
    if mapping:
        tree["field_mapping"] = mapping
    tree["_fields_comment"] = "; ".join(
        f"{guess.what}: {guess.value} ({guess.why})" for guess in proposal.roles.guesses
    )
    if seen.source.path.suffix not in (".jsonl", ".csv"):  # plans count the lines of these by themselves
        tree["splits"] = {"train": proposal.num_rows}
    return tree


def _make_config(proposal: Proposal) -> Json:
    sizes = proposal.sizes
    tree: dict[str, Json] = {
        "method": "sft",
        "adapter_type": "lora",
        "rank": _RANK,
        "alpha": 2 * _RANK,
        "dropout": 0.0,
        "target_modules": list(proposal.base.linear_names),
        "epochs": sizes.epochs,
        "_epochs_comment": sizes.epochs_why,
        "learning_rate": 0.0002,
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "seed": 42,
        "batch_size": sizes.global_batch_size,
        "_batch_comment": f"Sequences a step on any hardware, which the plan splits: {sizes.batch_why}.",
        "max_seq_length": sizes.max_seq_length,
        "_length_comment": f"{sizes.length_why} (estimated from their bytes).",
        "packing": True,
        "loss_on": "all" if proposal.loss_on_all else "completion",
        "_loss_comment": "completion: answers and their end are learnt, prompts are only read. all: every token.",
        "save_strategy": "epoch",
    }
    if proposal.holds_out:
        tree |= {"evaluation_strategy": "epoch", "load_best_model_at_end": True}
    else:
        tree["evaluation_strategy"] = "no"
    tree["_execution_comment"] = "Precision, attention, compiling, checkpointing and the rest are left to the plan."
    return tree


def _make_evaluation(expert: str, proposal: Proposal) -> Json:
    """A name can be taken for a language, too: then it is said that it is none."""
    language = proposal.language
    if language is not None:
        comment = f"{language.why}. Who judges, and how: docs/QUALITY.md."
        return {"judge": language.name, "_judge_comment": comment}
    if expert.removeprefix("expert-") in LANGUAGE_NAMES:
        return {"task_rows": 0, "_judge_comment": "The answers are not in the language of the expert's name."}
    return None


def _dump(node: Json, indent: str = "") -> str:
    """As people write it: a short list of plain values stays on its line."""
    below = indent + "  "
    if isinstance(node, dict) and node:
        lines = [f"{below}{json.dumps(key)}: {_dump(value, below)}" for key, value in node.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    flat = json.dumps(node, ensure_ascii=False)
    if isinstance(node, list) and node and (len(flat) > _WIDTH or any(isinstance(item, dict) for item in node)):
        return "[\n" + ",\n".join(below + _dump(item, below) for item in node) + f"\n{indent}]"
    return flat
