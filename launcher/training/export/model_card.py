"""Model card of a trained expert: what was trained, on which data, how to load and prompt it.

Texts of a manifest are untrusted: YAML scalars in the front matter, escaped Markdown in the body.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

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
from launcher.manifest.model import Limitation
from launcher.plan.model import Plan
from launcher.request.request import base_folders
from launcher.runs.evaluations import load_evaluations
from launcher.runs.record import get_global_batch, load_outcome, load_record
from launcher.training.export.serving import describe_window, list_vllm_obstacles, name_model, render_vllm
from launcher.training.inference.prompt import PLACEHOLDERS, PromptFormat, derive_prompt_format

log = get_logger(__name__)

CARD_FILE = "README.md"
# adapter: PEFT's files; merged: adapter and base as one model; gguf: files of it for llama.cpp; full: a fully
# fine-tuned model
CardKind = Literal["adapter", "merged", "gguf", "full"]

_TORCH_NAMES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "full": "none: every weight was trained"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PIPE = r"\|"  # in a table
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
    sections = [
        _render_title(facts),
        "" if facts.kind == "gguf" else _render_loading(facts),
        _render_serving(facts),
        _render_prompt(facts),
        _render_training(facts),
        _render_results(facts),
        _render_limits(facts),
    ]
    return f"---\n{_render_front_matter(facts)}---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


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


def _render_title(facts: CardFacts) -> str:
    manifest = facts.manifest
    lines = [f"# {prose(f'{manifest.name} {manifest.version}')}"]
    if manifest.description:
        lines.append(prose(manifest.description))
    base = f"`{code(get_public_name(facts.plan))}`"
    tuned = f"{base} with its adapter merged in"
    if facts.plan.adapter.kind == "full":
        tuned = f"{base}, fine-tuned in all its weights"
    summaries = {
        "adapter": f"An adapter for {base}, in PEFT's format.",
        "merged": f"{tuned}: one model.",
        "gguf": f"{tuned}, for llama.cpp.",
        "full": f"{tuned}.",
    }
    lines.append(summaries[facts.kind])
    return "\n\n".join(lines)


def get_public_name(plan: Plan) -> str:
    """Return a Hub name, or the last component of a local path."""
    return plan.base.name if _HUB_NAME.fullmatch(plan.base.name) else get_last_component(plan.base.name)


def _render_loading(facts: CardFacts) -> str:
    if facts.plan.base.name == TINY_BASE_NAME and facts.kind != "merged":
        return (
            "## Loading\n\nThe base is embedded in the launcher, not on the Hub. Merge both, then load one model:\n\n"
            + fenced(f"launcher export {facts.run_id}\nlauncher ask {facts.run_id} 'your question'", "sh")
        )
    return "## Loading\n\n" + fenced("\n".join(_snippet_lines(facts)), "python")


def _snippet_lines(facts: CardFacts) -> Iterator[str]:
    plan, dtype = facts.plan, f"torch.{_TORCH_NAMES[facts.dtype]}"
    revision = "" if plan.base_revision is None else f", revision={plan.base_revision!r}"
    trusted = ", trust_remote_code=True" if plan.trust_remote_code else ""
    imports = ["from peft import PeftModel"] if facts.kind == "adapter" else []
    yield from ("import torch", *imports, "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    if facts.kind == "adapter":
        yield f"base = {get_public_name(plan)!r}"
        folder = '"path/of/this/folder"'
        tokenizer = folder if plan.data.new_tokens else f"base{revision}{trusted}"
        yield f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})"
        yield f"model = AutoModelForCausalLM.from_pretrained(base, dtype={dtype}{revision}{trusted})"
        if plan.data.new_tokens:
            yield "rows = model.get_input_embeddings().num_embeddings"
            yield "model.resize_token_embeddings(max(rows, len(tokenizer)))  # new tokens"
        yield f"model = PeftModel.from_pretrained(model, {folder})"
    else:
        yield 'folder = "path/of/this/folder"'
        tokenizer = "folder" if facts.kind == "merged" or plan.data.new_tokens else repr(get_public_name(plan))
        yield f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})"
        yield f"model = AutoModelForCausalLM.from_pretrained(folder, dtype={dtype}{trusted})"
    if facts.prompt is not None:
        yield from _generation_lines(facts.prompt)


def _generation_lines(prompt: PromptFormat) -> Iterator[str]:
    """Yield lines that build the prompt as an f-string, with the fields of a row as variables, and generate."""
    names = [_variable(name) for name in prompt.fields]
    literal = repr(prompt.text.replace("{", "{{").replace("}", "}}"))
    for mark, name in zip(PLACEHOLDERS, names, strict=False):
        literal = literal.replace(repr(mark)[1:-1], f"{{{name}}}")
    yield ""
    yield from (f'{name} = "…"' for name in names)
    yield f"prompt = f{literal}"
    yield f'inputs = tokenizer(prompt, add_special_tokens={prompt.adds_bos}, return_tensors="pt")'
    yield f"end = tokenizer.convert_tokens_to_ids({prompt.end_token!r})"
    yield "answer = model.generate(**inputs, max_new_tokens=512, do_sample=False, eos_token_id=end)"
    yield "print(tokenizer.decode(answer[0, inputs.input_ids.shape[1]:], skip_special_tokens=True))"


def _variable(field: str) -> str:
    name = re.sub(r"\W", "_", field, flags=re.ASCII)
    name = name if name.isidentifier() else f"field_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def _render_serving(facts: CardFacts) -> str:
    """Render the commands of servers, to be run in the folder of the card."""
    if not facts.is_export:
        return ""
    if facts.kind == "gguf":
        name = name_model(facts.plan.expert)
        context = f" -c {facts.window}" if facts.window else ""
        commands = [f"llama-server -m {facts.files[-1]} --jinja --port 8080{context}"]
        commands += [f"ollama create {name} -f Modelfile", f'ollama run {name} "your question"']
    elif facts.kind == "adapter":
        if obstacles := list_vllm_obstacles(facts.plan):
            return f"## Serving\n\nvLLM does not serve {' and '.join(obstacles)}: serve the merged model."
        return _render_adapter_serving(facts)
    else:
        commands = [render_vllm(facts.plan, get_public_name(facts.plan), is_adapter=False)]
    return "## Serving\n\nIn this folder:\n\n" + fenced("\n".join(commands), "sh")


def _render_adapter_serving(facts: CardFacts) -> str:
    base, name = get_public_name(facts.plan), name_model(facts.plan.expert)
    if base == TINY_BASE_NAME:
        commands = f"launcher export {facts.run_id} --out merged\nvllm serve merged --served-model-name {name}"
        return (
            "## Serving\n\nThe base is embedded in the launcher, where vLLM does not find it. Merge both and serve "
            "the merged model:\n\n" + fenced(commands, "sh")
        )
    is_local = not _is_hub_name(facts.plan.base.name)
    where = f"; the base was loaded from a folder, so replace `{code(base)}` by its path" if is_local else ""
    command = render_vllm(facts.plan, shlex.quote(base), is_adapter=True)
    return f"## Serving\n\nIn this folder{where}:\n\n" + fenced(command, "sh")


def _render_prompt(facts: CardFacts) -> str:
    prompt = facts.prompt
    if prompt is None:
        return f"## Prompt\n\nTemplate `{facts.plan.data.prompt_template}`."
    text = prompt.text
    for mark, name in zip(PLACEHOLDERS, prompt.fields, strict=False):
        text = text.replace(mark, f"{{{name}}}")
    fields = " and ".join(f"`{{{code(name)}}}`" for name in prompt.fields)
    return (
        f"## Prompt\n\nTemplate `{prompt.template}`; replace {fields} by a row's text. The answer follows and ends "
        f"with `{code(prompt.end_token)}`.\n\n" + fenced(text, "text")
    )


def _render_training(facts: CardFacts) -> str:
    rows = [f"| {name} | {value.replace('|', _PIPE)} |" for name, value in _training_rows(facts)]
    return "\n".join(("## Training", "", "| | |", "|---|---|", *rows))


def _training_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    plan = facts.plan
    adapter, batch, optimizer, schedule = plan.adapter, plan.batch, plan.optimizer, plan.schedule
    at = f" at `{code(plan.base_revision)}`" if plan.base_revision else ""
    yield "base", f"`{code(get_public_name(plan))}`{at}"
    yield "adapter", _ADAPTER_NAMES[adapter.kind]
    if adapter.rank is not None:
        yield "rank, alpha, dropout", f"{adapter.rank}, {adapter.alpha}, {adapter.dropout:g}"
    if adapter.kind != "full":
        targets = dict.fromkeys((*adapter.target_modules, *adapter.feedforward_modules))
        yield "adapted modules", ", ".join(f"`{code(name)}`" for name in targets)
    if adapter.modules_to_save:
        yield "completely trained modules", ", ".join(f"`{code(name)}`" for name in adapter.modules_to_save)
    if plan.data.new_tokens:
        yield "new tokens", ", ".join(f"`{code(token)}`" for token in plan.data.new_tokens)
    if plan.quantization is not None:
        yield "base while training", "NF4, 4 bits"
    yield "sequence length", f"{batch.sequence_length:,} tokens{', packed' if batch.packed else ''}"
    yield "global batch", f"{facts.global_batch} sequences"
    yield (
        "steps",
        f"{facts.steps_done:,}"
        + (f"; these are the weights of step {facts.saved_step:,}" if facts.saved_step != facts.steps_done else ""),
    )
    yield "learning rate", f"{optimizer.learning_rate:g}, {schedule.lr_scheduler.replace('_', ' ')}{_warmup(plan)}"
    yield "optimizer", f"{optimizer.name}, weight decay {optimizer.weight_decay:g}"
    yield "precision", f"computed in {plan.precision.compute_dtype}, trained weights {plan.precision.trainable_dtype}"
    yield "loss on", "answers" if plan.loss_on == "completion" else "all tokens"
    yield "seed", str(schedule.seed)
    source = plan.data.path or ", ".join(plan.data.tasks)
    if source:
        name = source if plan.data.kind == "huggingface" else get_last_component(source)
        rows = "" if plan.data.num_rows is None else f", {plan.data.num_rows:,} rows"
        yield "data", f"`{code(name)}`{rows}"
    if facts.data_key is not None:
        yield "data key", f"`{code(facts.data_key)}`"
    yield "launcher", facts.launcher_version
    if facts.git_commit is not None:
        yield "commit", f"`{code(facts.git_commit)}`"


def _warmup(plan: Plan) -> str:
    schedule = plan.schedule
    if schedule.warmup_ratio:
        return f", {schedule.warmup_ratio:g} of the steps warm up"
    return f", {schedule.warmup_steps:,} steps warm up" if schedule.warmup_steps else ""


def _render_results(facts: CardFacts) -> str:
    lines = []
    if facts.final_loss is not None:
        lines.append(f"- training loss of the last step: {facts.final_loss:.4f}")
    if facts.best_loss is not None:
        lines.append(f"- best validation loss: {facts.best_loss:.4f}, after step {facts.best_step:,}")
    lines += [f"- {line}" for line in facts.judged]
    if facts.checks:
        lines += ["", "Greedy answers to held-out prompts, compared with those of the merged model:", "", *facts.checks]
    return "\n".join(("## Results", "", *lines)) if lines else ""


def _render_limits(facts: CardFacts) -> str:
    lines = []
    if facts.plan.profile == "smoke":
        lines.append(
            "- **For testing only.** The smoke profile trained a tiny base model on a small sample: it imitates that "
            "sample and has no general knowledge."
        )
    if facts.window:
        lines.append(f"- {describe_window(facts.window)}")
    for limit in facts.manifest.limitations:
        lines.append(f"- {prose(_describe(limit) if isinstance(limit, Limitation) else limit)}")
    return "\n".join(("## Limits", "", *lines)) if lines else ""


def _describe(limit: Limitation) -> str:
    return f"{limit.description}{f' Workaround: {limit.workaround}' if limit.workaround else ''}"


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
    final_loss, best_loss, best_step = summarize_losses(_load_metrics(paths.metrics))
    outcome = load_outcome(paths.outcome)
    return CardFacts(
        kind=kind,
        plan=plan,
        manifest=manifest,
        run_id=paths.run_id,
        dtype=dtype,
        prompt=_describe_prompt(plan),
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
    """Yield the judged answers of the trained model, and of the base on the same rows."""
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


def _load_metrics(path: Path) -> list[StepMetrics]:
    with suppress(OSError, ValueError):
        return load_metrics(path)
    return []


def _describe_prompt(plan: Plan) -> PromptFormat | None:
    with suppress(LauncherError):
        return derive_prompt_format(plan, load_planned_tokenizer(plan, base_folders(Path(plan.data.folder))))
    return None
