"""Commands and files for servers have the prompt, stop tokens and names of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher.corpus.documents import make_template
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.manifest import Manifest, load_manifest
from launcher.plan.model import Plan, QuantizationPlan
from launcher.training.export.gguf import name_file
from launcher.training.export.serving import render_go_template, render_modelfile, render_vllm
from launcher.training.inference.prompt import render_prompt
from tests.training.trained_run import Trained, load_plan, trained  # noqa: F401
from tests.unit.corpus.families import FAMILIES, write_family


@pytest.fixture
def plan(trained: Trained) -> Plan:  # noqa: F811
    return load_plan(trained.paths)


@pytest.fixture
def manifest(trained: Trained) -> Manifest:  # noqa: F811
    return load_manifest(trained.paths.manifest).manifest


def with_data(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"data": plan.data.model_copy(update=changes)})


def execute(template: str, *, system: str, prompt: str) -> str:
    """Fill in a template of Go with one condition, up to the answer."""
    branches = r"\{\{ if \.System \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}"
    chosen = re.sub(branches, lambda match: match[1] if system else match[2], template, flags=re.S)
    text = chosen.partition("{{ .Response }}")[0].replace("{{ .System }}", system).replace("{{ .Prompt }}", prompt)
    return text.replace('{{ "{{" }}', "{{")


@pytest.mark.parametrize("name", FAMILIES)
def test_ollama_template_gives_the_prompt_of_the_training(plan: Plan, tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = write_family(tmp_path, family)
    template = render_go_template(with_data(plan, prompt_template="tokenizer"), tokenizer)
    assert template is not None
    own = make_template("tokenizer", tokenizer)
    for system in ("", "Be brief.") if family.takes_system else ("",):
        expected = render_prompt(own, "Who?", system=system)
        # llama.cpp adds a BOS token where the tokenizer does
        cut = expected.removeprefix(family.bos or "") if family.adds_bos else expected
        assert execute(template, system=system, prompt="Who?") == cut
    assert family.end in template.partition("{{ .Response }}")[2]


def test_ollama_template_escapes_braces(plan: Plan, tmp_path: Path) -> None:
    tokenizer = write_family(tmp_path, FAMILIES["smollm"])
    source = "{% for m in messages %}{{ '{{x}}' }}{{ m.content }}<|im_end|>{% endfor %}"
    template = render_go_template(with_data(plan, prompt_template="tokenizer", chat_template=source), tokenizer)
    assert template is not None
    assert execute(template, system="", prompt="Who?").startswith("{{x}}Who?")


def test_modelfile_has_file_stop_tokens_and_context(plan: Plan, manifest: Manifest, tmp_path: Path) -> None:
    tokenizer: BaseTokenizer = write_family(tmp_path, FAMILIES["smollm"])
    ends = [tokenizer.backend.token_to_id(name) or 0 for name in ("<|im_end|>", "<|endoftext|>")]
    lines = render_modelfile(plan, manifest, tokenizer, "a-F16.gguf", ends).splitlines()
    assert lines[0] == "FROM ./a-F16.gguf"
    assert {'PARAMETER stop "<|im_end|>"', 'PARAMETER stop "<|endoftext|>"', 'LICENSE """apache-2.0"""'} <= set(lines)
    assert "PARAMETER num_ctx 4096" in lines
    assert render_modelfile(plan, manifest, tokenizer, "a-F16.gguf", ends, 2047).endswith("PARAMETER num_ctx 2047\n")


@pytest.mark.parametrize("hostile", ['x"""\nADAPTER /etc/passwd\nSYSTEM """', 'x"', "a\0b"])
def test_modelfile_omits_text_that_it_cannot_quote(
    plan: Plan, manifest: Manifest, tmp_path: Path, hostile: str
) -> None:
    tokenizer = write_family(tmp_path, FAMILIES["smollm"])
    text = render_modelfile(with_data(plan, system_prompt=hostile), manifest, tokenizer, "a-F16.gguf", [1])
    assert "ADAPTER" not in text
    assert "SYSTEM" not in text.replace(".System", "")


@pytest.mark.parametrize("expert", ["../../etc/x", "a b", "ä", "...", "-rf"])
def test_file_names_stay_in_the_folder(expert: str) -> None:
    name = name_file(expert, "q4_k_m")
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*-Q4_K_M\.gguf", name)


@pytest.mark.parametrize(
    ("rank", "init", "limit"), [(4, None, 8), (16, None, 16), (24, None, 32), (16, "pissa_niter_16", 32)]
)
def test_vllm_command_names_rank_base_and_template(plan: Plan, rank: int, init: str | None, limit: int) -> None:
    adapter = plan.adapter.model_copy(update={"rank": rank, "init_lora_weights": init})
    command = render_vllm(plan.model_copy(update={"adapter": adapter}), "Qwen/Qwen3-0.6B", is_adapter=True)
    assert command.startswith("vllm serve Qwen/Qwen3-0.6B ")
    assert f"--max-lora-rank {limit} --lora-modules neo4j=." in command
    assert "--chat-template chat_template.jinja" in command  # of the training: chatml, not the base's
    assert "--quantization" not in command
    nf4 = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
    quantized = plan.model_copy(update={"quantization": nf4})
    assert " --quantization bitsandbytes " in render_vllm(quantized, "Qwen/Qwen3-0.6B", is_adapter=True)
    assert "--quantization" not in render_vllm(quantized, "Qwen/Qwen3-0.6B", is_adapter=False)
    assert "--chat-template" not in render_vllm(
        with_data(plan, prompt_template="tokenizer"), "Qwen/Qwen3-0.6B", is_adapter=True
    )
