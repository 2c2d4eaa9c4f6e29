"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.corpus import first_rows, row_count
from launcher.corpus.bin_packing import Lengths, Packing, pack_documents
from launcher.corpus.sources import FileSource
from launcher.corpus.spec import PreparationSpec
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.manifest.dataset import Dataset
from launcher.plan.estimate.dataset_size import RowEstimate
from tests.conftest import ROOT


@pytest.fixture(scope="session", autouse=True)
def _count_samples_once() -> Iterator[None]:
    """Cache what every plan of the smoke profile computes from the committed samples."""
    probe, count = first_rows._probe_file, row_count._count_first_rows
    packings: dict[tuple[bytes, int, int], Packing] = {}
    estimates: dict[tuple[str, Path, str | None], RowEstimate | None] = {}
    counts: dict[tuple[str, str], RowEstimate] = {}

    def pack_once(lengths: Lengths, capacity: int, seed: int) -> Packing:
        key = lengths.tobytes(), capacity, seed
        if key not in packings:
            packings[key] = pack_documents(lengths, capacity, seed)
        return packings[key]

    def probe_once(dataset: Dataset, file: Path, format_name: str | None) -> RowEstimate | None:
        if not file.absolute().is_relative_to(ROOT / "experts"):
            return probe(dataset, file, format_name)
        key = dataset.model_dump_json(), file, format_name
        if key not in estimates:
            estimates[key] = probe(dataset, file, format_name)
        return estimates[key]

    def count_once(rows: RowEstimate, spec: PreparationSpec, tokenizer: BaseTokenizer | None) -> RowEstimate:
        files = [s.source.path for s in (*spec.train, *spec.validation) if isinstance(s.source, FileSource)]
        if tokenizer is None or not all(file.absolute().is_relative_to(ROOT / "experts") for file in files):
            return count(rows, spec, tokenizer)
        key = repr(rows), repr(spec.key_parts(keeps_hashes=False))
        if key not in counts:
            counts[key] = count(rows, spec, tokenizer)
        return counts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_count, "_count_first_rows", count_once)
        patch.setattr(row_count, "pack_documents", pack_once)
        patch.setattr(first_rows, "_probe_file", probe_once)
        yield
