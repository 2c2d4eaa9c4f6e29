"""Generate answers with the model that is being trained, and restore its attention backend, mode and RNG state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from launcher.core.choices import DTYPE_BYTES
from launcher.core.errors import RunFailedError, first_line
from launcher.corpus.spec import PreparationSpec
from launcher.corpus.text_encoder import TextEncoder
from launcher.manifest.model import Decoding
from launcher.training.inference.generate import Answer, Generator, count_cache_bytes
from launcher.training.model.base_model import needs_eager_attention
from launcher.training.model.compile_checkpoint import compile_disabled

if TYPE_CHECKING:
    from launcher.training.engine.run import TrainingRun

_MAX_BATCH_SIZE = 64


class TaskEvalError(Exception):
    """Answers cannot be generated or judged. The training continues without these task metrics."""


class EvalInterruptedError(TaskEvalError):
    """The evaluation was interrupted because the run is stopping."""


class AttentionNotRestoredError(RunFailedError):
    """The training's attention backend could not be restored after generation; the run must end."""


class LiveGenerator:
    """Generator of one rank. Errors of model, memory or tokenizer become TaskEvalErrors, which other ranks receive."""

    def __init__(
        self, run: TrainingRun, spec: PreparationSpec, decoding: Decoding, is_stopping: Callable[[], bool]
    ) -> None:
        self._run, self._decoding, self._is_stopping = run, decoding, is_stopping
        self._tokenizer, self._template = spec.tokenizer, spec.template
        self.batch_size = _MAX_BATCH_SIZE  # halved after an out-of-memory error

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self._tokenizer, self._template)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._encoder.encode_prompt(text))

    def limit_batch_size(self, prompts: Sequence[str], max_new_tokens: int) -> None:
        """Limit the batch to a micro-batch's number of tokens, and its KV cache to the activations' memory."""
        plan, base = self._run.plan, self._run.plan.base
        longest = max(map(self.count_tokens, prompts)) + max_new_tokens
        tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
        bytes_per_token = count_cache_bytes(base, DTYPE_BYTES["fp32"])  # at most
        activations = plan.memory.activation_bytes  # 0 after an OOM fallback, which estimates only the total
        if self._run.engine.graphs is not None:  # CUDA graphs keep their memory: only the rest of the GPU is free
            activations = max(1, plan.memory.free_bytes - plan.memory.total_bytes)
        if self._run.engine.device.type == "cuda" and activations:
            tokens = min(tokens, activations // bytes_per_token)
        self.batch_size = max(1, min(self.batch_size, tokens // min(longest, base.max_positions)))

    def generate(self, prompts: Sequence[str], max_new_tokens: int, *, ignore_eos: bool = False) -> list[Answer]:
        """Generate answers, in smaller batches after CUDA out of memory. With `ignore_eos`, only the limit ends one."""
        while True:
            try:
                return self._generate(prompts, max_new_tokens, ignore_eos)
            except (AttentionNotRestoredError, TaskEvalError):
                raise
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise TaskEvalError("CUDA out of memory") from None
            except Exception as error:
                raise TaskEvalError(first_line(error)) from error
            self.batch_size //= 2
            torch.cuda.empty_cache()

    def _generate(self, prompts: Sequence[str], max_new_tokens: int, ignore_eos: bool) -> list[Answer]:
        run = self._run
        generator = Generator(
            run.engine.module.model,
            run.plan,
            self._tokenizer,
            self._template,
            decoding=self._decoding,
            max_new_tokens=max_new_tokens,
            batch_size=self.batch_size,
            on_token=self._on_token,
            ignore_eos=ignore_eos,
        )
        with generation_mode(run):
            return generator.generate(prompts)

    def _on_token(self) -> None:
        self._run.heartbeat.beat("evaluating")
        if self._is_stopping():
            raise EvalInterruptedError("the run is stopping")


@contextmanager
def generation_mode(run: TrainingRun) -> Iterator[None]:
    """Use transformers' own attention, without torch.compile and warnings; restore all and the RNG state at the end."""
    engine = run.engine
    base: Any = engine.module.base
    before = collect_attention_configs(base)
    devices = [engine.device] if engine.device.type == "cuda" else []
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        base.set_attn_implementation("eager" if needs_eager_attention(base.config) else "sdpa")
        fork_rng, autocast = torch.random.fork_rng(devices=devices), engine.accelerator.autocast()
        with engine.eval_mode(), compile_disabled(), fork_rng, autocast:
            yield
    finally:
        logging.set_verbosity(verbosity)
        for config, name in before:
            config._attn_implementation = name
        if [name for _, name in collect_attention_configs(base)] != [name for _, name in before]:
            raise AttentionNotRestoredError("the attention backend of the training was not restored after evaluation")


def collect_attention_configs(base: Any) -> list[tuple[Any, str]]:
    """Return all configs within the model that name an attention implementation, each with the name."""
    configs = {id(part.config): part.config for part in base.modules() if hasattr(part, "config")}
    configs[id(base.config)] = base.config
    names = ((config, getattr(config, "_attn_implementation", None)) for config in configs.values())
    return [(config, name) for config, name in names if name is not None]
