"""The catalogue of bases against transformers' own models on the meta device, against known totals, and by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base_models.catalogue import (
    BASES,
    TINY_BASE_NAME,
    find_config,
    get_hub_cache,
    load_config,
    lookup_base,
    suggest_bases,
)
from launcher.base_models.shapes import ModelShape, make_shape
from launcher.core.errors import InputError

# Parameters of the published models, tied matrices counted once: held also where transformers is not installed.
KNOWN_TOTALS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}


def _distinct() -> list[str]:
    """One name for each shape: names that share their sizes would build the same model twice."""
    by_sizes = {
        frozenset((key, value) for key, value in keys.items() if key != "max_position_embeddings"): name
        for name, keys in reversed(list(BASES.items()))
    }
    return sorted(by_sizes.values())


def _shape(name: str) -> ModelShape:
    return make_shape(BASES[name], name, "catalogue")


@pytest.mark.parametrize("name", _distinct())
def test_every_entry_matches_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**BASES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shape = _shape(name)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    linears = {
        (path.rsplit(".", 1)[-1], module.in_features, module.out_features, module.bias is not None)
        for path, module in model.model.layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linears == {(one.name, one.in_features, one.out_features, one.has_bias) for one in shape.linears}
    assert len(linears) == len(shape.linears)
    assert (shape.num_layers, shape.max_positions) == (len(model.model.layers), config.max_position_embeddings)


@pytest.mark.parametrize(("name", "total"), KNOWN_TOTALS.items())
def test_parameter_counts_match_published_models(name: str, total: int) -> None:
    assert _shape(name).num_parameters == total


def test_the_tiny_base_is_tiny() -> None:
    shape = _shape(TINY_BASE_NAME)
    assert shape.model_type == "qwen3"
    assert shape.tied_embeddings
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions) == (6, 256, 4096, 4096)
    assert shape.num_parameters < 10_000_000


def test_last_components_are_unique() -> None:
    short = [name.rsplit("/", 1)[-1].lower() for name in BASES]
    assert len(short) == len(set(short))


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen/qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("unsloth/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("F:/Node/hivellm/expert/models/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        (r"F:\Node\hivellm\expert\models\Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("models/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B-Base"),
        ("Qwen3-32B-Instruct", "Qwen/Qwen3-32B"),
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("gemma-3-1b", "google/gemma-3-1b-it"),
        ("Phi-4-mini", "microsoft/Phi-4-mini-instruct"),
        ("SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B"),
        (TINY_BASE_NAME, TINY_BASE_NAME),
    ],
)
def test_base_is_found_by_usual_names(name: str, same_as: str) -> None:
    assert lookup_base(name) == BASES[same_as]


@pytest.mark.parametrize("name", ["", "/", "Qwen3-1.5B", "Qwen3", "instruct", "Mistral-7B", "Qwen3-0.6B-GGUF"])
def test_unknown_base_is_not_guessed(name: str) -> None:
    assert lookup_base(name) is None


def test_a_size_with_two_context_lengths_is_not_guessed() -> None:
    assert lookup_base("Qwen2.5-7B-Chat") is None  # the base reads 131,072 positions, the tuned model 32,768


def test_close_names_come_best_first(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-1.6B").mkdir()
    (tmp_path / "Qwen3-1.6B" / "config.json").write_text("{}")
    assert suggest_bases("Qwen3-1.5B")[0] == "Qwen/Qwen3-1.7B"
    assert "Qwen3-1.6B" in suggest_bases("Qwen3-1.5B", [tmp_path, tmp_path / "missing"])
    assert suggest_bases("a completely different thing") == ()


def _snapshot(cache: Path, repository: str, revision: str, marker: int) -> Path:
    folder = cache / repository / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"marker": marker}))
    os.utime(folder, (marker, marker))
    return folder / "config.json"


def test_the_cache_gives_the_snapshot_of_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    old = _snapshot(tmp_path, "models--acme--Widget-1B", "aaa", 1)
    new = _snapshot(tmp_path, "models--acme--Widget-1B", "bbb", 2)
    assert find_config("acme/Widget-1B", []) == new
    (tmp_path / "models--acme--Widget-1B" / "refs").mkdir()
    (tmp_path / "models--acme--Widget-1B" / "refs" / "main").write_text("aaa\n")
    assert find_config("acme/Widget-1B", []) == old
    assert find_config("D:/models/widget-1b", []) == old
    assert find_config("other/Widget-1B", []) is None


def test_two_cached_models_of_one_short_name_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    _snapshot(tmp_path, "models--acme--Widget-1B", "aaa", 1)
    _snapshot(tmp_path, "models--copy--Widget-1B", "aaa", 1)
    assert find_config("Widget-1B", []) is None
    assert find_config("copy/Widget-1B", []) is not None


def test_cache_is_where_huggingface_hub_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert get_hub_cache() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_hub_cache() == tmp_path / "huggingface/hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert get_hub_cache() == tmp_path / "home/hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert get_hub_cache() == tmp_path / "cache"


@pytest.mark.parametrize("name", ["", "/", "..", "x" * 5000, "nul\0byte", "~no-such-user/model"])
def test_invalid_path_is_not_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert find_config(name, [tmp_path]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": }', "line 2, column 7"),
        (b"", "line 1, column 1"),
        (b"[1, 2]", "contains a list instead of a JSON object"),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        (b" " * (5 * 1024**2), "larger than 4 MiB"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "cannot be read"),
    ],
)
def test_broken_config_error_names_the_position(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_config(tmp_path / "config.json")


@pytest.mark.process
def test_the_catalogues_import_nothing_heavy() -> None:
    code = (
        "import sys, launcher.base_models.catalogue, launcher.hardware.gpu_catalogue\n"
        "import launcher.base_models.shapes, launcher.hardware.probe\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
