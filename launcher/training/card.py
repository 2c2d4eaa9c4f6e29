"""The model card: what was trained, on what, how to load it, how to ask it. Pure: facts in, Markdown out.

A manifest's text is foreign. It stands in the front matter as YAML scalars and in the body as escaped prose.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import yaml

from launcher.bases import TINY_BASE_NAME, last_component
from launcher.choices import Dtype
from launcher.manifest import Manifest
from launcher.manifest.metadata import Limitation
from launcher.plan.model import Plan
from launcher.prose import code, fenced, one_line, prose

# adapter: PEFT's files beside a base; merged: one model made of both; full: one model, every weight trained
CardKind = Literal["adapter", "merged", "full"]

_TORCH_NAMES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "full": "none: every weight was trained"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PIPE = r"\|"  # inside a table
_RESERVED = frozenset({"torch", "tokenizer", "model"})  # what the snippet still needs


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """A prompt with a mark in each place where a field of the row goes."""

    template: str
    text: str
    fields: tuple[str, ...]  # mark -> name: text.replace(MARKS[i], value of fields[i])
    end_token: str


# Private-use characters: no template has them.
MARKS = ("\ue000", "\ue001", "\ue002")


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    kind: CardKind
    plan: Plan
    manifest: Manifest
    run_id: str
    dtype: Dtype  # of the saved weights, or of the base that the adapter goes with
    prompt: PromptFormat | None  # None: the tokenizer is not at hand
    steps_done: int
    saved_step: int  # whose weights these are
    final_loss: float | None
    best_loss: float | None  # on held-out rows
    best_step: int | None
    data_key: str | None
    launcher_version: str
    git_commit: str | None


def render_card(facts: CardFacts) -> str:
    sections = [_head(facts), _loading(facts), _prompting(facts), _training(facts), _results(facts), _limits(facts)]
    return f"---\n{_front_matter(facts)}---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(facts: CardFacts) -> str:
    manifest, plan = facts.manifest, facts.plan
    is_hub_base = _is_hub_name(plan.base.name)
    values: dict[str, object] = {
        **({"base_model": plan.base.name} if is_hub_base else {}),
        **({"base_model_relation": facts.kind if facts.kind == "adapter" else "finetune"} if is_hub_base else {}),
        "library_name": "peft" if facts.kind == "adapter" else "transformers",
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


def _head(facts: CardFacts) -> str:
    manifest = facts.manifest
    lines = [f"# {prose(f'{manifest.name} {manifest.version}')}"]
    if manifest.description:
        lines.append(prose(manifest.description))
    base = f"`{code(_base_name(facts.plan))}`"
    what = {
        "adapter": f"An adapter for {base}, in PEFT's format.",
        "merged": f"{base} with its adapter merged in: one model.",
        "full": f"{base}, fine-tuned in all its weights.",
    }
    lines.append(what[facts.kind])
    return "\n\n".join(lines)


def _base_name(plan: Plan) -> str:
    """A folder of some machine means nothing on another: its last part does."""
    return plan.base.name if _HUB_NAME.fullmatch(plan.base.name) else last_component(plan.base.name)


def _loading(facts: CardFacts) -> str:
    if facts.plan.base.name == TINY_BASE_NAME and facts.kind != "merged":
        return (
            "## Loading\n\nIts base is embedded in the launcher, not on the hub. Merge both, then load one model:\n\n"
            + fenced(f"launcher export {facts.run_id}\nlauncher ask {facts.run_id} 'your question'", "sh")
        )
    return "## Loading\n\n" + fenced("\n".join(_snippet(facts)), "python")


def _snippet(facts: CardFacts) -> Iterator[str]:
    plan, dtype = facts.plan, f"torch.{_TORCH_NAMES[facts.dtype]}"
    revision = "" if plan.base_revision is None else f", revision={plan.base_revision!r}"
    trusted = ", trust_remote_code=True" if plan.trust_remote_code else ""
    yield "import torch"
    if facts.kind == "adapter":
        yield "from peft import PeftModel"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    if facts.kind == "adapter":
        yield f"base = {_base_name(plan)!r}"
        yield f"tokenizer = AutoTokenizer.from_pretrained(base{revision}{trusted})"
        yield f"model = AutoModelForCausalLM.from_pretrained(base, dtype={dtype}{revision}{trusted})"
        yield 'model = PeftModel.from_pretrained(model, "path/of/this/folder")'
    else:
        yield 'folder = "path/of/this/folder"'
        tokenizer = "folder" if facts.kind == "merged" else repr(_base_name(plan))
        yield f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})"
        yield f"model = AutoModelForCausalLM.from_pretrained(folder, dtype={dtype}{trusted})"
    if facts.prompt is not None:
        yield from _asking(facts.prompt)


def _asking(prompt: PromptFormat) -> Iterator[str]:
    """The prompt as an f-string over variables that are called as the rows' fields are."""
    names = [_variable(name) for name in prompt.fields]
    literal = repr(prompt.text.replace("{", "{{").replace("}", "}}"))
    for mark, name in zip(MARKS, names, strict=False):
        literal = literal.replace(repr(mark)[1:-1], f"{{{name}}}")
    yield ""
    yield from (f'{name} = "…"' for name in names)
    yield f"prompt = f{literal}"
    yield 'inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")'
    yield f"end = tokenizer.convert_tokens_to_ids({prompt.end_token!r})"
    yield "answer = model.generate(**inputs, max_new_tokens=512, do_sample=False, eos_token_id=end)"
    yield "print(tokenizer.decode(answer[0, inputs.input_ids.shape[1]:], skip_special_tokens=True))"


def _variable(field: str) -> str:
    name = re.sub(r"\W", "_", field, flags=re.ASCII)
    name = name if name.isidentifier() else f"field_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def _prompting(facts: CardFacts) -> str:
    prompt = facts.prompt
    if prompt is None:
        return f"## Prompt\n\nTemplate `{facts.plan.data.prompt_template}`."
    text = prompt.text
    for mark, name in zip(MARKS, prompt.fields, strict=False):
        text = text.replace(mark, f"{{{name}}}")
    fields = " and ".join(f"`{{{code(name)}}}`" for name in prompt.fields)
    return (
        f"## Prompt\n\nTemplate `{prompt.template}`; {fields} stand for a row's own text. The answer follows, and ends "
        f"with `{code(prompt.end_token)}`.\n\n" + fenced(text, "text")
    )


def _training(facts: CardFacts) -> str:
    rows = [f"| {name} | {value.replace('|', _PIPE)} |" for name, value in _training_rows(facts)]
    return "\n".join(("## Training", "", "| | |", "|---|---|", *rows))


def _training_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    plan = facts.plan
    adapter, batch, optimizer, schedule = plan.adapter, plan.batch, plan.optimizer, plan.schedule
    at = f" at `{code(plan.base_revision)}`" if plan.base_revision else ""
    yield "base", f"`{code(_base_name(plan))}`{at}"
    yield "adapter", _ADAPTER_NAMES[adapter.kind]
    if adapter.rank is not None:
        yield "rank, alpha, dropout", f"{adapter.rank}, {adapter.alpha}, {adapter.dropout:g}"
    if adapter.kind != "full":
        targets = dict.fromkeys((*adapter.target_modules, *adapter.feedforward_modules))
        yield "adapted modules", ", ".join(f"`{code(name)}`" for name in targets)
    if plan.quantization is not None:
        yield "base while training", {"int4": "NF4, 4 bits", "int8": "8 bits"}[plan.quantization.kind]
    yield "sequence length", f"{batch.sequence_length:,} tokens{', packed' if batch.packed else ''}"
    yield "global batch", f"{batch.global_batch_size} sequences"
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


def _results(facts: CardFacts) -> str:
    lines = []
    if facts.final_loss is not None:
        lines.append(f"- training loss of the last step: {facts.final_loss:.4f}")
    if facts.best_loss is not None:
        lines.append(f"- best held-out loss: {facts.best_loss:.4f}, after step {facts.best_step:,}")
    return "\n".join(("## Results", "", *lines)) if lines else ""


def _limits(facts: CardFacts) -> str:
    lines = []
    if facts.plan.profile == "smoke":
        lines.append(
            "- **For trying only.** The smoke profile trained a tiny base on a small sample: it answers in the ways of "
            "that sample, and knows nothing of the world."
        )
    for limit in facts.manifest.limitations:
        lines.append(f"- {prose(_describe(limit) if isinstance(limit, Limitation) else limit)}")
    return "\n".join(("## Limits", "", *lines)) if lines else ""


def _describe(limit: Limitation) -> str:
    return f"{limit.description}{f' Way around: {limit.workaround}' if limit.workaround else ''}"
