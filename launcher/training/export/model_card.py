"""Model card of a trained expert: what was trained, on which data, how to load and prompt it.

Texts of a manifest are untrusted: YAML scalars in the front matter, escaped Markdown in the body.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from jinja2 import Environment, StrictUndefined

from launcher import __version__
from launcher.base_models.catalogue import TINY_BASE_NAME, get_last_component
from launcher.core import metrics
from launcher.core.choices import Dtype
from launcher.core.errors import LauncherError
from launcher.core.log import get_logger
from launcher.core.markdown import code, fenced, inline, one_line, prose
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.core.units import format_percent
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.manifest import Manifest, load_manifest
from launcher.plan.model import Plan
from launcher.request.request import base_folders
from launcher.runs.evaluations import load_evaluations
from launcher.runs.record import get_global_batch, load_outcome, load_record
from launcher.training.export.serving import describe_window, list_vllm_obstacles, name_model, render_vllm
from launcher.training.inference.prompt import PLACEHOLDERS, PromptFormat, derive_prompt_format

log = get_logger(__name__)

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# adapter: PEFT's files; merged: adapter and base as one model; gguf: files of it for llama.cpp; full: a fully
# fine-tuned model
CardKind = Literal["adapter", "merged", "gguf", "full"]

_TORCH_NAMES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "full": "none: every weight was trained"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_RESERVED = frozenset({"torch", "tokenizer", "model"})  # used by the snippet


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """Everything that a model card shows."""

    kind: CardKind
    plan: Plan
    manifest: Manifest
    run_id: str
    dtype: Dtype  # of the saved weights, or of the adapter's base
    prompt: PromptFormat | None  # None: the tokenizer is not available
    steps_done: int
    saved_step: int  # step of the saved weights
    final_loss: float | None
    best_loss: float | None  # on the validation split
    best_step: int | None
    data_key: str | None
    global_batch: int
    launcher_version: str
    git_commit: str | None
    judged: tuple[str, ...] = ()  # one line per model
    is_export: bool = False  # the folder has all that servers need
    files: tuple[str, ...] = ()  # of the kind gguf
    checks: tuple[str, ...] = ()  # lines of a table: how the files answered
    window: int | None = None  # of the kind gguf: the longest context for which the files are right


def render_card(facts: CardFacts) -> str:
    """Render the card as Markdown with YAML front matter."""
    plan, prompt, base = facts.plan, facts.prompt, get_public_name(facts.plan)
    source = plan.data.path or ", ".join(plan.data.tasks)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
    card = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        plan=plan,
        manifest=facts.manifest,
        kind=facts.kind,
        adapter=plan.adapter,
        adapter_name=_ADAPTER_NAMES[plan.adapter.kind],
        schedule=plan.schedule,
        base=base,
        is_tiny=plan.base.name == TINY_BASE_NAME,
        is_hub_base=_is_hub_name(plan.base.name),
        dtype=_TORCH_NAMES[facts.dtype],
        data_name=source if plan.data.kind == "huggingface" else get_last_component(source),
        served_name=name_model(plan.expert),
        vllm_obstacles=list_vllm_obstacles(plan),
        front_matter=_render_front_matter(facts),
        prompt=prompt,
        **({} if prompt is None else _describe_prompt(prompt)),
        code=code,
        prose=prose,
        fenced=fenced,
        repr=repr,
        spans=_join_spans,
        shell_quote=shlex.quote,
        render_vllm=render_vllm,
        describe_window=describe_window,
    )
    return card.rstrip("\n") + "\n"


def _join_spans(texts: Iterable[str]) -> str:
    """Return texts as Markdown code spans, separated by commas, for a cell of a table."""
    return ", ".join(f"`{code(text)}`" for text in texts).replace("|", r"\|")


def _describe_prompt(prompt: PromptFormat) -> dict[str, object]:
    """Return the prompt as text and as the body of an f-string, with the fields of a row as variables."""
    variables = [_variable(name) for name in prompt.fields]
    literal, text = repr(prompt.text.replace("{", "{{").replace("}", "}}")), prompt.text
    for mark, field, variable in zip(PLACEHOLDERS, prompt.fields, variables, strict=False):
        literal = literal.replace(repr(mark)[1:-1], f"{{{variable}}}")
        text = text.replace(mark, f"{{{field}}}")
    return {"variables": variables, "prompt_literal": literal, "prompt_text": text}


def _render_front_matter(facts: CardFacts) -> str:
    manifest, plan = facts.manifest, facts.plan
    is_hub_base = _is_hub_name(plan.base.name)
    values: dict[str, object] = {
        **({"base_model": plan.base.name} if is_hub_base else {}),
        **({"base_model_relation": facts.kind if facts.kind == "adapter" else "finetune"} if is_hub_base else {}),
        "library_name": {"adapter": "peft", "gguf": "gguf"}.get(facts.kind, "transformers"),
        "pipeline_tag": "text-generation",
        **({"license": one_line(manifest.license)} if manifest.license else {}),
        "tags": list(dict.fromkeys((*map(one_line, manifest.tags), plan.adapter.kind, "expert-launcher"))),
    }
    if plan.profile == "full" and plan.data.kind == "huggingface" and plan.data.path:
        name = plan.data.path.partition("::")[0]
        values |= {"datasets": [name]} if _is_hub_name(name) else {}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1 << 20)


def _is_hub_name(name: str) -> bool:
    return name != TINY_BASE_NAME and _HUB_NAME.fullmatch(name) is not None


def get_public_name(plan: Plan) -> str:
    """Return a Hub name, or the last component of a local path."""
    return plan.base.name if _HUB_NAME.fullmatch(plan.base.name) else get_last_component(plan.base.name)


def _variable(field: str) -> str:
    name = re.sub(r"\W", "_", field, flags=re.ASCII)
    name = name if name.isidentifier() else f"field_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def write_card(plan: Plan, paths: RunPaths, *, steps_done: int, saved_step: int) -> None:
    """Write the card into the adapter's folder; a failure is only a warning."""
    try:
        manifest = load_manifest(paths.manifest).manifest
        kind: CardKind = "full" if plan.adapter.kind == "full" else "adapter"
        dtype = plan.precision.compute_dtype if kind == "full" else plan.precision.base_dtype
        facts = collect_facts(kind, plan, manifest, paths, steps_done=steps_done, saved_step=saved_step, dtype=dtype)
        write_text_atomically(paths.adapter / CARD_FILE, render_card(facts))
    except (LauncherError, OSError, ValueError) as error:
        log.warning(f"no model card was written: {error}")


def collect_facts(
    kind: CardKind,
    plan: Plan,
    manifest: Manifest,
    paths: RunPaths,
    *,
    steps_done: int,
    saved_step: int,
    dtype: Dtype,
) -> CardFacts:
    """Collect the facts from a run directory."""
    rows: list[StepMetrics] = []
    with suppress(LauncherError):
        rows = load_metrics(paths.metrics)
    final_loss, best_loss, best_step = summarize_losses(rows)
    outcome = load_outcome(paths.outcome)
    return CardFacts(
        kind=kind,
        plan=plan,
        manifest=manifest,
        run_id=paths.run_id,
        dtype=dtype,
        prompt=_load_prompt_format(plan),
        steps_done=steps_done,
        saved_step=saved_step,
        final_loss=final_loss,
        best_loss=best_loss,
        best_step=best_step,
        data_key=None if outcome is None else outcome.data_key,
        global_batch=get_global_batch(plan, outcome),
        launcher_version=__version__ if outcome is None else outcome.versions.get("launcher", __version__),
        git_commit=None if outcome is None else outcome.git_commit,
        judged=tuple(_describe_judged(paths)),
    )


def _describe_judged(paths: RunPaths) -> Iterator[str]:
    """Yield a sentence about how many answers passed the judge, for the trained model and then for the base."""
    try:
        evaluations = load_evaluations(load_record(paths))
    except LauncherError:
        return
    for name, evaluation in (("the trained model", evaluations.adapter), ("the base model", evaluations.base)):
        if evaluation is not None and (result := evaluation.result).main.num_judged:
            main, at = result.main, "" if evaluation.step is None else f" at step {evaluation.step:,}"
            yield (
                f"{name}{at}, on {main.num_judged} rows of the {inline(result.split)} split: {inline(main.title)}: "
                f"{main.num_passed} ({format_percent(main.rate)}; 95 % interval {format_percent(main.low)} to "
                f"{format_percent(main.high)}), judged by {inline(main.checker)}"
            )


def summarize_losses(rows: list[StepMetrics]) -> tuple[float | None, float | None, int | None]:
    """Return the last training loss, the best validation loss, and its step."""
    trained = [loss for row in rows if (loss := row.get(metrics.TRAIN_LOSS)) is not None]
    validation = [(loss, row.step) for row in rows if (loss := row.get(metrics.EVAL_LOSS)) is not None]
    best, best_step = min(validation) if validation else (None, None)
    return trained[-1] if trained else None, best, best_step


def _load_prompt_format(plan: Plan) -> PromptFormat | None:
    with suppress(LauncherError):
        return derive_prompt_format(plan, load_planned_tokenizer(plan, base_folders(Path(plan.data.folder))))
    return None
