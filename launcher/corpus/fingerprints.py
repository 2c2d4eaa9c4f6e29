"""What a source is, as one string: the hash of a file's bytes, or the hub's own fingerprint."""

from __future__ import annotations

from pathlib import Path

from launcher.corpus.hashes import hash_remembered
from launcher.corpus.sources import FileSource, Source
from launcher.errors import InputError


def fingerprint_source(source: Source, root: Path) -> str:
    if isinstance(source, FileSource):
        try:
            return f"sha256:{hash_remembered(source.path, root)}"
        except OSError as error:
            raise InputError(f"{source.path}: cannot be read: {error.strerror or error}") from None
    return f"hub:{source.dataset}:{source.split}:{source.fingerprint}"
