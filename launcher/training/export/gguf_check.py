"""Run GGUF files with llama.cpp on held-out rows, and compare tokens, answers and verdicts with the merged model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from launcher.core.choices import Dtype
from launcher.core.errors import InputError, LauncherError, RunFailedError, escape
from launcher.core.frozen_model import Frozen
from launcher.corpus.documents import make_planned_template
from launcher.corpus.heldout import HeldOutRows, load_held_out_rows
from launcher.corpus.spec import make_preparation_spec
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.judges.base import Judge
from launcher.judges.registry import open_judge
from launcher.judges.results import CheckResult, summarize_checks
from launcher.manifest.model import Decoding
from launcher.manifest.trust import check_trust, list_judge_code
from launcher.training.export.gguf import LLAMA_WORKER, Conversion, run_tool, write_files
from launcher.training.export.logits_check import compute_logits, computing_in_fp32
from launcher.training.inference.generate import Generator
from launcher.training.inference.grade import make_reference_rows
from launcher.training.inference.load import load_from_folder, pick_device
from launcher.training.inference.prompt import render_prompt
from launcher.training.inference.trained_run import TrainedRun

MAX_NEW_TOKENS = 256
_EXAMPLE = "How many rows are there, and which of them is the oldest?"
# Rounding may decide between two tokens whose logits are this close, in standard deviations.
_NEAR_TIE = 0.05
# With F16 and BF16 weights, llama.cpp rounds activations, keys and values, too. Some models amplify that; but a token
# this much lower is noise, whatever the cause.
_MAX_ROUNDING = 1.0
_ROUNDED = ("f16", "bf16")  # only rounding distinguishes them from the merged model


class ModelCheck(Frozen):
    """How many of a model's answers equal the merged model's, and how many passed the judge; in `export --json`."""

    model: str  # `merged (bf16)`, `Q4_K_M`
    rows: int
    same_answers: int  # answers like those of the merged model
    near_ties: int = 0  # other answers, after a token whose logit was close to the highest
    other_by_rounding: int = 0  # other answers, which the same weights in FP32 do not give
    judged: CheckResult | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Prompts with which GGUF files are checked, as texts and as tokens."""

    prompts: list[str]
    ids: list[list[int]]
    requests: list[tuple[str, bool]]  # the text for llama.cpp, and whether BOS is put before it
    rows: HeldOutRows | None  # None: no rows are on this machine
    max_new_tokens: int = MAX_NEW_TOKENS


def check_files(
    files: Mapping[str, Path],
    conversion: Conversion,
    run: TrainedRun,
    *,
    tokenizer: BaseTokenizer,
    dtype: Dtype,
    num_rows: int,
    window: int | None,
    report: Callable[[str], None],
) -> list[ModelCheck]:
    """Return how each GGUF file's answers compare with the merged model's; raise RunFailedError if a file is wrong.

    `window` is the most tokens that prompt and answer may have. If an answer differs, a GGUF file with FP32 weights is
    written, too.
    """
    ends = conversion.ends
    questions = load_questions(run, tokenizer, num_rows, window, report)
    device = pick_device(run.plan, dtype)
    model = load_from_folder(conversion.merged, dtype, device, trusts=run.trusts_code)
    report(f"answering {len(questions.prompts)} prompts with the merged model")
    expected = _answer_with_merged(model, run, tokenizer, questions)
    checks, judge = [], _open_judge(run, questions, report)

    @cache
    def answer_exactly() -> list[Any]:
        report("answering with FP32 weights in llama.cpp, which then rounds nothing")
        file = write_files(conversion, conversion.merged, ["f32"])["f32"]
        answers: list[Any] = generate_answers(file, questions, ends, exact=True)["answers"]
        return answers

    with closing(judge) if judge is not None else nullcontext():
        judged = _judge(judge, questions, expected)
        num = len(expected)
        checks.append(ModelCheck(model=f"merged ({dtype})", rows=num, same_answers=num, judged=judged))
        if not any(name in _ROUNDED for name in files):
            exact = answer_exactly()
            other = _list_others(tokenizer, exact, ends, expected)
            check_answers("f32", model, device, questions, exact, other, answer_exactly)
        for name, file in files.items():
            report(f"answering {num} prompts with {name.upper()} in llama.cpp")
            answers = generate_answers(file, questions, ends)
            check_tokens(name, questions, answers["answers"])
            check_ends(name, tokenizer, ends, answers["ends"])
            texts = [_decode(tokenizer, answer["answer"], ends) for answer in answers["answers"]]
            other = _list_others(tokenizer, answers["answers"], ends, expected)
            ties = rounded = 0
            if name in _ROUNDED:
                ties, rounded = check_answers(name, model, device, questions, answers["answers"], other, answer_exactly)
            checks.append(
                ModelCheck(
                    model=name.upper(),
                    rows=num,
                    same_answers=num - len(other),
                    near_ties=ties,
                    other_by_rounding=rounded,
                    judged=_judge(judge, questions, texts),
                )
            )
    return checks


def _answer_with_merged(model: Any, run: TrainedRun, tokenizer: BaseTokenizer, questions: Questions) -> list[str]:
    template, limit = make_planned_template(run.plan.data, tokenizer), questions.max_new_tokens
    generator = Generator(
        model, run.plan, tokenizer, template, decoding=Decoding(), max_new_tokens=limit, batch_size=None
    )
    with computing_in_fp32(model):
        return [answer.text for answer in generator.generate(questions.prompts)]


def load_questions(
    run: TrainedRun, tokenizer: BaseTokenizer, num_rows: int, window: int | None, report: Callable[[str], None]
) -> Questions:
    """Return held-out prompts that leave room for an answer in the context; raises InputError if none does."""
    template = make_planned_template(run.plan.data, tokenizer)
    encoder, unescape = TextEncoder(tokenizer, template), template.controls.unescape
    rows: HeldOutRows | None = None
    prompts: list[str] = []
    try:
        rows = load_held_out_rows(make_preparation_spec(run.plan, Path(run.plan.data.folder), tokenizer), num_rows)
        # A row that contains a control token as text has other tokens in a program that does not escape it.
        rows = replace(rows, rows=tuple(row for row in rows.rows if unescape(row.prompt) == row.prompt))
        prompts = [row.prompt for row in rows.rows]
    except LauncherError as error:
        report(f"note: compared on one example prompt, because there are no held-out rows: {error.title}")
    if not prompts:
        rows, prompts = None, [render_prompt(template, _EXAMPLE, system=run.plan.data.system_prompt or "")]
    context = min(run.plan.base.max_positions, window or run.plan.base.max_positions)
    max_new_tokens = min(MAX_NEW_TOKENS, context // 2)
    ids = [encoder.encode_prompt(prompt) for prompt in prompts]
    short = [index for index, tokens in enumerate(ids) if len(tokens) + max_new_tokens <= context]
    if not short:
        raise InputError(
            f"every prompt is too long to be checked: none leaves {max_new_tokens} of {context:,} tokens for an answer",
            hint="serve the merged model with vLLM, or write the file without this check (--check-rows 0)",
        )
    if rows is not None:
        rows = replace(rows, rows=tuple(rows.rows[index] for index in short))
    prompts = [prompts[index] for index in short]
    return Questions(
        prompts=prompts,
        ids=[ids[index] for index in short],
        requests=[(unescape(prompt), encoder.adds_bos(prompt)) for prompt in prompts],
        rows=rows,
        max_new_tokens=max_new_tokens,
    )


def generate_answers(file: Path, questions: Questions, ends: Sequence[int], *, exact: bool = False) -> dict[str, Any]:
    """Generate greedy answers with llama.cpp: their tokens, the prompts' tokens, and at which end tokens it stops."""
    request = {
        "prompts": questions.requests,
        "ends": list(ends),
        "max_new_tokens": questions.max_new_tokens,
        "context": max(map(len, questions.ids)) + questions.max_new_tokens + 8,
        "exact": exact,
    }
    command = [sys.executable, "-P", "-m", LLAMA_WORKER, "generate", str(file)]
    failure = f"llama.cpp cannot run {file.name}"
    output = run_tool(command, failure, hint="nothing was written", input_text=json.dumps(request))
    answers: dict[str, Any] = json.loads(output)
    return answers


def check_tokens(name: str, questions: Questions, answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunFailedError if llama.cpp tokenizes prompts differently."""
    wrong = [index for index, answer in enumerate(answers) if answer["prompt"] != questions.ids[index]]
    if not wrong:
        return
    ours, theirs = questions.ids[wrong[0]], answers[wrong[0]]["prompt"]
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    text = escape(questions.requests[wrong[0]][0][:60])
    raise RunFailedError(
        f"{name.upper()}: llama.cpp tokenizes {len(wrong)} of {len(answers)} prompts differently from the training, "
        f"first at token {place} of {text!r}: {theirs[place : place + 5]} instead of {ours[place : place + 5]}",
        hint="nothing was written; serve the merged model with vLLM, or write the file without this check "
        "(--check-rows 0)",
    )


def check_ends(name: str, tokenizer: BaseTokenizer, ends: Sequence[int], known: Sequence[bool]) -> None:
    """Raise RunFailedError if llama.cpp does not stop at all end tokens."""
    missing = [tokenizer.backend.id_to_token(end) for end, is_end in zip(ends, known, strict=True) if not is_end]
    if missing:
        raise RunFailedError(
            f"{name.upper()}: llama.cpp would not stop at {', '.join(map(repr, missing))}",
            hint="nothing was written; serve the merged model with vLLM",
        )


def _decode(tokenizer: BaseTokenizer, ids: Sequence[int], ends: Sequence[int]) -> str:
    cut = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    text: str = tokenizer.backend.decode(list(ids[:cut]), skip_special_tokens=True)
    return text


def _list_others(
    tokenizer: BaseTokenizer, answers: Sequence[Mapping[str, Any]], ends: Sequence[int], expected: Sequence[str]
) -> list[int]:
    texts = [_decode(tokenizer, answer["answer"], ends) for answer in answers]
    return [index for index, text in enumerate(texts) if text != expected[index]]


def check_answers(
    name: str,
    model: Any,
    device: torch.device,
    questions: Questions,
    answers: Sequence[Mapping[str, Any]],
    other: Sequence[int],
    answer_exactly: Callable[[], Sequence[Mapping[str, Any]]],
) -> tuple[int, int]:
    """Return how many `other` answers are near ties and how many rounding explains; raise RunFailedError for the rest.

    Rounding explains an answer if llama.cpp with FP32 weights and KV cache gives the merged model's answer.
    """
    margins = {index: _find_margin(model, device, answers[index]) for index in other}
    far = [index for index, margin in margins.items() if not margin <= _NEAR_TIE]
    for index in far:
        exact = _find_margin(model, device, answer_exactly()[index]) if margins[index] <= _MAX_ROUNDING else None
        if exact is None or not exact <= _NEAR_TIE:
            raise RunFailedError(
                f"{name.upper()} answers differently from the merged model, for example to "
                f"{escape(questions.requests[index][0][-60:])!r}: it chose a token whose logit is "
                f"{margins[index]:.2f} standard deviations lower"
                + ("" if exact is None else f", and with FP32 weights one that is {exact:.2f} lower"),
                hint="nothing was written: llama.cpp may not support this model; --check-rows 0 writes it anyway",
            )
    return len(other) - len(far), len(far)


def _find_margin(model: Any, device: torch.device, answer: Mapping[str, Any]) -> float:
    """Return the logit gap of an answer's first non-argmax token to the argmax, in standard deviations; 0 if none."""
    prompt, made = answer["prompt"], answer["answer"]
    (logits,) = compute_logits(model, [torch.tensor(prompt + made)], device)
    logits = logits[len(prompt) - 1 : -1]
    margins = (logits.max(-1).values - logits[torch.arange(len(made)), made]) / logits.std(-1)
    return next((float(margin) for margin in margins if not margin <= 0), 0.0)


def _open_judge(run: TrainedRun, questions: Questions, report: Callable[[str], None]) -> Judge | None:
    if questions.rows is None:
        return None
    try:
        check_trust(list_judge_code(run.manifest), run.paths.root)
        return open_judge(run.manifest)
    except InputError as error:
        report(f"note: answers are not judged: {error.title}")
        return None


def _judge(judge: Judge | None, questions: Questions, texts: list[str]) -> CheckResult | None:
    if judge is None or questions.rows is None:
        return None
    verdicts = judge.judge(make_reference_rows(questions.rows), texts)
    checks = summarize_checks(judge.checks, verdicts)
    return next(check for check in checks if check.name == judge.main_check)


def _describe_others(check: ModelCheck) -> str:
    ties = f"{check.near_ties} near tie{'s' * (check.near_ties > 1)}" if check.near_ties else ""
    rounded = f"{check.other_by_rounding} by rounding" if check.other_by_rounding else ""
    return f" ({', '.join(filter(None, (ties, rounded)))})" if ties or rounded else ""


def render_checks(checks: Sequence[ModelCheck]) -> list[str]:
    """Return a Markdown table of the models side by side."""
    judged = next((check.judged.title for check in checks if check.judged is not None), None)
    lines = [
        f"| model | same answers{f' | {judged}' if judged else ''} |",
        f"|---|---|{'---|' if judged else ''}",
    ]
    for check in checks:
        cells = [check.model, f"{check.same_answers} of {check.rows}{_describe_others(check)}"]
        if judged:
            result = check.judged
            cells.append("" if result is None else f"{result.num_passed} of {result.num_judged}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
