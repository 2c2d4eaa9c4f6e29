"""Create the folder of a new expert from its rows: validated and planned first, then moved into place at once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.base_models.missing_files import note_missing_files
from launcher.core.errors import DoesNotFitError, InputError
from launcher.core.run_paths import write_text_atomically
from launcher.corpus.chat_template_file import load_chat_template
from launcher.corpus.row_text import is_encodable
from launcher.manifest import load_manifest
from launcher.manifest.locate import list_expert_folders
from launcher.manifest.parse_json import shorten
from launcher.new_expert.manifest_text import TEMPLATE_FILE, render_manifest, resolve_folder
from launcher.new_expert.proposal import Options, Proposal, add_notes, make_proposal
from launcher.new_expert.row_profile import profile_file
from launcher.new_expert.splits import SAMPLE_FILES, choose_format, load_splits, make_sample
from launcher.request.request import PlannedRun, Request, base_folders, plan_request

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_REFERENCE_GPU = "h100"  # the real base is planned for it if this machine has no GPU
_OTHER_FOLDER = "choose another folder with --output-dir"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewExpert:
    """A created expert, or in a dry run the one that would be created."""

    expert: str
    folder: Path
    manifest: str  # text of manifest.json
    files: tuple[Path, ...]  # written; empty in a dry run
    proposal: Proposal
    plan: PlannedRun | None  # for this machine; None: it does not fit, and a note says why
    cli_name: str  # argument for `launcher train`
    num_split_rows: Mapping[str, int]  # usable rows for training, validation and test


def create_expert(
    expert: str,
    data: Path,
    options: Options,
    *,
    output_dir: Path | None = None,
    data_format: str | None = None,
    with_sample: bool = True,
    force: bool = False,
    dry_run: bool = False,
) -> NewExpert:
    """Propose a manifest for the rows of a file, check it by planning a run, and write it."""
    _check_name(expert)
    folder = output_dir or (Path("experts") / expert if Path("experts").is_dir() else Path(expert))
    _check_folder(folder, force=force or dry_run)
    for path in (folder, data, options.validation, options.test):
        if path is not None and not is_encodable(str(path.absolute())):
            raise InputError(
                f"{path}: the name is not UTF-8, so a manifest cannot contain it", hint="rename the file or folder"
            )
        if path is not None and force and with_sample and not dry_run:
            _check_not_in_sample(path, folder)
    proposal = make_proposal(profile_file(data, data_format), options, base_folders(folder))
    splits = load_splits(proposal, data_format)
    proposal = add_notes(proposal, *(note for split in splits.values() for note in split.notes))
    proposal = add_notes(proposal, *note_missing_files(proposal.base.name, base_folders(folder)))
    sample = make_sample(proposal, splits) if with_sample else None
    if sample is not None and sample.note:
        proposal = add_notes(proposal, sample.note)
    cli_name = _choose_cli_name(expert, folder)
    written_format = choose_format([proposal.profile.source, *(split.source for split in splits.values())])
    text = render_manifest(expert, proposal, folder, cli_name, written_format)
    texts = {MANIFEST: text, **(sample.texts if sample is not None else {})}
    if options.chat_template is not None:
        texts[TEMPLATE_FILE] = load_chat_template(options.chat_template.parent, options.chat_template.name)
    with _stage(folder, texts) as staging:
        proposal, planned = _plan(staging / MANIFEST, proposal)
        files = () if dry_run else _move_into_place(staging, folder, tuple(texts))
    return NewExpert(
        expert=expert,
        folder=folder,
        manifest=text,
        files=files,
        proposal=proposal,
        plan=planned,
        cli_name=cli_name,
        num_split_rows=proposal.count_split_rows({name: len(split.rows) for name, split in splits.items()}),
    )


def _check_name(expert: str) -> None:
    if _NAME.fullmatch(expert) and not expert.endswith(".json"):
        return
    rule = "it must begin with a letter or a digit, and have 1 to 60 letters, digits, dots, dashes and underscores"
    if expert.endswith(".json"):
        rule = "it must not end in .json, which is a manifest's file name"
    raise InputError(
        f"{shorten(expert)!r} is not a valid name for an expert: {rule}",
        hint="`launcher new sales --data rows.jsonl`; --output-dir sets the folder",
    )


def _check_folder(folder: Path, *, force: bool) -> None:
    """Raise InputError if files would be overwritten without `force`; the folder itself may exist."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder} exists and is not a directory", hint=_OTHER_FOLDER)
    existing = [folder / name for name in (MANIFEST, *SAMPLE_FILES) if os.path.lexists(folder / name)]
    if existing and not force:
        raise InputError(
            f"{existing[0]} already exists: nothing was changed",
            hint=f"--force replaces {MANIFEST} and sample/; or {_OTHER_FOLDER}",
        )


def _check_not_in_sample(path: Path, folder: Path) -> None:
    """Raise InputError for a file that --force would delete together with sample/."""
    if path.resolve().is_relative_to((folder / "sample").resolve()):
        raise InputError(
            f"{path} is in {folder / 'sample'}, which --force replaces: nothing was changed",
            hint=f"move the file, add --no-sample, or {_OTHER_FOLDER}",
        )


@contextmanager
def _stage(folder: Path, texts: dict[str, str]) -> Iterator[Path]:
    """Write the files next to the target folder, so that they can be renamed into it; remove them afterwards."""
    staging = folder.parent / f".{folder.name}.{os.getpid()}.new"
    created = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        try:
            for name in texts:
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{folder.parent}: cannot create a folder there: {error.strerror}", hint=_OTHER_FOLDER
            ) from None
        for name, text in texts.items():
            write_text_atomically(staging / name, text)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in created:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _plan(manifest: Path, proposal: Proposal) -> tuple[Proposal, PlannedRun | None]:
    """Load and plan the staged manifest as `launcher train` does, with an absolute path to the data."""
    path = f"training.dataset.path={json.dumps(str(resolve_folder(proposal.profile.source.path)))}"
    try:
        planned = plan_request(Request(expert=str(manifest), overrides=(path,)))
    except DoesNotFitError as error:
        return add_notes(proposal, f"the run does not fit this machine: {error.title}; {error.hint}"), None
    if planned.plan.profile == "smoke":  # which plans the tiny base only
        try:
            plan_request(Request(expert=str(manifest), overrides=(path,), profile="full", gpu=_REFERENCE_GPU))
        except DoesNotFitError as error:
            proposal = add_notes(proposal, f"the base model does not fit one {_REFERENCE_GPU}: {error.title}")
    return proposal, planned


def _move_into_place(staging: Path, folder: Path, names: tuple[str, ...]) -> tuple[Path, ...]:
    """Rename the staged folder; if the target exists, replace sample/ and, last, the manifest in it."""
    try:
        if not os.path.lexists(folder):
            staging.rename(folder)
        else:
            old, new = folder / "sample", staging / "sample"
            if new.is_dir():
                if old.is_dir():  # its rows have another mapping: none of its files may stay
                    old.rename(staging / "old")
                new.rename(old)
            for name in (TEMPLATE_FILE, MANIFEST):
                if (staging / name).is_file():
                    (staging / name).replace(folder / name)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}", hint=_OTHER_FOLDER) from None
    load_manifest(folder / MANIFEST)
    return tuple(folder / name for name in names)


def _choose_cli_name(expert: str, folder: Path) -> str:
    """Return the argument that commands take for this expert: its name if it resolves to this folder, else the path."""
    for candidate in (Path(expert), *(known / expert for known in list_expert_folders())):
        if candidate.resolve() == folder.resolve():
            return expert
        if (candidate / MANIFEST).is_file():
            break
    return str(folder) if os.sep in str(folder) else str(folder / MANIFEST)
