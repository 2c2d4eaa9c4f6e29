"""The template follows the base model, and one row is previewed in it with its loss mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.manifest import find_manifest, load_manifest
from launcher.new_expert.proposal import Options
from launcher.new_expert.template_choice import Mask
from launcher.request.request import Request, plan_request
from tests.unit.corpus.inputs import CHAT_TEMPLATE, write_base
from tests.unit.new_expert.inputs import make, make_rows, write_rows

pytestmark = pytest.mark.long


def show(**options: Any) -> tuple[Mask, str]:
    """Return the previewed mask and its text."""
    mask = make(write_rows(make_rows()), options=Options(**options), dry_run=True).proposal.mask
    return mask, "".join(segment.text for segment in mask.segments)


@pytest.mark.parametrize(
    ("base", "template", "modules"),
    [
        ("Qwen/Qwen3-8B", "chatml", "gate_proj"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3", "o_proj"),
        ("google/gemma-2-2b-it", "tokenizer", "up_proj"),
        ("microsoft/Phi-3-mini-4k-instruct", "tokenizer", "qkv_proj"),
        ("mistralai/Mistral-7B-v0.1", "alpaca", "v_proj"),
    ],
)
def test_template_and_target_modules_follow_the_base(base: str, template: str, modules: str) -> None:
    make(write_rows(make_rows()), options=Options(base=base))
    manifest = load_manifest(find_manifest("sales")).manifest
    assert (manifest.base.name, manifest.base.prompt_template) == (base, template)
    assert modules in manifest.training.config.target_modules
    assert plan_request(Request(expert="sales")).plan.data.prompt_template in ("chatml", "tokenizer", "alpaca")


@pytest.mark.parametrize("options", [{"base": "meta-llama/Llama-3.1-8B"}, {"template": "llama3"}])
def test_preview_uses_the_template_without_the_tokenizer(options: dict[str, str]) -> None:
    mask, text = show(**options)
    assert (mask.template, mask.notes) == ("llama3", ())
    assert text.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is")
    trained = [segment.text for segment in mask.segments if segment.is_trained]
    assert len(trained) == 1
    assert trained[0].endswith(".<|eot_id|>")


@pytest.mark.parametrize(
    ("base", "template", "note"),
    [
        ("google/gemma-2-2b-it", "chatml", "shown in chatml, because the tokenizer of gemma-2-2b-it is not on this"),
        (
            "mistralai/Mistral-7B-v0.1",
            "alpaca",
            "shown with the end token of the embedded tiny base, because the tokenizer of Mistral",
        ),
    ],
)
def test_preview_in_another_template_is_noted(base: str, template: str, note: str) -> None:
    mask, _ = show(base=base)
    assert mask.template == template
    assert mask.notes[0].startswith(note)


@pytest.mark.parametrize(
    ("base", "template", "words"),
    [
        ("Qwen/Qwen3-8B", "llama3", "special tokens of Llama 3, which Qwen3-8B may not know: try chatml"),
        ("meta-llama/Llama-3.1-8B", "chatml", "special tokens of Qwen, which Llama-3.1-8B may not know: try llama3"),
        ("google/gemma-2-2b-it", "chatml", "which gemma-2-2b-it may not know: try tokenizer"),
        ("mistralai/Mistral-7B-v0.1", "chatml", "which Mistral-7B-v0.1 may not know: try alpaca"),
        ("Qwen/Qwen3-8B", "qwen3", None),
        ("Qwen/Qwen3-8B", "alpaca", None),
        ("google/gemma-2-2b-it", "tokenizer", None),
    ],
)
def test_special_tokens_of_another_family_are_noted(base: str, template: str, words: str | None) -> None:
    notes = make(write_rows(make_rows()), options=Options(base=base, template=template), dry_run=True).proposal.notes
    assert [words in note for note in notes if words] == ([] if words is None else [True])
    assert words is not None or notes == ()


def test_local_tokenizer_is_used_for_the_preview(tmp_path: Path) -> None:
    base = str(write_base(tmp_path / "Base-1B-Instruct"))
    mask, text = show(base=base, template="tokenizer")
    assert (mask.template, mask.tokenizer, mask.notes) == ("tokenizer", base, ())
    assert text.startswith("<|im_start|>user\n")
    bare = str(write_base(tmp_path / "Bare-1B", template=None))
    with pytest.raises(InputError, match=r"Bare-1B: .* has no chat template\nhint: choose another --template"):
        show(base=bare, template="tokenizer")


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", "here"])
def test_preview_is_truncated_as_in_training(base: str, tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"word {n} " * 30_000} for n in range(8)]
    name = str(write_base(tmp_path / "base")) if base == "here" else base
    mask = make(write_rows(rows), options=Options(base=name), dry_run=True).proposal.mask
    [note] = mask.notes
    length = "4,096" if base == "here" else "16,384"
    assert note.startswith(f"truncated at {length} tokens")
    assert ("(estimated)" in note) == (base != "here")
    assert base != "here" or mask.num_tokens == 4096
    assert not mask.segments[-1].text.endswith("<|im_end|>")
    assert 0 < mask.num_trained < mask.num_tokens
    assert sum(len(segment.text) for segment in mask.segments) < 80_000


def test_answers_after_the_sequence_end_are_noted() -> None:
    rows = [{"question": f"q{n}", "context": f"word {n} " * 30_000, "answer": f"a{n}"} for n in range(8)]
    proposal = make(write_rows(rows), dry_run=True).proposal
    words = "in 8 of 8 rows the answer begins after the first 16,384 tokens"
    assert any(words in note for note in proposal.notes)
    assert proposal.mask.num_trained == 0


@pytest.mark.parametrize("base", ["", " "])
def test_empty_base_name_is_refused(base: str) -> None:
    with pytest.raises(InputError, match="--base: the name is empty"):
        show(base=base)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_base_s_own_chat_template_is_taken(tmp_path: Path, file: str) -> None:
    source = None if file.endswith("jinja") else CHAT_TEMPLATE
    base = write_base(tmp_path / "base", template=source)
    if source is None:
        (base / file).write_text(CHAT_TEMPLATE)
    proposal = make(write_rows(make_rows()), options=Options(base=str(base)), dry_run=True).proposal
    assert (proposal.template.name, proposal.template.notes) == ("tokenizer", ())
    assert proposal.template.reason == f"the base's own chat template, in {file}"
