"""Shapes from config.json: equal to what transformers builds, and clear about what cannot be read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launcher.base_models.families import FAMILIES
from launcher.base_models.shapes import ModelShape, load_shape, make_shape
from launcher.base_models.weight_index import load_weight_index
from launcher.core.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
# What a config class takes for an absent key, where it is not simply the number of heads.
KEY_VALUE_DEFAULTS: dict[str, Any] = {
    name: family.defaults.get("num_key_value_heads", 1) for name, family in FAMILIES.items()
}
NO_HEAD_DIM = {
    "phi",
    "gpt_neox",
    "helium",
    "olmoe",
}  # always hidden_size / heads; helium's output projection expects that
NO_GROUPS = {"gpt_neox"}


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty-cache"))


@st.composite
def _configs(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Small configurations of one family, with optional keys sometimes absent."""
    heads = draw(st.sampled_from([4, 8, 16, 32]))
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": heads * draw(st.sampled_from([8, 16, 24])),
        "intermediate_size": draw(st.integers(1, 40)) * 8,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "vocab_size": draw(st.integers(8, 300)),
    }
    optional: dict[str, Any] = {
        "num_key_value_heads": draw(st.sampled_from([count for count in (1, 2, 4, 8, 16, 32) if heads % count == 0])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "max_position_embeddings": draw(st.integers(16, 4096)),
    }
    optional |= {key: draw(st.booleans()) for key in FAMILIES[model_type].flags}
    if model_type not in NO_HEAD_DIM:
        optional["head_dim"] = draw(st.sampled_from([8, 16, 32]))
    if FAMILIES[model_type].experts is not None:
        aliases = ["num_local_experts"] if model_type == "granitemoe" else ["num_experts", "num_local_experts"]
        config |= {draw(st.sampled_from(aliases)): draw(st.integers(8, 12))}
        config |= {"num_experts_per_tok": draw(st.integers(1, 8)), "moe_intermediate_size": draw(st.integers(1, 9)) * 8}
    if model_type in NO_GROUPS:
        del optional["num_key_value_heads"]
    kept = draw(st.sets(st.sampled_from(sorted(optional))))
    assume("num_key_value_heads" in kept or heads % KEY_VALUE_DEFAULTS[model_type] == 0)
    return config | {key: value for key, value in optional.items() if key in kept}


def _meta_model(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the defaults exceed small vocabularies
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config, **token_ids))
    model.tie_weights()
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_shape_matches_transformers(model_type: str, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    config = data.draw(_configs(model_type))
    model, shape = _meta_model(config), make_shape(config, "x", "config")
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = model.get_decoder().layers[0]
    assert shape.layer_parameters == sum(parameter.numel() for parameter in layer.parameters())
    linears = {
        (path.rsplit(".", 1)[-1], module.in_features, module.out_features, module.bias is not None)
        for path, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linears == {(one.name, one.in_features, one.out_features, one.has_bias) for one in shape.linears}
    assert shape.tied_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert shape.max_positions == model.config.max_position_embeddings
    assert shape.basis == "config"


def test_null_is_read_as_transformers_does() -> None:
    shape = make_shape(LLAMA | {"num_key_value_heads": None, "head_dim": None}, "x", "config")
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)


def test_unknown_architecture_is_read_as_llama_and_marked_approximate() -> None:
    known = make_shape(LLAMA, "x", "config")
    unknown = make_shape(LLAMA | {"model_type": "brandnew"}, "x", "config")
    assert unknown.basis == "approximate"
    assert unknown.num_parameters == known.num_parameters


def _gemma3(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    architectures = ["Gemma3ForConditionalGeneration"]
    return {"model_type": "gemma3", "architectures": architectures, "text_config": text, "vision_config": vision}


def test_gemma_3_of_4b_has_its_published_parameters() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27}
    shape = make_shape(_gemma3(text, vision | {"patch_size": 14}), "google/gemma-3-4b-pt", "config")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert shape.num_parameters == 4_300_079_472
    assert shape.num_parameters - shape.frozen_parameters == 3_880_263_168
    assert shape.basis == "config"


def test_vision_tower_matches_transformers() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 2}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = _gemma3(text, vision | {"image_size": 32, "patch_size": 8, "vision_use_head": False})
    model = _meta_model(config)
    frozen = sum(p.numel() for name, p in model.named_parameters() if "language_model" not in name)
    frozen -= model.lm_head.weight.numel() if "lm_head.weight" in dict(model.named_parameters()) else 0
    shape = make_shape(config, "x", "config")
    assert shape.frozen_parameters == frozen
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_all_problems_of_a_config_are_reported_together() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 0,
        "num_attention_heads": "four",
        "num_hidden_layers": 2.5,
        "vocab_size": True,
        "max_position_embeddings": 10**12,
        "tie_word_embeddings": "yes",
    }
    with pytest.raises(InputError) as caught:
        make_shape(config, "acme/broken", "config")
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert {problem.where for problem in caught.value.problems} == {*config, "intermediate_size"} - {"model_type"}
    assert "acme/broken" in message
    assert "hidden_size: must be between 1 and" in message
    assert 'num_attention_heads: must be a whole number, not "four"' in message
    assert "intermediate_size: is missing" in message
    assert 'tie_word_embeddings: must be true or false, not "yes"' in message
    assert "hint: " in message


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_key_value_heads"])
def test_wrong_size_is_the_only_problem_that_is_reported(key: str) -> None:
    with pytest.raises(InputError) as caught:
        make_shape(LLAMA | {key: -(10**200)}, "acme/broken", "config")
    assert [problem.where for problem in caught.value.problems] == [key]
    assert len(caught.value.problems[0].what) < 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"vocab_size": -1}, "vocab_size: must be between 1 and"),
        ({"model_type": None}, "model_type: is missing"),
        ({"model_type": 7}, "model_type: must be a name"),
        ({"model_type": "falcon_h1", "mamba_d_state": 16}, "mamba_d_state: state-space layers (Mamba) are not"),
        ({"model_type": "falcon_mamba", "state_size": 16}, "state_size: state-space layers (Mamba) are not"),
        ({"model_type": "youtu", "kv_lora_rank": 512}, "kv_lora_rank: multi-head latent attention is not supported"),
        (
            {"num_experts": 64},
            "num_experts: 64, but llama is not supported as a mixture of experts (supported: gpt_oss, ",
        ),
        ({"num_local_experts": 8}, "num_local_experts: 8, but llama is not supported"),
        ({"model_type": "llava", "text_config": {"num_experts": 8}}, "num_experts: 8, but llava is not supported"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers: some layers have no experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: some layers have no experts"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: the weights are already quantized (awq)",
        ),
        ({"model_type": "stablelm"}, "model_type: stablelm: transformers does not pass document boundaries"),
        ({"model_type": "falcon"}, "model_type: falcon: its decoder has no `layers`"),
        ({"model_type": "gpt2", "hidden_size": None}, "model_type: gpt2: its layers are not built like Llama's"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: encoder-decoder models are not supported"),
        ({"vision_config": {"depth": 2}}, "vision_config: vision and audio models are not supported"),
        ({"audio_config": {"depth": 2}}, "audio_config: vision and audio models are not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention: its tokens"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention: its tokens"),
        ({"model_type": "lfm2", "conv_L_cache": 3}, "conv_L_cache: convolutions and linear attention are not"),
        ({"model_type": "qwen3_5_text", "linear_num_key_heads": 2}, "linear_num_key_heads: convolutions and linear"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, "layer_types: linear_attention: all layers"),
        ({"is_causal": False}, "is_causal: its tokens attend to later ones"),
        ({"architectures": ["BertForMaskedLM"]}, "architectures: BertForMaskedLM is not a causal language model"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention: all layers"),
    ],
)
def test_unsupported_models_are_refused_with_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_shape(LLAMA | change, "x", "config")
    assert message in str(caught.value)
    assert caught.value.hint


def test_dense_models_may_carry_an_expert_key() -> None:
    assert make_shape(LLAMA | {"num_local_experts": 0, "num_experts": 1}, "x", "config").num_layers == 2


@given(
    key=st.sampled_from(sorted(LLAMA)), value=st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.none())
)
def test_any_value_gives_a_shape_or_an_input_error(key: str, value: object) -> None:
    with contextlib.suppress(InputError):
        assert make_shape(LLAMA | {key: value}, "x", "config").num_parameters > 0


def _save(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_and_its_config_are_the_same_base(tmp_path: Path) -> None:
    folder = _save(tmp_path / "mine", LLAMA)
    by_folder, by_file = load_shape(str(folder), []), load_shape(str(folder / "config.json"), [])
    assert by_folder.basis == "config"
    assert by_folder.name == str(folder)
    assert by_folder.num_parameters == by_file.num_parameters


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen/Qwen3-0.6B", "F:/Node/models/Qwen3-0.6B", r"F:\Node\Qwen3-0.6B"])
def test_a_folder_under_search_comes_before_the_catalogue(name: str, tmp_path: Path) -> None:
    assert load_shape(name, [tmp_path]).basis == "catalogue"
    _save(tmp_path / "Qwen3-0.6B", LLAMA)
    found = load_shape(name, [tmp_path / "nowhere", tmp_path])
    assert (found.basis, found.hidden_size, found.name) == ("config", 64, name)


def test_folder_may_be_under_its_owner(tmp_path: Path) -> None:
    _save(tmp_path / "acme" / "Widget", LLAMA)
    assert load_shape("acme/Widget", [tmp_path]).basis == "config"


def test_the_hub_cache_comes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    _save(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc", LLAMA)
    assert load_shape("Qwen/Qwen3-0.6B", []).basis == "config"


def test_a_folder_without_a_config_does_not_hide_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    assert load_shape(str(tmp_path / "Qwen3-0.6B"), []).basis == "catalogue"


def test_unknown_base_error_suggests_close_names(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_shape("F:/Node/hivellm/expert/models/Qwen3-1.5B", [tmp_path])
    message = str(caught.value)
    assert "was not found" in message
    assert "did you mean Qwen/Qwen3-1.7B" in message
    assert str(tmp_path / "Qwen3-1.5B") in message
    assert "Hugging Face cache" in message
    assert "catalogue: no base model of this name" in message
    assert "name a local folder that contains the model's config.json" in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", " ", "/", "\0", "nothing like it", "x" * 5000])
def test_strange_names_are_not_found_either(name: str) -> None:
    with pytest.raises(InputError, match="was not found"):
        load_shape(name, [])


def test_broken_config_error_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "hidden_size": 64,\n}')
    with pytest.raises(InputError, match="line 3, column 1"):
        load_shape(str(tmp_path), [])


def test_shape_survives_json_round_trip() -> None:
    shape = load_shape("Qwen3-0.6B", [])
    assert ModelShape.model_validate_json(shape.model_dump_json()) == shape
    assert shape.linear_names == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _save_weights(folder: Path, config: dict[str, Any], shard_size: str = "1GB") -> ModelShape:
    """Write a model with random weights, and return its shape."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config, **token_ids))
    model.to(torch.bfloat16).save_pretrained(str(folder), max_shard_size=shard_size)
    return load_shape(str(folder), [])


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_unknown_architecture_takes_linear_layers_from_its_weights(tmp_path: Path, shard_size: str) -> None:
    """Persimmon fuses its projections; nothing here knows the family."""
    config = {**LLAMA, "model_type": "persimmon"}
    shape = _save_weights(tmp_path, config, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert shape.basis == "config"
    assert set(shape.linear_names) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert {(one.name, one.in_features, one.out_features) for one in shape.linears} >= {("query_key_value", 64, 192)}
    assert shape.num_parameters == sum(parameter.numel() for parameter in _meta_model(config).parameters())


@pytest.mark.parametrize("model_type", ["persimmon", "llama"])
def test_names_come_from_the_index_if_weights_are_not_downloaded(tmp_path: Path, model_type: str) -> None:
    """A config of Llama with the weights of another family, as remote code may have."""
    whole = _save_weights(tmp_path, {**LLAMA, "model_type": "persimmon"}, "20KB")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": model_type}))
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / weight_map["model.layers.1.mlp.dense_4h_to_h.weight"]).unlink()  # the first layer tells its shape
    assert set(load_shape(str(tmp_path), []).linear_names) == set(whole.linear_names)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    shape = load_shape(str(tmp_path), [])
    assert shape.basis == "approximate"
    assert set(shape.indexed_names) == set(whole.linear_names)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_weights_and_family_table_agree(tmp_path: Path, model_type: str) -> None:
    config = {**LLAMA, "model_type": model_type, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": False}
    if FAMILIES[model_type].experts is not None:
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape, expected = _save_weights(tmp_path, config), make_shape(config, str(tmp_path), "config")
    if expected.experts is not None:  # files have one tensor per expert, or other names
        assert shape == expected
        return
    index = load_weight_index(tmp_path)
    assert shape == expected
    assert index is not None
    assert sorted(index.linears, key=repr) == sorted(expected.linears, key=repr)
    counts = (index.layer_parameters, index.other_parameters)
    if model_type != "apertus":  # its file has buffers, too
        assert counts == (expected.num_layers * expected.layer_parameters, expected.other_parameters)


def test_norms_of_all_heads_are_not_linear_layers(tmp_path: Path) -> None:
    """Command R+ has norm weights [heads, head_dim]."""
    config = {**LLAMA, "model_type": "cohere", "use_qk_norm": True}
    assert _save_weights(tmp_path, config) == make_shape(config, str(tmp_path), "config")


@pytest.mark.parametrize("is_downloaded", [True, False])
def test_layers_for_multi_token_prediction_are_not_decoder_layers(tmp_path: Path, is_downloaded: bool) -> None:
    """transformers ignores them; their names are those of the first decoder layers."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    expected = _save_weights(tmp_path, LLAMA)
    extra = {f"mtp.layers.0.{name}.weight": torch.zeros(64, 8) for name in ("eh_proj", "self_attn.q_proj")}
    safetensors.save_file(extra, tmp_path / "extra.safetensors")
    own = safetensors.load_file(tmp_path / "model.safetensors")
    weight_map = dict.fromkeys(extra, "extra.safetensors") | dict.fromkeys(own, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if not is_downloaded:
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "extra.safetensors").unlink()
    shape = load_shape(str(tmp_path), [])
    assert (shape.linears, shape.indexed_names) == (expected.linears, ())


def test_experts_that_only_the_weights_show_are_refused(tmp_path: Path) -> None:
    """Remote code has other keys for their number."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    config = {**LLAMA, "model_type": "mixtral", **sizes}
    _save_weights(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "brandnew", "ffn": {"experts": 4}}))
    with pytest.raises(InputError, match="weights: an unknown mixture of experts"):
        load_shape(str(tmp_path), [])


@pytest.mark.parametrize("is_downloaded", [True, False])
def test_names_of_embeddings_come_from_the_weights(tmp_path: Path, is_downloaded: bool) -> None:
    config = {**LLAMA, "model_type": "biogpt", "tie_word_embeddings": False}
    whole = _save_weights(tmp_path, config, "20KB")
    assert whole.other_parameters == _count_outside(config)
    if not is_downloaded:
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    assert load_shape(str(tmp_path), []).embedding_names == ("embed_tokens", "output_projection")


def _count_outside(config: dict[str, Any]) -> int:
    """Count the parameters outside decoder layers, embeddings and LM head."""
    model = _meta_model(config)
    parts = [model.get_input_embeddings(), model.get_output_embeddings(), *model.get_decoder().layers]
    inside = sum(parameter.numel() for part in parts for parameter in part.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) - inside


def test_attention_dropout_has_other_names(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "biogpt", "attention_probs_dropout_prob": 0.2}
    assert make_shape(config, str(tmp_path), "config").attention_dropout == 0.2


def test_weights_without_decoder_layers_are_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "roberta", "type_vocab_size": 1, "is_decoder": True}
    with pytest.raises(InputError, match="weights: no decoder layers"):
        _save_weights(tmp_path, config)


def test_weights_of_a_vision_base_have_the_decoder_layers_only(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 2}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = _gemma3(text, vision | {"image_size": 32, "patch_size": 8, "vision_use_head": False})
    shape, expected = _save_weights(tmp_path, config), make_shape(config, str(tmp_path), "config")
    assert sorted(shape.linear_names) == sorted(expected.linear_names)
    assert (shape.num_parameters, shape.frozen_parameters) == (expected.num_parameters, expected.frozen_parameters)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_unreadable_weights_leave_the_config(tmp_path: Path, content: bytes) -> None:
    folder = _save(tmp_path, LLAMA)
    (folder / "model.safetensors").write_bytes(content)
    assert load_shape(str(folder), []).linears == make_shape(LLAMA, "x", "config").linears
