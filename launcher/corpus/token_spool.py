"""Tokenized documents on disk until they are packed; only lengths and hashes stay in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from launcher.corpus.tokenize_rows import TokenBatch


class TokenSpool:
    """Appends documents to two flat files, which are memory-mapped afterwards."""

    def __init__(self, folder: Path, name: str, end_token_id: int) -> None:
        self._ids_path = folder / f"{name}.ids"
        self._mask_path = folder / f"{name}.mask"
        self._ids = self._ids_path.open("wb")
        self._mask = self._mask_path.open("wb")
        self._end_token_id = end_token_id
        # Per document, in parts; the first is empty, so that there is always one.
        self._lengths = [np.zeros(0, dtype=np.int32)]
        self._rows = [np.zeros(0, dtype=np.int64)]
        self._trained = [np.zeros(0, dtype=np.int32)]
        self._hashes = [np.zeros(0, dtype=np.uint64)]
        self._prompt_hashes = [np.zeros(0, dtype=np.uint64)]
        self.num_cut = 0
        self.num_cut_tokens = 0
        self.num_untrained = 0  # documents dropped because they have no trained tokens
        self.num_with_controls = 0  # documents with the text of a control token in a field
        self.num_untrained_answers = 0
        self.num_ends_trained = 0  # documents that train the end token at least once

    def __enter__(self) -> TokenSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ids.close()
        finally:  # closing also fails on a full disk
            self._mask.close()

    def add(self, batch: TokenBatch) -> None:
        """Append the documents of a batch that have trained tokens."""
        self.num_cut += int((batch.excess > 0).sum())
        self.num_cut_tokens += int(batch.excess.sum())
        if batch.findings is not None:
            self.num_with_controls += int(batch.findings[:, 0].sum())
            self.num_untrained_answers += int(batch.findings[:, 1].sum())
        trained = _sums(batch.trained, batch.lengths)
        is_kept = trained > 0
        self.num_untrained += int((~is_kept).sum())
        kept = batch if is_kept.all() else batch.select(is_kept)
        self._ids.write(kept.input_ids.data)
        self._mask.write(kept.trained.data)
        self._lengths.append(kept.lengths)
        self._rows.append(kept.rows)
        self._prompt_hashes.append(kept.prompt_hashes)
        self._trained.append(trained[is_kept].astype(np.int32))
        self._update_statistics(kept.input_ids, kept.trained, kept.lengths)

    def _update_statistics(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]
    ) -> None:
        """Hash each document and count those that train the end token, for the audit."""
        hashes = np.empty(len(lengths), dtype=np.uint64)
        start = 0
        for index, length in enumerate(lengths.tolist()):
            document = ids[start : start + length]
            hashes[index] = int.from_bytes(hashlib.blake2b(document.tobytes(), digest_size=8).digest(), "little")
            start += length
        self._hashes.append(hashes)
        is_end = (ids == self._end_token_id) & (mask == 1)
        self.num_ends_trained += int((_sums(is_end, lengths) > 0).sum())

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Length of each document in tokens."""
        return np.concatenate(self._lengths)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row number of each document."""
        return np.concatenate(self._rows)

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Number of trained tokens of each document."""
        return np.concatenate(self._trained)

    @property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """64-bit hash of the prompt of each document."""
        return np.concatenate(self._prompt_hashes)

    @property
    def num_duplicates(self) -> int:
        """Number of documents that are equal to an earlier one."""
        hashes = np.concatenate(self._hashes)
        return len(hashes) - len(np.unique(hashes))

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return all token ids and masks, memory-mapped."""
        self._ids.flush()
        self._mask.flush()
        if not self._ids.tell():
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8)
        return np.memmap(self._ids_path, dtype=np.int32, mode="r"), np.memmap(self._mask_path, dtype=np.uint8, mode="r")

    def remove(self) -> None:
        """Delete the files."""
        self._ids_path.unlink(missing_ok=True)
        self._mask_path.unlink(missing_ok=True)


def _sums(
    flags: npt.NDArray[np.uint8] | npt.NDArray[np.bool_], lengths: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return the sum of the flags of each document; np.add.reduceat would be wrong for empty documents."""
    totals = np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))
    ends = np.cumsum(lengths, dtype=np.int64)
    sums: npt.NDArray[np.int64] = totals[ends] - totals[ends - lengths]
    return sums
