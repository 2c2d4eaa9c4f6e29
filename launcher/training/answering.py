"""Generates an answer: prompt, stops and sampling as the expert's manifest and template have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from launcher.corpus.documents import make_template
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.errors import InputError
from launcher.inputs import base_folders
from launcher.manifest.metadata import Decoding
from launcher.training.finished import FinishedRun
from launcher.training.prompts import make_prompt
from launcher.training.reloading import find_published_dtype, load_expert, pick_device

End = Literal["end token", "stop sequence", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    text: str
    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    end: End


def answer_question(run: FinishedRun, question: str, context: str, max_new_tokens: int) -> Answer:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(run.plan.base.name, base_folders(Path(run.plan.data.folder)))
    template = make_template(run.plan.data.prompt_template, tokenizer)
    prompt = make_prompt(template, question, context=context)
    # As the corpus does: the prompt by itself, special tokens only where the template writes them.
    ids = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    room = run.plan.base.max_positions - len(ids)
    if room < 1:
        raise InputError(
            f"the prompt has {len(ids):,} tokens, more than {run.plan.base.name} has positions "
            f"({run.plan.base.max_positions:,})",
            hint="ask with a shorter --input",
        )
    decoding = run.manifest.training.decoding or Decoding()
    config = make_generation(decoding, _find_ends(tokenizer, template.end_token), min(max_new_tokens, room))
    tokens = _generate(run, ids, config, StopAtText(tokenizer, decoding.stop_sequences, len(ids)))
    return _read(tokenizer, tokens, prompt, len(ids), config, decoding.stop_sequences)


def make_generation(decoding: Decoding, ends: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """Greedy unless the manifest asks for sampling: by a temperature, or by what only sampling has."""
    narrowed = {"top_p": decoding.top_p, "top_k": decoding.top_k, "min_p": decoding.min_p}
    given = {name: value for name, value in narrowed.items() if value}
    samples = decoding.temperature > 0 if decoding.temperature is not None else bool(given)
    sampling: dict[str, Any] = {"temperature": decoding.temperature or 1.0, "top_k": 0, **given} if samples else {}
    return GenerationConfig(
        do_sample=samples,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        max_new_tokens=max_new_tokens,
        **sampling,
    )


def _find_ends(tokenizer: BaseTokenizer, end_token: str) -> list[int]:
    """Where training ended answers; and the base's own end of text, behind which nothing comes."""
    names = (end_token, tokenizer.end_of_text)
    found = (tokenizer.backend.token_to_id(name) for name in names if name is not None)
    return list(dict.fromkeys(token for token in found if token is not None))


class StopAtText(StoppingCriteria):
    """The manifest's stop sequences: text, which tokens need not line up with."""

    def __init__(self, tokenizer: BaseTokenizer, sequences: Sequence[str], num_prompt_tokens: int) -> None:
        self._tokenizer, self._sequences, self._start = tokenizer, tuple(filter(None, sequences)), num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_more: Any) -> Any:  # noqa: ARG002
        text = self._tokenizer.backend.decode(input_ids[0, self._start :].tolist()) if self._sequences else ""
        stops = any(sequence in text for sequence in self._sequences)
        return torch.full((len(input_ids),), stops, dtype=torch.bool, device=input_ids.device)


def _generate(run: FinishedRun, ids: list[int], config: GenerationConfig, stop: StopAtText) -> list[int]:
    dtype = find_published_dtype(run)
    quantized = run.plan.quantization is not None and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if quantized else pick_device(run.plan, dtype)
    model: Any = load_expert(run, dtype, device, quantized=quantized)
    # What the base was published with, such as a penalty for repeating, would fill in what we leave open.
    generator: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    generator.generation_config = config
    torch.manual_seed(run.plan.schedule.seed)
    inputs = torch.tensor([ids], device=device)
    with torch.inference_mode():
        out = generator.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stop]),
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def _read(
    tokenizer: BaseTokenizer,
    tokens: list[int],
    prompt: str,
    num_prompt_tokens: int,
    config: GenerationConfig,
    sequences: Sequence[str],
) -> Answer:
    ends: Any = config.eos_token_id
    end: End = "end token" if tokens and tokens[-1] in ends else "length"
    text = tokenizer.backend.decode(tokens, skip_special_tokens=True)
    cuts = [position for sequence in sequences if sequence and (position := text.find(sequence)) >= 0]
    if cuts:
        text, end = text[: min(cuts)], "stop sequence"
    return Answer(text=text, prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_tokens=len(tokens), end=end)
