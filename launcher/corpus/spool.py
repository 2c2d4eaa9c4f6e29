"""Token batches on disk until their packs are known: only lengths and hashes stay in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from launcher.corpus.tokenise import TokenBatch

_Number = TypeVar("_Number", np.int32, np.int64, np.uint64)


class Spool:
    """Appends documents to two flat files; afterwards any document can be read back without a copy."""

    def __init__(self, folder: Path, name: str, end_token_id: int) -> None:
        self._ids_path = folder / f"{name}.ids"
        self._mask_path = folder / f"{name}.mask"
        self._ids = self._ids_path.open("wb")
        self._mask = self._mask_path.open("wb")
        self._end_token_id = end_token_id
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._rows: list[npt.NDArray[np.int64]] = []
        self._trained: list[npt.NDArray[np.int32]] = []
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self.num_cut = 0
        self.num_cut_tokens = 0
        self.num_untrained = 0  # documents left out: nothing in them would be trained
        self.num_ends_trained = 0  # documents whose last trained token is the end token

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ids.close()
        self._mask.close()

    def add(self, batch: TokenBatch) -> None:
        self.num_cut += batch.num_cut
        self.num_cut_tokens += batch.num_cut_tokens
        ends = np.cumsum(batch.lengths)
        starts = ends - batch.lengths
        trained = np.add.reduceat(batch.trained.astype(np.int32), starts) if len(starts) else starts.astype(np.int32)
        kept = trained > 0
        self.num_untrained += int((~kept).sum())
        positions = np.repeat(kept, batch.lengths)
        ids, mask = batch.input_ids[positions], batch.trained[positions]
        self._ids.write(ids.tobytes())
        self._mask.write(mask.tobytes())
        self._lengths.append(batch.lengths[kept])
        self._rows.append(batch.rows[kept])
        self._trained.append(trained[kept].astype(np.int32))
        self._note_documents(ids, mask, batch.lengths[kept])

    def _note_documents(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]
    ) -> None:
        """For the audit: a hash of each document, and whether its answer ends with the end token."""
        hashes = np.empty(len(lengths), dtype=np.uint64)
        start = 0
        for index, length in enumerate(lengths.tolist()):
            document = ids[start : start + length]
            hashes[index] = int.from_bytes(hashlib.blake2b(document.tobytes(), digest_size=8).digest(), "little")
            start += length
        self._hashes.append(hashes)
        is_end = (ids == self._end_token_id) & (mask == 1)
        starts = np.cumsum(lengths) - lengths
        self.num_ends_trained += int((np.add.reduceat(is_end.astype(np.int32), starts) > 0).sum()) if len(starts) else 0

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return _joined(self._lengths, np.int32)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return _joined(self._rows, np.int64)

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return _joined(self._trained, np.int32)

    @property
    def num_duplicates(self) -> int:
        hashes = _joined(self._hashes, np.uint64)
        return len(hashes) - len(np.unique(hashes))

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """All ids and masks, memory-mapped."""
        self._ids.flush()
        self._mask.flush()
        if not self._ids.tell():
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8)
        return np.memmap(self._ids_path, dtype=np.int32, mode="r"), np.memmap(self._mask_path, dtype=np.uint8, mode="r")

    def remove(self) -> None:
        self._ids_path.unlink(missing_ok=True)
        self._mask_path.unlink(missing_ok=True)


def _joined(parts: list[npt.NDArray[_Number]], dtype: type[_Number]) -> npt.NDArray[_Number]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
