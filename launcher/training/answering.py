"""Generates an answer: prompt, stops and sampling as the expert's manifest and template have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from launcher.corpus.documents import make_template
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.errors import InputError
from launcher.inputs import base_folders
from launcher.manifest.metadata import Decoding
from launcher.plan.model import Plan
from launcher.training.finished import FinishedRun
from launcher.training.prompts import make_prompt
from launcher.training.quiet import quiet_transformers
from launcher.training.reloading import (
    find_dtype_of_base,
    find_published_dtype,
    load_expert,
    load_published_base,
    pick_device,
)

_GPU_BATCH, _CPU_BATCH = 64, 16

End = Literal["end token", "stop sequence", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    text: str
    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    end: End


def answer_question(run: FinishedRun, question: str, context: str, max_new_tokens: int) -> Answer:
    quiet_transformers()
    tokenizer = load_tokenizer(run.plan.base.name, base_folders(Path(run.plan.data.folder)))
    template = make_template(run.plan.data.prompt_template, tokenizer)
    prompt = make_prompt(template, question, context=context)
    room = run.plan.base.max_positions - len(encode(tokenizer, prompt))
    if room < 1:
        raise InputError(
            f"the prompt has {run.plan.base.max_positions - room:,} tokens, more than {run.plan.base.name} has "
            f"positions ({run.plan.base.max_positions:,})",
            hint="ask with a shorter --input",
        )
    decoding = run.manifest.training.decoding or Decoding()
    generator = load_generator(
        load_generating(run), run.plan, decoding=decoding, max_new_tokens=min(max_new_tokens, room), batch_size=1
    )
    (answer,) = generator.answer([prompt])
    return answer


def encode(tokenizer: BaseTokenizer, prompt: str) -> list[int]:
    """As the corpus does: the prompt by itself, special tokens only where the template writes them."""
    ids: list[int] = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    return ids


def load_generating(run: FinishedRun) -> Any:
    dtype = find_published_dtype(run)
    quantized = run.plan.quantization is not None and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if quantized else pick_device(run.plan, dtype)
    return load_expert(run, dtype, device, quantized=quantized)


def load_base_alone(plan: Plan) -> Any:
    dtype = find_dtype_of_base(plan)
    return load_published_base(plan, dtype, pick_device(plan, dtype))


def load_generator(
    model: Any, plan: Plan, *, decoding: Decoding, max_new_tokens: int, batch_size: int | None
) -> Generator:
    """Of a trained expert, with the tokenizer that lies beside its base."""
    tokenizer = load_tokenizer(plan.base.name, base_folders(Path(plan.data.folder)))
    return make_generator(
        model,
        plan,
        tokenizer=tokenizer,
        end_token=make_template(plan.data.prompt_template, tokenizer).end_token,
        decoding=decoding,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )


def make_generator(
    model: Any,
    plan: Plan,
    *,
    tokenizer: BaseTokenizer,
    end_token: str,
    decoding: Decoding,
    max_new_tokens: int,
    batch_size: int | None,
    on_token: Callable[[], None] = lambda: None,
    to_the_end: bool = False,
) -> Generator:
    """Ends answers where training ended them, unless they shall have all tokens that are allowed."""
    return Generator(
        model,
        tokenizer,
        decoding=decoding,
        ends=_find_ends(tokenizer, end_token),
        max_new_tokens=max_new_tokens,
        max_positions=plan.base.max_positions,
        seed=plan.schedule.seed,
        batch_size=batch_size or (_GPU_BATCH if next(model.parameters()).is_cuda else _CPU_BATCH),
        on_token=on_token,
        to_the_end=to_the_end,
    )


class Generator:
    """Answers prompts, many at a time: the longest first, padded on the left, with a cache of keys and values."""

    def __init__(
        self,
        model: Any,
        tokenizer: BaseTokenizer,
        *,
        decoding: Decoding,
        ends: Sequence[int],
        max_new_tokens: int,
        max_positions: int,
        seed: int,
        batch_size: int,
        on_token: Callable[[], None],
        to_the_end: bool,
    ) -> None:
        self._tokenizer, self._decoding, self._seed = tokenizer, decoding, seed
        self._batch_size, self._max_positions = batch_size, max_positions
        self._config = make_generation(decoding, ends, max_new_tokens)
        if to_the_end:
            self._config.min_new_tokens = max_new_tokens
        self._on_token = on_token
        self._model: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def answer(self, prompts: Sequence[str], advance: Callable[[int], None] = lambda _count: None) -> list[Answer]:
        # Of a prompt that is too long its end is kept: there the answer begins.
        room = self._max_positions - int(self._config.max_new_tokens)
        ids = [encode(self._tokenizer, prompt)[-max(1, room) :] for prompt in prompts]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
        answers: dict[int, Answer] = {}
        # What the base was published with, such as a penalty for repeating, would fill in what we leave open.
        published, self._model.generation_config = self._model.generation_config, self._config
        try:
            for start in range(0, len(order), self._batch_size):
                batch = order[start : start + self._batch_size]
                for index, tokens in zip(batch, self._generate([ids[index] for index in batch]), strict=True):
                    answers[index] = self._read(tokens, prompts[index], len(ids[index]))
                advance(len(batch))
        finally:
            self._model.generation_config = published
        return [answers[index] for index in range(len(prompts))]

    def _generate(self, ids: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, ids))
        pad = int(self._config.pad_token_id)
        inputs = torch.full((len(ids), width), pad, device=self._model.device)
        mask = torch.zeros_like(inputs)
        for row, tokens in enumerate(ids):
            inputs[row, width - len(tokens) :] = torch.tensor(tokens, device=self._model.device)
            mask[row, width - len(tokens) :] = 1
        stop = StopAtText(self._tokenizer, self._decoding.stop_sequences, width, self._on_token)
        torch.manual_seed(self._seed)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=inputs,
                attention_mask=mask,
                generation_config=self._config,
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        return [self._cut(row) for row in out[:, width:].tolist()]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Behind its end a row is filled up until the others have ended, too."""
        ends: Any = self._config.eos_token_id
        first = next((index for index, token in enumerate(tokens) if token in ends), None)
        return tokens if first is None else tokens[: first + 1]

    def _read(self, tokens: list[int], prompt: str, num_prompt_tokens: int) -> Answer:
        ends: Any = self._config.eos_token_id
        end: End = "end token" if tokens and tokens[-1] in ends else "length"
        text = self._tokenizer.backend.decode(tokens, skip_special_tokens=True)
        sequences = self._decoding.stop_sequences
        cuts = [position for sequence in sequences if sequence and (position := text.find(sequence)) >= 0]
        if cuts:
            text, end = text[: min(cuts)], "stop sequence"
        return Answer(text=text, prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_tokens=len(tokens), end=end)


def make_generation(decoding: Decoding, ends: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """Greedy unless the manifest asks for sampling: by a temperature, or by what only sampling has."""
    does_sample = samples(decoding)
    sampling: dict[str, Any] = {}
    if does_sample:
        sampling = {"temperature": decoding.temperature or 1.0, "top_k": 0, **_narrowed(decoding)}
    return GenerationConfig(
        do_sample=does_sample,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        max_new_tokens=max_new_tokens,
        **sampling,
    )


def samples(decoding: Decoding) -> bool:
    return decoding.temperature > 0 if decoding.temperature is not None else bool(_narrowed(decoding))


def _narrowed(decoding: Decoding) -> dict[str, Any]:
    given = {"top_p": decoding.top_p, "top_k": decoding.top_k, "min_p": decoding.min_p}
    return {name: value for name, value in given.items() if value}


def _find_ends(tokenizer: BaseTokenizer, end_token: str) -> list[int]:
    """Where training ended answers; and the base's own end of text, behind which nothing comes."""
    names = (end_token, tokenizer.end_of_text)
    found = (tokenizer.backend.token_to_id(name) for name in names if name is not None)
    return list(dict.fromkeys(token for token in found if token is not None))


class StopAtText(StoppingCriteria):
    """The manifest's stop sequences: text, which tokens need not line up with. Row by row."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        sequences: Sequence[str],
        num_prompt_tokens: int,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_token = on_token
        self._tokenizer, self._sequences, self._start = tokenizer, tuple(filter(None, sequences)), num_prompt_tokens
        # A token has at least a byte: more than so many of the last ones cannot matter.
        self._reach = 4 + max((len(sequence.encode()) for sequence in self._sequences), default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **_more: Any) -> Any:  # noqa: ARG002
        self._on_token()
        if not self._sequences:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        first = max(self._start, input_ids.shape[1] - self._reach)
        texts = self._tokenizer.backend.decode_batch(input_ids[:, first:].tolist())
        stops = [any(sequence in text for sequence in self._sequences) for text in texts]
        return torch.tensor(stops, dtype=torch.bool, device=input_ids.device)
