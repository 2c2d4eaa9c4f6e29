"""What is to be prepared: sources of each split, tokenizer, template, rules. All of it is in the key."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.corpus.documents import make_template
from launcher.corpus.fingerprints import fingerprint_source
from launcher.corpus.pack import PACKER_VERSION
from launcher.corpus.sources import HubSource, Source, make_file_source
from launcher.corpus.store import check_inside
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.errors import InputError
from launcher.plan.model import DataPlan, Plan
from launcher.rows import SAMPLE_TRAIN

DATA_DIR_VARIABLE = "LAUNCHER_DATA_DIR"
DEFAULT_FOLDER = "datasets_optimized"
# Of how rows are read, rendered, masked and counted: a change that makes other tokens, masks or audits raises it.
RULES_VERSION = 3

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSource:
    source: Source
    weight: float = 1.0  # share of its rows that is used, by hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """Everything that the packs depend on."""

    expert: str
    root: Path
    train: tuple[WeightedSource, ...]
    validation: tuple[WeightedSource, ...]
    test: tuple[WeightedSource, ...]
    cuts_validation: bool
    data: DataPlan
    tokenizer: BaseTokenizer
    template: Template
    trains_all: bool
    capacity: int
    is_packed: bool
    seed: int = 0  # of the shuffle of packs in the store; an epoch's order has the manifest's
    notes: tuple[str, ...] = ()  # for the audit

    def key_parts(self) -> dict[str, str]:
        parts = {
            "fields": self.data.field_mapping.model_dump_json(exclude_none=True),
            "tokenizer": self.tokenizer.fingerprint,
            "template": f"{self.template.name}:{hashlib.sha256(self.template.text.encode()).hexdigest()}",
            "loss_on": "all" if self.trains_all else "completion",
            "max_seq_length": str(self.capacity),
            "packing": str(self.is_packed),
            "packer": str(PACKER_VERSION),
            "rules": str(RULES_VERSION),
            "validation": "cut" if self.cuts_validation else "given" if self.validation else "none",
        }
        for name, sources in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            prints = [f"{fingerprint_source(s.source, self.root)}*{s.weight:g}" for s in sources]
            if prints:
                parts[f"data ({name})"] = " + ".join(prints)
        return parts


def make_preparation(plan: Plan, folder: Path, tokenizer: BaseTokenizer) -> Preparation:
    """`folder` is the manifest's: relative paths of data start there."""
    data = plan.data
    if plan.profile == "smoke" and data.path == SAMPLE_TRAIN and not (folder / SAMPLE_TRAIN).is_file():
        raise InputError(
            f"{folder / SAMPLE_TRAIN}: no such file; the smoke profile trains on the sample beside a manifest",
            hint="put a few hundred rows there, one JSON object a line; --profile full takes the manifest's dataset",
        )
    validation = _find_sources(data, folder, "validation")
    cuts_validation = not validation and _evaluates(plan)
    return Preparation(
        expert=plan.expert,
        root=data_root(plan),
        train=_find_sources(data, folder, "train"),
        validation=validation,
        test=_find_sources(data, folder, "test"),
        cuts_validation=cuts_validation,
        data=data,
        tokenizer=tokenizer,
        template=make_template(data.prompt_template, tokenizer),
        trains_all=plan.loss_on == "all",
        capacity=plan.batch.sequence_length,
        is_packed=plan.batch.packed,
        notes=_note_missing(data, folder, cuts_validation),
    )


def data_dir() -> Path:
    """LAUNCHER_DATA_DIR, or the working directory."""
    return Path(os.environ.get(DATA_DIR_VARIABLE) or ".")


def data_folder() -> Path:
    return data_dir() / DEFAULT_FOLDER


def data_root(plan: Plan) -> Path:
    """Where an expert's stores lie: the manifest's place, or one folder an expert."""
    return check_inside(data_dir(), plan.data.cache_dir or f"{DEFAULT_FOLDER}/{plan.expert}")


def _evaluates(plan: Plan) -> bool:
    return plan.schedule.evaluate_every_steps is not None or plan.schedule.evaluate_every_epochs is not None


def _note_missing(data: DataPlan, folder: Path, cuts_validation: bool) -> tuple[str, ...]:
    if data.kind != "single":
        return ()
    named = {"validation": data.validation_path, "test": data.test_path}
    cut = {"validation": "; a part of the training rows is held out instead"} if cuts_validation else {}
    return tuple(
        f"{split}: {path} is not there{cut.get(split, '')}"
        for split, path in named.items()
        if path is not None and not (folder / path).exists()
    )


def _find_sources(data: DataPlan, folder: Path, split: Split) -> tuple[WeightedSource, ...]:
    if data.kind == "multi_task":
        return _find_task_sources(data, folder, split)
    path = {"train": data.path, "validation": data.validation_path, "test": data.test_path}[split]
    if path is None:
        return ()
    if data.kind == "huggingface" and not (folder / path).exists():
        name, _, rest = path.partition("::")  # dataset::split::config, as published manifests write it
        hub_split, _, config = rest.partition("::")
        source: Source = HubSource(
            dataset=name,
            config=config or None,
            split=hub_split or split,
            revision=data.revision,
            streaming=data.streaming,
        )
        return (WeightedSource(source=source),)
    file = folder / path
    if split != "train" and not file.exists():
        return ()  # published manifests name files that were never published; without one, a part is cut
    return (WeightedSource(source=make_file_source(file, data.format)),)


def _find_task_sources(data: DataPlan, folder: Path, split: Split) -> tuple[WeightedSource, ...]:
    heaviest = max((task.weight for task in data.tasks.values()), default=1.0) or 1.0
    sources = []
    for task in data.tasks.values():
        path = {"train": task.train, "validation": task.valid, "test": task.test}[split]
        if path is not None and task.weight > 0:
            source = make_file_source(folder / path, None)
            sources.append(WeightedSource(source=source, weight=task.weight / heaviest if split == "train" else 1.0))
    return tuple(sources)
