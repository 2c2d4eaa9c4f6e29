"""Loading the base model. A failure says what is wrong, where it was searched, and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Model

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.checkpoint.resume import ResumeOptions
from launcher.training.model import base_model as loading
from launcher.training.model.base_model import load_base
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.trainer import TrainerInputs, run_training
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


def test_folder_without_weights_is_refused(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has a config\.json, but no weights") as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert str(base) in str(error.value)
    assert "--random-weights" in error.value.hint
    (base / "pytorch_model.bin").touch()
    with pytest.raises(InputError) as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert "are in pytorch_model.bin, and training loads *.safetensors" in error.value.hint


def test_base_with_missing_shards_is_refused_with_their_names(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").rename(base / "model-1.safetensors")
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(InputError, match=r"lacks model-2\.safetensors and 1 more of its index; download it again"):
        load_base(with_base(plan, base), (), "eager", CPU)


def test_damaged_weights_are_refused(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be loaded") as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert str(base) in str(error.value)
    assert "Hub" not in str(error.value), "the folder was found"


def test_incomplete_weights_are_refused(plan: Plan, tmp_path: Path) -> None:
    """transformers would initialize them randomly and continue."""
    base = write_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of its weights: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_base(with_base(plan, base), (), "eager", CPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "unknown"}, "KeyError: 'unknown'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "Missing required keys in `rope_parameters`"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"rms_norm_eps": None}, "expected float, got NoneType"),
    ],
)
def test_config_that_transformers_does_not_accept_is_refused(
    plan: Plan, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    base = write_base(tmp_path / "base")
    change_config(base, changes)
    with pytest.raises(InputError, match="cannot be loaded") as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert reason in error.value.title


def change_config(base: Path, changes: dict[str, object]) -> None:
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_weights_of_other_sizes_are_refused(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    change_config(base, {"vocab_size": 140})
    with pytest.raises(InputError, match=r"have other sizes than config\.json says") as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert any("[128, 32], not [140, 32]" in problem.what for problem in error.value.problems)


def test_code_of_a_base_needs_trust(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    change_config(base, {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.M"}})
    with pytest.raises(InputError, match="is not trusted") as error:
        load_base(with_base(plan, base), (), "eager", CPU)
    assert "trust_remote_code" in error.value.hint


def test_outputs_that_a_config_asks_for_are_ignored(plan: Plan, store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    outputs: dict[str, object] = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    expected = train_recorded(build(vary(plan, {"base.name": str(base)}), store, tmp_path / "run", is_checked=True))
    change_config(base, outputs)
    ours = train_recorded(build(vary(plan, {"base.name": str(base)}), store, tmp_path / "again", is_checked=True))
    assert ours.losses == expected.losses


class _WithoutKeywords(Qwen3Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache)


def test_decoder_without_further_keyword_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    """As in the own code of older models."""
    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3Model", _WithoutKeywords)
    with pytest.raises(InputError, match="takes no further keyword arguments"):
        build(plan, store, tmp_path / "run")


def test_missing_base_lists_searched_places(plan: Plan, tmp_path: Path) -> None:
    folders = (tmp_path / "here", tmp_path / "there")
    with pytest.raises(InputError, match="weights not found") as error:
        load_base(with_base(plan, "unknown/nothing"), folders, "eager", CPU)
    message = str(error.value)
    assert f"not in: {tmp_path / 'here' / 'unknown/nothing'}" in message
    assert f"not in: {tmp_path / 'there' / 'unknown/nothing'}" in message
    assert "not downloaded: the Hub cannot be reached: " in message
    assert "LAUNCHER_MODELS_DIR" in error.value.hint


def test_base_is_found_by_name_in_the_folders(plan: Plan, tmp_path: Path) -> None:
    write_base(tmp_path / "models" / "somebody" / "something")
    model = load_base(with_base(plan, "somebody/something"), (tmp_path / "models",), "eager", CPU)
    assert model.config.hidden_size == 32
    assert not model.training


def test_sequence_longer_than_positions_is_refused(plan: Plan, store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", make_config(max_position_embeddings=48))
    with pytest.raises(InputError, match="the model has 48 positions, fewer than the sequence length 64") as error:
        build(with_base(plan, base), store, tmp_path, is_checked=True)
    assert error.value.hint == "--set training.config.max_seq_length=48"


def train_whole(plan: Plan, store: Store, root: Path, vocab_size: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(root)
    task = TrainerInputs(
        plan=plan, paths=paths, store=store, folders=(), vocab_size=vocab_size, options=ResumeOptions()
    )
    run_training(task, RunRecorder(paths, is_main=True))


def test_tokens_without_embedding_are_refused(plan: Plan, tmp_path: Path) -> None:
    """Checked in advance, because the error in a kernel is hard to understand."""
    strange = Document(ids=(5, 6, 150, 7), trained=(0, 0, 1, 1))
    store = write_store(tmp_path / "store", [*make_uneven_packs(), [strange, strange, strange]])
    with pytest.raises(InputError, match=r"the data contains token 150, but .* has only 128 embeddings") as error:
        train_whole(vary(plan, {"schedule.max_steps": 1}), store, tmp_path / "run", vocab_size=151)
    assert "different models" in error.value.hint


def test_larger_tokenizer_with_unused_tokens_is_accepted(plan: Plan, store: Store, tmp_path: Path) -> None:
    """As with Qwen, whose tokenizer reserves tokens that no row uses."""
    train_whole(vary(plan, {"schedule.max_steps": 1}), store, tmp_path / "run", vocab_size=151)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_random_weights_need_only_a_config(plan: Plan, store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    drawn = vary(with_base(plan, base), {"random_weights": True, "schedule.max_steps": 2})
    first = train_recorded(build(drawn, store, tmp_path / "first", is_checked=True)).losses
    assert train_recorded(build(drawn, store, tmp_path / "second", is_checked=True)).losses == first


def test_bundled_base_does_not_depend_on_the_rng(plan: Plan) -> None:
    """Loading it does not change the RNG either."""
    tiny = with_base(plan, "launcher/tiny")
    torch.manual_seed(1)
    first = load_base(tiny, (), "eager", CPU)
    after = torch.rand(1)
    torch.manual_seed(2)
    second = load_base(tiny, (), "eager", CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    kept = load_file(ROOT / "launcher/base_models/tiny_base/model.safetensors")
    weights = first.state_dict()
    assert all(torch.equal(weights[name], weight.to(weights[name].dtype)) for name, weight in kept.items())
    drawn = load_base(vary(tiny, {"random_weights": True}), (), "eager", CPU).state_dict()
    assert not torch.equal(drawn["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])


def test_damaged_bundled_base_is_refused(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "launcher/base_models/tiny_base", tmp_path / "tiny")
    monkeypatch.setattr(loading, "TINY_BASE_FOLDER", tmp_path / "tiny")
    tiny, file = with_base(plan, "launcher/tiny"), tmp_path / "tiny" / "model.safetensors"
    weights = load_file(ROOT / "launcher/base_models/tiny_base/model.safetensors")
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


def test_base_has_the_planned_dtype(plan: Plan, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    assert json.loads((base / "config.json").read_text())["dtype"] == "float32"
    halved = vary(with_base(plan, base), {**adapt("full"), "precision.base_dtype": "bf16"})
    model = load_base(halved, (), "eager", CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
