"""Where a training is in its data: the number of steps done, and a hash over every pack that they trained.

The number alone says what comes next. The hash says that what came before is what would come before again: the same
packs, in the same order, whatever machine dealt them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from launcher.training.run import Run


@dataclass(kw_only=True)
class Position:
    """Moves with the training."""

    step: int
    tokens_seen: int
    chain: str
    owes_evaluation: bool = False  # of the step that it stands behind

    def advance(self, packs: tuple[int, ...], num_tokens: int) -> None:
        self.step += 1
        self.owes_evaluation = False
        self.tokens_seen += num_tokens
        self.chain = hashlib.sha256(f"{self.chain}:{','.join(map(str, packs))}".encode()).hexdigest()


def find_position(run: Run, step: int) -> Position:
    """By going through the order from its beginning: a hundred thousand steps take about a second."""
    position = Position(step=0, tokens_seen=0, chain=hashlib.sha256(run.data_key.encode()).hexdigest())
    for index in range(step):
        packs = run.order.packs_of(index)
        position.advance(packs, int(run.train.num_tokens[list(packs)].sum()))
    return position
