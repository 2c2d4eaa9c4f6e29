"""How many tokens generated answers may have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.core.log import get_logger
from launcher.corpus.documents import make_planned_template
from launcher.corpus.heldout import HeldOutRow
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.plan.model import Plan

log = get_logger(__name__)

DEFAULT_NEW_TOKENS = 512
_LENGTH_MARGIN = 1.25  # an answer may be longer than the longest reference, but an endless loop must stop


def allow_longer(longest_reference: int) -> int:
    """Return somewhat more tokens than the longest reference answer has."""
    return math.ceil(_LENGTH_MARGIN * longest_reference) + 8


def choose_new_tokens(
    rows: Sequence[HeldOutRow], tokenizer: BaseTokenizer, plan: Plan, requested: int | None = None
) -> list[int]:
    """Return how many tokens each answer may have: 512, or for longer reference answers 1,024, 2,048 and so on.

    More than the sequence length of the training, or than the base has positions after the longest prompt, are not
    allowed. Logs how many references are longer.
    """
    encoder = TextEncoder(tokenizer, make_planned_template(plan.data, tokenizer))
    references = [len(encoder.encode_prompt(row.answer)) for row in rows]
    room = plan.base.max_positions - max(len(encoder.encode_prompt(row.prompt)) for row in rows)
    room = requested or max(DEFAULT_NEW_TOKENS, min(room, plan.batch.sequence_length))
    chosen = [requested or min(room, _round_up(allow_longer(reference))) for reference in references]
    num_longer = sum(reference > limit for reference, limit in zip(references, chosen, strict=True))
    if num_longer:
        limit = "set by --max-new-tokens" if requested else "by the sequence length and the base's context"
        log.info(
            f"note: {num_longer:,} of {len(rows):,} reference answers are longer than the limit of {room:,} tokens, "
            f"{limit}: such answers are truncated and count as wrong"
        )
    return chosen


def _round_up(num_tokens: int) -> int:
    """Return the default limit, doubled until it is at least `num_tokens`, so that few limits occur."""
    return DEFAULT_NEW_TOKENS * 2 ** max(0, math.ceil(math.log2(num_tokens / DEFAULT_NEW_TOKENS)))
