"""Batched generation with the prompt template, stop sequences and sampling of the expert's manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from launcher.base_models.shapes import ModelShape
from launcher.core.errors import InputError
from launcher.corpus.documents import make_planned_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.templates import Template
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer, load_planned_tokenizer
from launcher.manifest.model import Decoding
from launcher.plan.model import Plan
from launcher.request.request import base_folders
from launcher.training.inference.graphed_decoding import graphed_decoding, make_static_cache
from launcher.training.inference.load import (
    get_base_dtype,
    get_published_dtype,
    load_published_base,
    load_trained_model,
    pick_device,
    pick_dtype,
)
from launcher.training.inference.prompt import compose_question, render_prompt
from launcher.training.inference.trained_run import TrainedRun
from launcher.training.runtime.process_output import silence_transformers

_MAX_GPU_BATCH, _CPU_BATCH = 256, 16
_KEY_AND_VALUE = 2
_MAX_PADDING, _SHORT_PROMPT = 4, 64  # longest prompt of a batch by its shortest; one long document would pad them all
_MEMORY_SHARE = 0.5  # of the free GPU memory
_HIDDEN_STATES, _WIDE_STATES = 6, 4  # tensors of hidden_size, and of the widest layer, that a prefill holds at a time

End = Literal["end token", "stop sequence", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A generated answer."""

    text: str
    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    end: End


def answer_question(
    run: TrainedRun,
    question: str,
    context: str,
    *,
    max_new_tokens: int,
    fields: Mapping[str, str] | None = None,
    prompt: str = "",
) -> Answer:
    """Load a trained expert and answer one question; `fields` are values of the fields of its prompt.

    A rendered `prompt` replaces question, context and fields.
    """
    silence_transformers()
    tokenizer = load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder)))
    template = make_planned_template(run.plan.data, tokenizer)
    if not prompt:
        asked = compose_question(run.plan.data, question, context, fields or {})
        prompt = render_prompt(
            template, asked.content, context=asked.context, system=asked.system, history=asked.history
        )
    room = run.plan.base.max_positions - len(TextEncoder(tokenizer, template).encode_prompt(prompt))
    if room < 1:
        raise InputError(
            f"the prompt has {run.plan.base.max_positions - room:,} tokens, more than {run.plan.base.name} has "
            f"positions ({run.plan.base.max_positions:,})",
            hint="use a shorter --input",
        )
    decoding = run.manifest.training.decoding or Decoding()
    generator = load_generator(
        load_for_generation(run), run.plan, decoding=decoding, max_new_tokens=min(max_new_tokens, room), batch_size=1
    )
    (answer,) = generator.generate([prompt])
    return answer


def load_for_generation(run: TrainedRun) -> Any:
    """Load base and adapter, on the GPU if they fit, quantized as trained if there is a GPU."""
    dtype = get_published_dtype(run)
    quantized = run.plan.quantization is not None and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if quantized else pick_device(run.plan, dtype)
    dtype = pick_dtype(run.plan, dtype, device)
    return load_trained_model(run, dtype, device, quantized=quantized, casts_adapter=True)


def load_base_for_generation(plan: Plan) -> Any:
    """Load the base without an adapter."""
    dtype = get_base_dtype(plan)
    device = pick_device(plan, dtype)
    return load_published_base(plan, pick_dtype(plan, dtype, device), device)


def load_generator(
    model: Any, plan: Plan, *, decoding: Decoding, max_new_tokens: int, batch_size: int | None
) -> Generator:
    """Build a generator with the tokenizer from the base's folder."""
    tokenizer = load_planned_tokenizer(plan, base_folders(Path(plan.data.folder)))
    return Generator(
        model,
        plan,
        tokenizer,
        make_planned_template(plan.data, tokenizer),
        decoding=decoding,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        use_graphs=True,
    )


class Generator:
    """Generator of answers in batches: longest prompts first, padded on the left, with a KV cache."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        tokenizer: BaseTokenizer,
        template: Template,
        *,
        decoding: Decoding,
        max_new_tokens: int,
        batch_size: int | None,
        on_token: Callable[[], None] = lambda: None,
        ignore_eos: bool = False,
        use_graphs: bool = False,
    ) -> None:
        """Prepare a generator that ends answers at the training's end token, unless `ignore_eos`.

        Without `batch_size`, free memory decides. `use_graphs` captures CUDA graphs of decode steps, which
        need memory of their own.
        """
        self._tokenizer, self._decoding, self._seed = tokenizer, decoding, plan.schedule.seed
        self._encoder, self._unescape = TextEncoder(tokenizer, template), template.controls.unescape
        self._batch_size, self._base, self._use_graphs = batch_size, plan.base, use_graphs
        eos_ids = _collect_eos_ids(tokenizer, template.end_token, decoding.stop_sequences)
        self._config = build_generation_config(decoding, eos_ids, max_new_tokens)
        if ignore_eos:
            self._config.min_new_tokens = max_new_tokens
        self._on_token = on_token
        self._model: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def generate(
        self,
        prompts: Sequence[str],
        advance: Callable[[int, str], None] = lambda _count, _detail: None,
        max_new_tokens: int | None = None,
    ) -> list[Answer]:
        """Return an answer per prompt. `advance` is called with the number of finished answers and a progress text.

        `max_new_tokens` replaces the limit of this generator, also for later calls.
        """
        if max_new_tokens is not None:
            self._config.max_new_tokens = max_new_tokens
        # A prompt that is too long loses its beginning.
        room = self._base.max_positions - int(self._config.max_new_tokens)
        ids = [self._encoder.encode_prompt(prompt)[-max(1, room) :] for prompt in prompts]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
        answers: dict[int, Answer] = {}
        # Options of the base's generation_config, such as a repetition penalty, would fill in what we leave unset.
        published, self._model.generation_config = self._model.generation_config, self._config
        try:
            while order:
                longest = len(ids[order[0]])
                batch = order[: self._batch_size or self._choose_batch_size(longest)]
                batch = [index for index in batch if longest <= _MAX_PADDING * max(len(ids[index]), _SHORT_PROMPT)]
                generated = self._try_batch([ids[index] for index in batch], advance)
                for index, tokens in zip(batch, generated, strict=False):
                    answers[index] = self._decode(tokens, prompts[index], len(ids[index]))
                order = order[len(generated) :]
                advance(len(generated), "")
        finally:
            self._model.generation_config = published
        return [answers[index] for index in range(len(prompts))]

    def _choose_batch_size(self, longest: int) -> int:
        """Return how many rows fit the free memory: their prefill, with its mask, and their KV cache."""
        if self._model.device.type == "cpu":
            return _CPU_BATCH
        free, _ = torch.cuda.mem_get_info(self._model.device)
        row = count_row_bytes(self._base, self._model.dtype.itemsize, longest, int(self._config.max_new_tokens))
        return max(1, min(_MAX_GPU_BATCH, int(_MEMORY_SHARE * free) // row))

    def _try_batch(self, ids: Sequence[list[int]], advance: Callable[[int, str], None]) -> list[list[int]]:
        """Generate a batch, or after CUDA out of memory only its first rows, unless the batch size is fixed or 1."""
        try:
            return self._generate_batch(ids, advance)
        except torch.OutOfMemoryError:
            if self._batch_size is not None or len(ids) == 1:
                raise
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()  # for a CUDA graph that still runs, as in engine/cuda_graph.py
            torch.cuda.empty_cache()
        return self._try_batch(ids[: len(ids) // 2], advance)

    def _generate_batch(self, ids: Sequence[list[int]], advance: Callable[[int, str], None]) -> list[list[int]]:
        numbers = count(1)

        def on_token() -> None:
            self._on_token()
            advance(0, f"token {next(numbers):,} of at most {self._config.max_new_tokens:,} for the next {len(ids)}")

        width = max(map(len, ids))
        pad = int(self._config.pad_token_id)
        inputs = torch.full((len(ids), width), pad, device=self._model.device)
        mask = torch.zeros_like(inputs)
        for row, tokens in enumerate(ids):
            inputs[row, width - len(tokens) :] = torch.tensor(tokens, device=self._model.device)
            mask[row, width - len(tokens) :] = 1
        stop = StopSequenceCriteria(self._tokenizer, self._decoding.stop_sequences, width, on_token)
        cache = None
        if self._use_graphs:
            cache = make_static_cache(self._model, width + int(self._config.max_new_tokens), self._config)
        torch.manual_seed(self._seed)
        with torch.inference_mode(), graphed_decoding(self._model) as graphed:
            out = self._model.generate(
                input_ids=inputs,
                attention_mask=mask,
                generation_config=self._config,
                stopping_criteria=StoppingCriteriaList([stop]),
                **({} if cache is None else {"past_key_values": cache}),
            )
        self._use_graphs = self._use_graphs and not graphed.has_failed
        return [self._cut(row) for row in out[:, width:].tolist()]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens without the padding after the end token."""
        eos_ids: Any = self._config.eos_token_id
        first = next((index for index, token in enumerate(tokens) if token in eos_ids), None)
        return tokens if first is None else tokens[: first + 1]

    def _decode(self, tokens: list[int], prompt: str, num_prompt_tokens: int) -> Answer:
        eos_ids: Any = self._config.eos_token_id
        end: End = "end token" if tokens and tokens[-1] in eos_ids else "length"
        text = self._tokenizer.backend.decode(tokens, skip_special_tokens=True)
        sequences = self._decoding.stop_sequences
        cuts = [position for sequence in sequences if sequence and (position := text.find(sequence)) >= 0]
        if cuts:
            text, end = text[: min(cuts)], "stop sequence"
        prompt = self._unescape(prompt)
        return Answer(text=text, prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_tokens=len(tokens), end=end)


def count_row_bytes(base: ModelShape, bytes_per_element: int, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return the bytes that a row of a batch needs: KV cache, prefill, and the prefill's mask."""
    num_tokens = num_prompt_tokens + max_new_tokens
    widest = max(linear.out_features for linear in base.linears)
    prefill = num_prompt_tokens * (_HIDDEN_STATES * base.hidden_size + _WIDE_STATES * widest)
    mask = num_prompt_tokens * num_tokens
    return count_cache_bytes(base, bytes_per_element) * num_tokens + bytes_per_element * (prefill + mask)


def count_cache_bytes(base: ModelShape, bytes_per_element: int) -> int:
    """Return the size of the KV cache per token, and of the keys and values that SDPA repeats for one layer."""
    heads = base.num_layers * base.num_kv_heads + 2 * base.num_heads
    return _KEY_AND_VALUE * heads * base.head_dim * bytes_per_element


def build_generation_config(decoding: Decoding, eos_ids: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """Return a greedy config, unless the manifest sets a temperature or an option of sampling."""
    do_sample = uses_sampling(decoding)
    sampling: dict[str, Any] = {}
    if do_sample:
        sampling = {"temperature": decoding.temperature or 1.0, "top_k": 0, **_sampling_filters(decoding)}
    return GenerationConfig(
        do_sample=do_sample,
        eos_token_id=list(eos_ids),
        pad_token_id=eos_ids[0],
        max_new_tokens=max_new_tokens,
        **sampling,
    )


def uses_sampling(decoding: Decoding) -> bool:
    """Return whether the manifest requests sampling."""
    return decoding.temperature > 0 if decoding.temperature is not None else bool(_sampling_filters(decoding))


def _sampling_filters(decoding: Decoding) -> dict[str, Any]:
    filters = {"top_p": decoding.top_p, "top_k": decoding.top_k, "min_p": decoding.min_p}
    return {name: value for name, value in filters.items() if value}


def _collect_eos_ids(tokenizer: BaseTokenizer, end_token: str, stop_sequences: Sequence[str] = ()) -> list[int]:
    """Return the ids of all end tokens: the template's, the base's, and stop sequences that are special tokens."""
    special = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special}
    stops = [tokenizer.backend.token_to_id(stop) for stop in stop_sequences if stop in special]
    return list(dict.fromkeys([*collect_end_ids(tokenizer, end_token), *(stop for stop in stops if stop is not None)]))


class StopSequenceCriteria(StoppingCriteria):
    """Criterion that stops each row at the manifest's stop sequences, which need not align with tokens."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        sequences: Sequence[str],
        num_prompt_tokens: int,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_token = on_token
        self._tokenizer, self._sequences, self._start = tokenizer, tuple(filter(None, sequences)), num_prompt_tokens
        # A token has at least one byte, so only this many of the last ones can contain a stop sequence.
        self._max_tokens = 4 + max((len(sequence.encode()) for sequence in self._sequences), default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **_more: Any) -> Any:  # noqa: ARG002
        """Return which rows contain a stop sequence."""
        self._on_token()
        if not self._sequences:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        first = max(self._start, input_ids.shape[1] - self._max_tokens)
        texts = self._tokenizer.backend.decode_batch(input_ids[:, first:].tolist())
        stops = [any(sequence in text for sequence in self._sequences) for text in texts]
        return torch.tensor(stops, dtype=torch.bool, device=input_ids.device)
