"""Bases that cannot be loaded are the user's to mend: what is wrong, where was looked, and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.corpus.store import Store
from launcher.errors import InputError
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training import loading
from launcher.training.chronicle import Chronicle
from launcher.training.loading import load_base
from launcher.training.resuming import ResumeOptions
from launcher.training.session import Task, run_training
from tests.conftest import ROOT
from tests.training.builders import (
    Document,
    adapt,
    build,
    make_config,
    make_uneven_packs,
    train_recorded,
    vary,
    write_base,
    write_store,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def with_base(plan: Plan, name: str | Path) -> Plan:
    return vary(plan, {"base.name": str(name)})


def test_a_folder_without_weights(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has a config\.json, but no weights") as refused:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert str(base) in str(refused.value)
    assert "--random-weights" in refused.value.hint


def test_weights_that_are_damaged(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be loaded") as refused:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert str(base) in str(refused.value)
    assert "hub" not in str(refused.value), "the folder was found"


def test_weights_that_are_not_whole(plan: Plan, tmp_path: Path) -> None:
    """transformers would fill them up with random numbers, and train on."""
    base = write_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of its weights: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_base(with_base(plan, base), (), "eager", CPU)


def test_a_base_that_is_nowhere(plan: Plan, tmp_path: Path) -> None:
    folders = (tmp_path / "here", tmp_path / "there")
    with pytest.raises(InputError, match="its weights were not found") as refused:
        load_base(with_base(plan, "nobody/nothing"), folders, "eager", CPU)
    told = str(refused.value)
    assert f"not in: {tmp_path / 'here' / 'nobody/nothing'}" in told
    assert f"not in: {tmp_path / 'there' / 'nobody/nothing'}" in told
    assert "not on the hub: " in told
    assert "LAUNCHER_MODELS_DIR" in refused.value.hint


def test_a_base_is_found_by_name_in_the_folders(plan: Plan, tmp_path: Path) -> None:
    write_base(tmp_path / "models" / "somebody" / "something")
    model = load_base(with_base(plan, "somebody/something"), (tmp_path / "models",), "eager", CPU)
    assert model.config.hidden_size == 32
    assert not model.training


def test_fewer_positions_than_a_sequence(plan: Plan, store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", make_config(max_position_embeddings=48))
    with pytest.raises(InputError, match="the model has 48 positions, and the packs have 64") as refused:
        build(with_base(plan, base), store, tmp_path)
    assert refused.value.hint == "--set training.config.max_seq_length=48"


def train_whole(plan: Plan, store: Store, root: Path, vocab_size: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(root)
    task = Task(plan=plan, paths=paths, store=store, folders=(), vocab_size=vocab_size, options=ResumeOptions())
    run_training(task, Chronicle(paths, is_main=True))


def test_tokens_that_the_base_has_no_embedding_for(plan: Plan, tmp_path: Path) -> None:
    """Found before any kernel sees them: there it would be an error that nobody understands."""
    strange = Document(ids=(5, 6, 150, 7), trained=(0, 0, 1, 1))
    store = write_store(tmp_path / "store", [*make_uneven_packs(), [strange, strange, strange]])
    with pytest.raises(InputError, match=r"the tokenizer makes token 150, and .* has embeddings for 128") as refused:
        train_whole(vary(plan, {"schedule.max_steps": 1}), store, tmp_path / "run", vocab_size=151)
    assert "different models" in refused.value.hint


def test_a_larger_tokenizer_is_no_error_where_its_tokens_are_not_used(plan: Plan, store: Store, tmp_path: Path) -> None:
    """As with Qwen: names are reserved in the tokenizer that no row ever uses."""
    train_whole(vary(plan, {"schedule.max_steps": 1}), store, tmp_path / "run", vocab_size=151)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_random_weights_need_a_config_alone(plan: Plan, store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    drawn = vary(with_base(plan, base), {"random_weights": True, "schedule.max_steps": 2})
    first = train_recorded(build(drawn, store, tmp_path / "first")).losses
    assert train_recorded(build(drawn, store, tmp_path / "second")).losses == first


def test_the_embedded_base_is_the_same_everywhere(plan: Plan) -> None:
    """Read from its file, whatever was drawn before; and whoever draws next is not disturbed."""
    tiny = with_base(plan, "launcher/tiny")
    torch.manual_seed(1)
    first = load_base(tiny, (), "eager", CPU)
    after = torch.rand(1)
    torch.manual_seed(2)
    second = load_base(tiny, (), "eager", CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    kept = load_file(ROOT / "launcher/tiny/model.safetensors")
    weights = first.state_dict()
    assert all(torch.equal(weights[name], weight.to(weights[name].dtype)) for name, weight in kept.items())
    drawn = load_base(vary(tiny, {"random_weights": True}), (), "eager", CPU).state_dict()
    assert not torch.equal(drawn["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])


def test_an_embedded_base_that_is_damaged_is_told(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "launcher/tiny", tmp_path / "tiny")
    monkeypatch.setattr(loading, "TINY_BASE_FOLDER", tmp_path / "tiny")
    tiny, file = with_base(plan, "launcher/tiny"), tmp_path / "tiny" / "model.safetensors"
    weights = load_file(ROOT / "launcher/tiny/model.safetensors")
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_base(tiny, (), "eager", CPU)
    weights.pop("model.norm.weight")
    save_file(weights, file)
    with pytest.raises(InputError, match=r"lacks 1 of its weights: model\.norm\.weight"):
        load_base(tiny, (), "eager", CPU)
    file.unlink()
    with pytest.raises(InputError, match="cannot be loaded"):
        load_base(tiny, (), "eager", CPU)


def test_the_dtype_is_the_planned_one(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    assert json.loads((base / "config.json").read_text())["dtype"] == "float32"
    halved = vary(with_base(plan, base), {**adapt("full"), "precision.base_dtype": "bf16"})
    model = load_base(halved, (), "eager", CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
