"""The live model, asked in the midst of its training: it answers as a published one would, and nothing of it stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from launcher.corpus.preparation import Preparation
from launcher.errors import RunFailedError, first_line
from launcher.manifest.metadata import Decoding
from launcher.training.answering import Answer, encode, make_generator
from launcher.training.layers import uncompiled
from launcher.training.loading import caps_scores

if TYPE_CHECKING:
    from launcher.training.run import Run

_MOST_AT_ONCE = 64
_KEY_AND_VALUE = 2
_BEAT_SECONDS = 5.0


class StoppedError(Exception):
    """The run was asked to stop: there may be little time."""

    def __str__(self) -> str:
        return "the run was asked to stop"


class Asker:
    """Of one rank. It never raises for what a model, its memory or a tokenizer does: other ranks wait for this one."""

    def __init__(self, run: Run, wanted: Preparation, decoding: Decoding, stops: Callable[[], bool]) -> None:
        self._run, self._decoding, self._stops = run, decoding, stops
        self._tokenizer, self._end_token = wanted.tokenizer, wanted.template.end_token
        self.at_once = _MOST_AT_ONCE  # fewer once memory ran out

    def count_tokens(self, text: str) -> int:
        return len(encode(self._tokenizer, text))

    def bound(self, prompts: Sequence[str], max_new_tokens: int) -> None:
        """No more than a micro-batch has tokens, and keys and values no larger than what its activations take."""
        plan, base = self._run.plan, self._run.plan.base
        longest = max(map(self.count_tokens, prompts)) + max_new_tokens
        tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
        kept = _KEY_AND_VALUE * base.num_layers * base.num_kv_heads * base.head_dim * 4  # FP32 at most
        activations = plan.memory.activation_bytes  # none: a rung of the ladder counts them with the rest
        if self._run.engine.graphs is not None:  # its memory stays its own: the rest of the card is counted on
            activations = max(1, plan.memory.free_bytes - plan.memory.total_bytes)
        if self._run.engine.device.type == "cuda" and activations:
            tokens = min(tokens, activations // kept)
        self.at_once = max(1, min(self.at_once, tokens // min(longest, base.max_positions)))

    def answer(self, prompts: Sequence[str], max_new_tokens: int, *, to_the_end: bool = False) -> list[Answer] | str:
        """Or why not. `to_the_end`: of all tokens that are allowed, for timing."""
        while True:
            try:
                return self._answer(prompts, max_new_tokens, to_the_end)
            except AttentionLostError:
                raise
            except torch.OutOfMemoryError:
                if self.at_once == 1:
                    return "memory ran out"
            except Exception as error:
                return first_line(error)
            self.at_once //= 2
            torch.cuda.empty_cache()

    def _answer(self, prompts: Sequence[str], max_new_tokens: int, to_the_end: bool) -> list[Answer]:
        run = self._run
        generator = make_generator(
            run.engine.module.model,
            run.plan,
            tokenizer=self._tokenizer,
            end_token=self._end_token,
            decoding=self._decoding,
            max_new_tokens=max_new_tokens,
            batch_size=self.at_once,
            on_token=self._on_token,
            to_the_end=to_the_end,
        )
        with answering(run):
            return generator.answer(prompts)

    def _on_token(self) -> None:
        self._run.pulse.beat("evaluating")
        if self._stops():
            raise StoppedError


@contextmanager
def answering(run: Run) -> Iterator[None]:
    """Its own attention, no graphs, other random numbers, no warnings; then all is as before, or the run ends."""
    engine = run.engine
    base: Any = engine.module.base
    before = find_attentions(base)
    devices = [engine.device] if engine.device.type == "cuda" else []
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        base.set_attn_implementation("eager" if caps_scores(base.config) else "sdpa")
        with engine.evaluating(), uncompiled(), torch.random.fork_rng(devices=devices), engine.accelerator.autocast():
            yield
    finally:
        logging.set_verbosity(verbosity)
        for config, name in before:
            config._attn_implementation = name
        if [name for _, name in find_attentions(base)] != [name for _, name in before]:
            raise AttentionLostError("attention is not what it was before the expert was asked")


class AttentionLostError(RunFailedError):
    """Training on would train something else: it must not be taken for one more thing that went wrong on the way."""


def find_attentions(base: Any) -> list[tuple[Any, str]]:
    """Of every part of the model that has a configuration of its own, each once."""
    configs = {id(part.config): part.config for part in base.modules() if hasattr(part, "config")}
    configs[id(base.config)] = base.config
    return [(config, config._attn_implementation) for config in configs.values() if _has_attention(config)]


def _has_attention(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) is not None


@contextmanager
def kept_alive(run: Run) -> Iterator[None]:
    """While a judge judges, or another rank waits for it: that has limits of its own, and the watchdog's is another."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            run.pulse.beat("evaluating")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
