"""Shapes from config.json: equal to what transformers builds, and clear about what cannot be read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launcher.base_models.shapes import ModelShape, load_shape, make_shape
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
KEY_VALUE_DEFAULTS = {"qwen2": 32, "qwen3": 32, "mistral": 8, "gemma": 16, "gemma2": 4, "gemma3_text": 4, "smollm3": 4}
MODEL_TYPES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "phi", "gemma", "gemma2", "gemma3_text", "smollm3"]


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
    if model_type == "phi":
        optional["qk_layernorm"] = draw(st.booleans())
    else:
        optional["head_dim"] = draw(st.sampled_from([8, 16, 32]))
    kept = draw(st.sets(st.sampled_from(sorted(optional))))
    assume("num_key_value_heads" in kept or heads % KEY_VALUE_DEFAULTS.get(model_type, 1) == 0)
    return config | {key: value for key, value in optional.items() if key in kept}


def _meta_model(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the defaults exceed small vocabularies
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config, **token_ids))
    model.tie_weights()
    return model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_shape_matches_transformers(model_type: str, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    config = data.draw(_configs(model_type))
    model, shape = _meta_model(config), make_shape(config, "x", "config")
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = model.model.layers[0]
    assert shape.layer_parameters == sum(parameter.numel() for parameter in layer.parameters())
    linears = {
        (path.rsplit(".", 1)[-1], module.in_features, module.out_features, module.bias is not None)
        for path, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linears == {(one.name, one.in_features, one.out_features, one.has_bias) for one in shape.linears}
    assert shape.tied_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
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


def test_gemma_3_uses_its_text_config() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    architectures = ["Gemma3ForConditionalGeneration"]
    config = {"model_type": "gemma3", "architectures": architectures, "text_config": text, "vision_config": {"x": 1}}
    shape = make_shape(config, "google/gemma-3-4b-pt", "config")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert shape.num_parameters == 3_880_263_168
    assert shape.basis == "approximate"  # the vision tower is not counted
    assert shape.num_parameters == sum(parameter.numel() for parameter in _meta_model(text).parameters())


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"vocab_size": -1}, "vocab_size: must be between 1 and"),
        ({"model_type": None}, "model_type: is missing"),
        ({"model_type": 7}, "model_type: must be a name"),
        ({"num_experts": 64}, "num_experts: 64: mixture-of-experts bases are not supported (all layers must be alike"),
        ({"num_local_experts": 8}, "num_local_experts: 8: mixture-of-experts"),
        ({"model_type": "llava", "text_config": {"num_experts": 8}}, "num_experts: 8: mixture-of-experts"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: encoder-decoder models are not supported"),
        ({"vision_config": {"depth": 2}}, "vision_config: models of images or sound are not supported"),
        ({"audio_config": {"depth": 2}}, "audio_config: models of images or sound are not supported"),
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
    assert "name a local folder that holds the model's config.json" in message
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
