"""The model card: facts of the run, escaped foreign text, and a snippet with the prompt of the training."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.core import metrics
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.documents import make_template
from launcher.corpus.tokenizer import load_tokenizer
from launcher.manifest import load_manifest
from launcher.plan.model import QuantizationPlan
from launcher.training.export.model_card import CardFacts, collect_facts, render_card, summarize_losses, write_card
from launcher.training.inference.prompt import derive_prompt_format, render_prompt
from tests.training.trained_run import Trained, load_plan, trained  # noqa: F401

TINY = "launcher/tiny"


@pytest.fixture
def facts(trained: Trained) -> CardFacts:  # noqa: F811
    plan, manifest = load_plan(trained.paths), load_manifest(trained.paths.manifest).manifest
    return collect_facts("adapter", plan, manifest, trained.paths, steps_done=3, saved_step=3, dtype="fp32")


def on_hub(facts: CardFacts, **changes: Any) -> CardFacts:
    base = facts.plan.base.model_copy(update={"name": "Qwen/Qwen3-0.6B"})
    plan = facts.plan.model_copy(update={"base": base, "profile": "full", "base_revision": "abc123", **changes})
    return replace(facts, plan=plan, dtype="bf16")


def with_manifest(facts: CardFacts, **changes: Any) -> CardFacts:
    return replace(facts, manifest=facts.manifest.model_copy(update=changes))


def front_matter(card: str) -> dict[str, Any]:
    opening, matter, _ = card.split("---\n", 2)
    assert opening == ""
    values: dict[str, Any] = yaml.safe_load(matter)
    return values


def snippet_of(card: str) -> str:
    return card.split("```python\n")[1].split("\n```")[0]


def test_run_writes_a_model_card(trained: Trained) -> None:  # noqa: F811
    card = (trained.paths.adapter / "README.md").read_text()
    rows = load_metrics(trained.paths.metrics)
    assert f"training loss of the last step: {rows[2].values[metrics.TRAIN_LOSS]:.4f}" in card
    assert f"best validation loss: {rows[3].values[metrics.EVAL_LOSS]:.4f}, after step 3" in card
    assert "More Information Needed" not in card
    assert str(trained.runs_dir) not in card
    assert str(Path(__file__).resolve().parents[3]) not in card


def test_checkpoints_have_no_card(trained: Trained) -> None:  # noqa: F811
    files = {file.name for file in trained.paths.checkpoint(3).iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "README.md" not in files


def test_front_matter_has_hub_metadata(facts: CardFacts) -> None:
    values = front_matter(render_card(on_hub(facts)))
    assert values["base_model"] == "Qwen/Qwen3-0.6B"
    assert values["library_name"] == "peft"
    assert values["license"] == "apache-2.0"
    assert values["pipeline_tag"] == "text-generation"
    assert {"neo4j", "lora"} <= set(values["tags"])
    assert front_matter(render_card(replace(on_hub(facts), kind="full")))["library_name"] == "transformers"


def test_adapter_of_a_quantized_base_is_loaded_with_one(facts: CardFacts) -> None:
    nf4 = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
    quantized = on_hub(replace(facts, plan=facts.plan.model_copy(update={"quantization": nf4})))
    code = render_card(quantized).partition("```python\n")[2].partition("```")[0]
    compile(code, "card", "exec")
    assert "import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig" in code
    assert 'bnb_4bit_quant_type="nf4"' in code
    assert ", quantization_config=nf4" in code
    for card in (render_card(on_hub(facts)), render_card(replace(quantized, kind="merged"))):
        assert "BitsAndBytesConfig" not in card


@pytest.mark.parametrize("name", [TINY, "/models/Qwen3-0.6B", "F:/LLMs/Qwen3-0.6B", "Qwen3-0.6B"])
def test_base_outside_the_hub_is_not_linked(facts: CardFacts, name: str) -> None:
    base = facts.plan.base.model_copy(update={"name": name})
    card = render_card(replace(facts, plan=facts.plan.model_copy(update={"base": base})))
    assert "base_model" not in front_matter(card)
    assert name.rpartition("/")[0] + "/Q" not in card


@pytest.mark.parametrize(
    "text",
    [
        "mit\nbase_model: evil/model",
        "'\"`: [x",
        "---",
        "yes",
        "1.0",
        "{a: b}",
        "# no",
        "&a *b !!python/object:x",
        "über",
    ],
)
def test_foreign_text_stays_a_yaml_scalar(facts: CardFacts, text: str) -> None:
    values = front_matter(render_card(with_manifest(facts, license=text, tags=(text,))))
    assert values["license"] == " ".join(text.split())
    assert values["tags"][0] == " ".join(text.split())
    assert "base_model" not in values


def test_foreign_markup_is_escaped(facts: CardFacts) -> None:
    hostile = "# Title\n\n---\n## Results\n<script>alert(1)</script> [link](http://x) ![i](y) `code` a|b"
    card = render_card(with_manifest(facts, description=hostile, limitations=(hostile, "1. one", "- dash")))
    headings = [line for line in card.splitlines() if line.startswith("#")]
    plain = render_card(facts)
    assert headings == [line for line in plain.splitlines() if line.startswith("#")]
    assert "<script" not in card
    assert "[link](" not in card
    assert r"- 1\. one" in card
    assert r"- \- dash" in card


def test_fence_is_longer_than_any_in_the_prompt(facts: CardFacts) -> None:
    assert facts.prompt is not None
    card = render_card(replace(facts, prompt=replace(facts.prompt, text="````\nanswer:")))
    assert "`````text\n````\nanswer:\n`````" in card


@pytest.mark.parametrize("kind", ["adapter", "merged", "full"])
def test_snippet_is_valid_python_for_this_run(facts: CardFacts, kind: Any) -> None:
    snippet = snippet_of(render_card(replace(on_hub(facts), kind=kind)))
    ast.parse(snippet)
    assert "dtype=torch.bfloat16" in snippet
    assert ("PeftModel.from_pretrained(model" in snippet) is (kind == "adapter")
    if kind == "adapter":
        assert "from_pretrained(base, dtype=torch.bfloat16, revision='abc123')" in snippet
        assert "base = 'Qwen/Qwen3-0.6B'" in snippet


@pytest.mark.parametrize("template", ["chatml", "qwen3", "alpaca"])
@pytest.mark.parametrize("field", ["question", "class", "2nd field", "model"])
def test_snippet_builds_the_prompt_of_the_training(facts: CardFacts, template: str, field: str) -> None:
    mapping = facts.plan.data.field_mapping.model_copy(update={"instruction": field})
    data = facts.plan.data.model_copy(update={"prompt_template": template, "field_mapping": mapping})
    plan = facts.plan.model_copy(update={"data": data})
    tokenizer = load_tokenizer(TINY, ())
    prompt = derive_prompt_format(plan, tokenizer)
    snippet = snippet_of(render_card(replace(on_hub(replace(facts, plan=plan)), prompt=prompt)))
    lines = [line for line in snippet.splitlines() if line.endswith('= "…"') or line.startswith("prompt = ")]
    assert len(lines) == 3
    values = ("Who {acts}?", "Node \\x")
    space: dict[str, str] = {}
    for line, value in zip(lines[:2], values, strict=True):
        space[line.split(" = ")[0]] = value
    exec(lines[2], {}, scope := dict(space))
    assert scope["prompt"] == render_prompt(make_template(template, tokenizer), values[0], context=values[1])


def test_smoke_profile_is_marked_for_testing_only(facts: CardFacts) -> None:
    assert "For testing only" in render_card(facts)
    assert "For testing only" not in render_card(on_hub(facts))
    assert "launcher export a" in render_card(facts)


def test_step_of_the_weights_is_shown_if_not_the_last(facts: CardFacts) -> None:
    assert "weights of step" not in render_card(facts)
    assert "| steps | 3; these are the weights of step 2 |" in render_card(replace(facts, saved_step=2))


def test_losses_are_the_last_training_and_best_validation_loss() -> None:
    rows = [
        StepMetrics(step=1, epoch=0, values={metrics.TRAIN_LOSS: 3.0}),
        StepMetrics(step=1, epoch=0, values={metrics.EVAL_LOSS: 2.0}),
        StepMetrics(step=2, epoch=0, values={metrics.TRAIN_LOSS: 1.0}),
        StepMetrics(step=2, epoch=0, values={metrics.EVAL_LOSS: 2.5}),
    ]
    assert summarize_losses(rows) == (1.0, 2.0, 1)
    assert summarize_losses([]) == (None, None, None)


def test_failed_card_does_not_fail_the_training(
    facts: CardFacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_card(facts.plan, RunPaths(tmp_path), steps_done=3, saved_step=3)
    assert "no model card was written" in capsys.readouterr().err


def test_adapter_of_the_embedded_base_is_merged_to_be_served(facts: CardFacts) -> None:
    card = render_card(replace(facts, is_export=True))
    assert f"vllm serve {TINY}" not in card
    assert "launcher export a --out merged\nvllm serve merged --served-model-name neo4j" in card


def test_base_folder_is_replaced_in_the_command(facts: CardFacts) -> None:
    base = facts.plan.base.model_copy(update={"name": "/models/my base"})
    card = render_card(replace(facts, is_export=True, plan=facts.plan.model_copy(update={"base": base})))
    assert "vllm serve 'my base' --enable-lora" in card
    assert "replace `my base` by its path" in card
    assert "by its path" not in render_card(replace(on_hub(facts), is_export=True))


@pytest.mark.parametrize("kind", ["merged", "gguf"])
def test_card_of_full_fine_tuning_mentions_no_adapter(facts: CardFacts, kind: Any) -> None:
    full = on_hub(facts, adapter=facts.plan.adapter.model_copy(update={"kind": "full"}))
    card = render_card(replace(full, kind=kind, is_export=True, files=("a.gguf",)))
    assert "fine-tuned in all its weights" in card
    assert "merged in" not in card


def test_card_limits_the_context_of_a_model_with_a_window(facts: CardFacts) -> None:
    gguf = replace(on_hub(facts), kind="gguf", is_export=True, files=("a.gguf",))
    card = render_card(replace(gguf, window=4096))
    assert "llama-server -m a.gguf --jinja --port 8080 -c 4096\n" in card
    assert "up to 4,096 tokens of prompt and answer" in card
    assert "sliding window" not in render_card(gguf)
