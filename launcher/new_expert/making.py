"""Rows -> the folder of a new expert: whole, loaded and planned before it is put in place, or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import DoesNotFitError, InputError
from launcher.inputs import PlannedRun, Request, base_folders, plan_request
from launcher.manifest import load_manifest
from launcher.manifest.locate import expert_folders
from launcher.manifest.reading import shorten
from launcher.new_expert.manifest_text import render_manifest
from launcher.new_expert.proposal import Proposal, Wishes, make_proposal, with_notes
from launcher.new_expert.sample import SAMPLE_FILES, make_sample
from launcher.new_expert.seeing import is_text, see_rows
from launcher.new_expert.splits import choose_format, see_splits
from launcher.paths import write_text_atomically

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_ANY_GPU = "h100"  # to plan the real base on, where this machine has no GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class NewExpert:
    expert: str
    folder: Path
    manifest: str  # the text of manifest.json
    files: tuple[Path, ...]  # written; empty in a dry run
    proposal: Proposal
    plan: PlannedRun | None  # for this machine; None: it does not fit, and a note says why
    called: str  # what `launcher train` takes


def make_new_expert(
    expert: str,
    data: Path,
    wishes: Wishes,
    *,
    into: Path | None = None,
    data_format: str | None = None,
    with_sample: bool = True,
    force: bool = False,
    dry_run: bool = False,
) -> NewExpert:
    folder = _choose_folder(expert, into)
    _check_free(folder, force=force or dry_run)
    _check_names(folder, data, wishes.validation, wishes.test)
    proposal = make_proposal(see_rows(data, data_format), wishes, base_folders(folder))
    splits = see_splits(proposal, data_format)
    proposal = with_notes(proposal, *(note for split in splits.values() for note in split.notes))
    sample = make_sample(proposal, splits) if with_sample else None
    if sample is not None and sample.note:
        proposal = with_notes(proposal, sample.note)
    called = _name_call(expert, folder)
    written = choose_format([proposal.seen.source, *(split.source for split in splits.values())])
    text = render_manifest(expert, proposal, folder, called, written)
    texts = {MANIFEST: text, **(sample.texts if sample is not None else {})}
    with _staged(folder, texts) as staging:
        proposal, planned = _try_out(staging / MANIFEST, proposal)
        files = () if dry_run else _put_in_place(staging, folder, tuple(texts))
    return NewExpert(
        expert=expert, folder=folder, manifest=text, files=files, proposal=proposal, plan=planned, called=called
    )


def _choose_folder(expert: str, into: Path | None) -> Path:
    if not _NAME.fullmatch(expert) or expert.endswith(".json"):
        why = (
            "it may not end in .json, which names a manifest's file"
            if expert.endswith(".json")
            else "it begins with a letter or a digit, and has 1 to 60 letters, digits, dots, dashes and underscores"
        )
        raise InputError(
            f"{shorten(expert)!r} is no name for an expert: {why}",
            hint="`launcher new sales --data rows.jsonl`; --into FOLDER says where it is to lie",
        )
    if into is not None:
        return into
    return Path("experts") / expert if Path("experts").is_dir() else Path(expert)


def _check_names(*paths: Path | None) -> None:
    """A manifest is UTF-8, and so is what it names."""
    for path in paths:
        if path is not None and not is_text(str(path.absolute())):
            raise InputError(f"{path}: its name is not UTF-8: a manifest could not name it", hint="rename it")


def _check_free(folder: Path, *, force: bool) -> None:
    """A folder may be there, with the data in it; what we would write may not."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder} is there already, and is no folder", hint="--into FOLDER names another place")
    taken = [folder / name for name in (MANIFEST, *SAMPLE_FILES) if os.path.lexists(folder / name)]
    if taken and not force:
        raise InputError(
            f"{taken[0]} is there already: nothing was changed",
            hint=f"--force replaces {MANIFEST} and sample/ in it, --into FOLDER names another place",
        )


@contextmanager
def _staged(folder: Path, texts: dict[str, str]) -> Iterator[Path]:
    """Beside the place where it will lie, so that it is moved and not copied; nothing of it stays."""
    staging = folder.parent / f".{folder.name}.{os.getpid()}.new"
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        try:
            for name in texts:
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{folder.parent}: no folder can be made there: {error.strerror}",
                hint="--into FOLDER names another place",
            ) from None
        for name, text in texts.items():
            write_text_atomically(staging / name, text)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:  # those that were made for nothing go, too
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _try_out(manifest: Path, proposal: Proposal) -> tuple[Proposal, PlannedRun | None]:
    """By the loader and the planner that a training uses; the data is named in full, as it is staged elsewhere."""
    path = f"training.dataset.path={json.dumps(str(proposal.seen.source.path.resolve()))}"
    request = Request(expert=str(manifest), overrides=(path,))
    try:
        planned = plan_request(request)
    except DoesNotFitError as error:
        return with_notes(proposal, f"it does not fit this machine: {error.title}; {error.hint}"), None
    if planned.plan.profile == "smoke":  # the real base was not looked at
        try:
            plan_request(Request(expert=str(manifest), overrides=(path,), profile="full", gpu=_ANY_GPU))
        except DoesNotFitError as error:
            proposal = with_notes(proposal, f"the base does not fit one {_ANY_GPU}: {error.title}")
    return proposal, planned


def _put_in_place(staging: Path, folder: Path, names: tuple[str, ...]) -> tuple[Path, ...]:
    """One rename where nothing is there yet; else file by file, the manifest last: without one, it is no expert."""
    try:
        if not os.path.lexists(folder):
            staging.rename(folder)
        else:
            _replace(staging, folder)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror}", hint="--into FOLDER names another place"
        ) from None
    load_manifest(folder / MANIFEST)
    return tuple(folder / name for name in names)


def _replace(staging: Path, folder: Path) -> None:
    """Of an older sample nothing may stay beside a newer one: its rows are of another mapping."""
    old, new = folder / "sample", staging / "sample"
    if new.is_dir():
        if old.is_dir():
            old.rename(staging / "old")
        new.rename(old)
    (staging / MANIFEST).replace(folder / MANIFEST)


def _name_call(expert: str, folder: Path) -> str:
    """The short name where it will lead here: no other expert of that name stands before it."""
    for place in (Path(expert), *(known / expert for known in expert_folders())):
        if place.resolve() == folder.resolve():
            return expert
        if (place / MANIFEST).is_file():
            break
    return str(folder) if os.sep in str(folder) else str(folder / MANIFEST)
