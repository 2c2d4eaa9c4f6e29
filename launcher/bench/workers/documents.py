"""Synthetic training data for benchmarks: random documents, packed like real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.corpus.bin_packing import pack_documents
from launcher.corpus.pack_file import write_packs
from launcher.corpus.store import Store, publish
from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import TokenBatch

_SHORTEST, _SPREAD = 16, 0.8
_SURPLUS = 1.15  # more documents than fill the packs: some are truncated to the length of a pack


def write_random_store(
    folder: Path, *, num_packs: int, sequence_length: int, vocab_size: int, mean_tokens: int
) -> Store:
    """Write prepared data of random documents of log-normal lengths; all but their first tokens count in the loss."""
    rng = np.random.default_rng(0)
    count = int(num_packs * sequence_length / min(mean_tokens, sequence_length) * _SURPLUS) + 8
    samples = rng.lognormal(np.log(mean_tokens) - _SPREAD**2 / 2, _SPREAD, count)
    lengths = np.clip(samples, _SHORTEST, sequence_length).astype(np.int32)
    ids = rng.integers(0, vocab_size, int(lengths.sum()), dtype=np.int32)
    trained = np.ones(len(ids), dtype=np.uint8)
    trained[np.cumsum(lengths) - lengths] = 0
    batch = TokenBatch(
        input_ids=ids,
        trained=trained,
        lengths=lengths,
        rows=np.arange(count, dtype=np.int64),
        prompt_hashes=np.zeros(count, dtype=np.uint64),
        excess=np.zeros(count, dtype=np.int64),
    )
    scratch, output = folder / "scratch", folder / "made"
    scratch.mkdir()
    output.mkdir()
    with TokenSpool(scratch, "train", end_token_id=0) as spool:
        spool.add(batch)
        write_packs(output / "train.arrow", spool, pack_documents(lengths, sequence_length, 0))
    return publish(output, folder, "benchmark", {"benchmark": "random"})
