"""Specification of prepared data: sources of each split, tokenizer, template and rules, all part of the key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from launcher.core.errors import InputError, LauncherError, hint_for
from launcher.corpus.bin_packing import PACKER_VERSION
from launcher.corpus.documents import DocumentBuilder, make_planned_template
from launcher.corpus.end_token import note_disagreement, note_other_prompt
from launcher.corpus.first_rows import make_source_reader, peek_rows
from launcher.corpus.hash_cache import hash_file_cached
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import FileSource, HubSource, Source, make_file_source, make_task_source
from launcher.corpus.store import make_key
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import BaseTokenizer, load_planned_tokenizer
from launcher.manifest.cache_dir import get_data_dir, resolve_cache_dir
from launcher.plan.estimate.dataset_size import SAMPLE_TRAIN
from launcher.plan.model import DataPlan, Plan

DEFAULT_FOLDER = "datasets_optimized"
# Version of reading, rendering, masking and counting rows: raise it if tokens, masks or audit counts change.
RULES_VERSION = 11

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSource:
    """A source and the share of its rows that is used."""

    source: Source
    weight: float = 1.0  # share of the rows that is used, selected by hash
    max_rows: int | None = None  # the first rows are used

    @property
    def fingerprint_suffix(self) -> str:
        """Weight and row limit, as part of the fingerprint of the prepared data."""
        return f"*{self.weight:g}" + (f"[:{self.max_rows}]" if self.max_rows is not None else "")

    def selects(self, prompt_hash: int) -> bool:
        """Return whether rows with this prompt belong to the share of the source that is used."""
        # By the low bits: the high ones select the validation split.
        return self.weight >= 1 or prompt_hash % 2**32 < self.weight * 2**32

    def read(self) -> Iterator[Row | BadRow]:
        """Yield the first `max_rows` rows of the source; `weight` is applied later, by hash."""
        return islice(self.source.read(), self.max_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationSpec:
    """Rows, tokenizer, template and settings from which packs are made."""

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
    seed: int = 0  # shuffles the packs in the store; the order of an epoch uses the manifest's seed
    notes: tuple[str, ...] = ()  # for the audit

    @property
    def sources(self) -> dict[Split, tuple[WeightedSource, ...]]:
        """The sources of each split, the training split first."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def key_parts(self, *, keeps_hashes: bool = True) -> dict[str, str]:
        """Return the inputs of the store's key by name; with `keeps_hashes`, hashes of files are cached in `root`."""
        parts = {
            "fields": self.data.field_mapping.model_dump_json(exclude_none=True),
            "tokenizer": self.tokenizer.fingerprint,
            "template": f"{self.template.name}:{_hash(self.template.text)}:{self.template.end_token}",
            "loss_on": "all" if self.trains_all else "completion",
            "max_seq_length": str(self.capacity),
            "packing": str(self.is_packed),
            "packer": str(PACKER_VERSION),
            "rules": str(RULES_VERSION),
            "validation": "cut" if self.cuts_validation else "given" if self.validation else "none",
        }
        if self.data.system_prompt:
            parts["system_prompt"] = _hash(self.data.system_prompt)
        for name, sources in self.sources.items():
            prints = [
                f"{fingerprint_source(s.source, self.root, keeps_hash=keeps_hashes)}{s.fingerprint_suffix}"
                for s in sources
            ]
            if prints:
                parts[f"data ({name})"] = " + ".join(prints)
        return parts

    def open_rows(self, weighted: WeightedSource) -> tuple[DocumentBuilder, Iterator[Row | BadRow]]:
        """Return the rows of a source, and the builder that makes documents of them."""
        rows = weighted.read()
        peeked = peek_rows(rows, self.data.field_mapping)
        reader = make_source_reader(self.data.field_mapping, self.data.system_prompt, weighted.source, peeked)
        return DocumentBuilder(reader=reader, template=self.template, trains_all=self.trains_all), chain(peeked, rows)


def make_preparation_spec(plan: Plan, folder: Path, tokenizer: BaseTokenizer) -> PreparationSpec:
    """Return the specification of the data of a plan; `folder` is the manifest's, to which paths are relative."""
    data = plan.data
    if plan.profile == "smoke" and data.path == SAMPLE_TRAIN and not (folder / SAMPLE_TRAIN).is_file():
        raise InputError(
            f"{folder / SAMPLE_TRAIN}: no such file; the smoke profile trains on the sample in the manifest's folder",
            hint="add a few hundred rows, one JSON object per line, or use --profile full for the manifest's dataset",
        )
    template = make_planned_template(data, tokenizer)
    validation = _make_sources(data, folder, "validation")
    cuts_validation = not validation and _evaluates(plan)
    return PreparationSpec(
        expert=plan.expert,
        root=get_expert_stores_dir(plan),
        train=_make_sources(data, folder, "train"),
        validation=validation,
        test=_make_sources(data, folder, "test"),
        cuts_validation=cuts_validation,
        data=data,
        tokenizer=tokenizer,
        template=template,
        trains_all=plan.loss_on == "all",
        capacity=plan.batch.sequence_length,
        is_packed=plan.batch.packed,
        notes=(
            *_note_missing(data, folder, cuts_validation),
            *note_disagreement(template, tokenizer),
            *note_other_prompt(template),
        ),
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def get_stores_dir() -> Path:
    """Return the folder of all prepared data."""
    return get_data_dir() / DEFAULT_FOLDER


def get_expert_stores_dir(plan: Plan) -> Path:
    """Return the folder of an expert's stores: as set in the manifest, or one folder per expert."""
    return resolve_cache_dir(plan.data.cache_dir or f"{DEFAULT_FOLDER}/{plan.expert}")


def _evaluates(plan: Plan) -> bool:
    return plan.schedule.evaluate_every_steps is not None or plan.schedule.evaluate_every_epochs is not None


def _note_missing(data: DataPlan, folder: Path, cuts_validation: bool) -> tuple[str, ...]:
    if data.kind != "single":
        return ()
    named = {"validation": data.validation_path, "test": data.test_path}
    cut = {"validation": "; a part of the training rows is held out instead"} if cuts_validation else {}
    return tuple(
        f"{split}: {path} does not exist{cut.get(split, '')}"
        for split, path in named.items()
        if path is not None and not (folder / path).exists()
    )


def _make_sources(data: DataPlan, folder: Path, split: Split) -> tuple[WeightedSource, ...]:
    if data.kind == "multi_task":
        return _make_task_sources(data, folder, split)
    path = {"train": data.path, "validation": data.validation_path, "test": data.test_path}[split]
    max_rows = data.max_rows if split == "train" else None
    if path is None:
        return ()
    if data.kind == "huggingface" and not (folder / path).exists():
        name, _, rest = path.partition("::")  # dataset::split::config, as in published manifests
        hub_split, _, config = rest.partition("::")
        source: Source = HubSource(
            dataset=name,
            config=config or None,
            split=hub_split or split,
            revision=data.revision,
            streaming=data.streaming,
        )
    elif split != "train" and not (folder / path).exists():
        return ()  # published manifests name files that were not published
    else:
        source = make_file_source(folder / path, data.format)
    return (WeightedSource(source=source, max_rows=max_rows),)


def _make_task_sources(data: DataPlan, folder: Path, split: Split) -> tuple[WeightedSource, ...]:
    heaviest = max((task.weight for task in data.tasks.values()), default=1.0) or 1.0
    sources = []
    for task in data.tasks.values():
        path = {"train": task.train, "validation": task.valid, "test": task.test}[split]
        if path is not None and task.weight > 0:
            source = make_task_source(folder / path, task.format)
            if split == "train":
                sources.append(WeightedSource(source=source, weight=task.weight / heaviest, max_rows=data.max_rows))
            else:
                sources.append(WeightedSource(source=source))
    return tuple(sources)


def fingerprint_source(source: Source, root: Path, *, keeps_hash: bool = True) -> str:
    """Return the hash of a file, or the fingerprint of a hub dataset."""
    if isinstance(source, FileSource):
        try:
            return f"sha256:{hash_file_cached(source.path, root, keeps_hash=keeps_hash)}"
        except OSError as error:
            raise InputError(
                f"{source.path}: cannot be read: {error.strerror or error}", hint=hint_for(error)
            ) from None
    return f"hub:{source.dataset}:{source.split}:{source.fingerprint}"


def compute_current_key(plan: Plan, folder: Path, search: tuple[Path, ...]) -> str | None:
    """Return the key of the data that a plan would prepare now; None if its data or tokenizer is not available.

    Nothing is written.
    """
    try:
        spec = make_preparation_spec(plan, folder, load_planned_tokenizer(plan, search))
        return make_key(spec.key_parts(keeps_hashes=False))
    except LauncherError:
        return None
