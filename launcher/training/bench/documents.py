"""Random documents, packed as real ones are: what a benchmark trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.corpus.pack import pack_tightest
from launcher.corpus.packs import write_packs
from launcher.corpus.spool import Spool
from launcher.corpus.store import Store, publish
from launcher.corpus.tokenise import TokenBatch

_SHORTEST, _SPREAD = 16, 0.8
_MORE = 1.15  # documents than would fill the packs: some are cut to the length of a pack


def write_random_store(
    folder: Path, *, num_packs: int, sequence_length: int, vocab_size: int, mean_tokens: int
) -> Store:
    """Lengths are log-normal, as those of real rows are; all but each first token are trained."""
    rng = np.random.default_rng(0)
    count = int(num_packs * sequence_length / min(mean_tokens, sequence_length) * _MORE) + 8
    drawn = rng.lognormal(np.log(mean_tokens) - _SPREAD**2 / 2, _SPREAD, count)
    lengths = np.clip(drawn, _SHORTEST, sequence_length).astype(np.int32)
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
    scratch, made = folder / "scratch", folder / "made"
    scratch.mkdir()
    made.mkdir()
    with Spool(scratch, "train", end_token_id=0) as spool:
        spool.add(batch)
        write_packs(made / "train.arrow", spool, pack_tightest(lengths, sequence_length, 0))
    return publish(made, folder, "benchmark", {"benchmark": "random"})
