"""Trained experts of every family can be loaded."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, LlamaConfig

from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.core.errors import InputError
from launcher.corpus.store import Store
from launcher.manifest import load_manifest
from launcher.plan import Plan
from launcher.runs.record import Status
from launcher.training.checkpoint.weights import save_weights
from launcher.training.inference.load import load_from_folder, load_trained_model
from launcher.training.inference.trained_run import TrainedRun, check_adapter, load_trained_run
from tests.made_runs import MadeRun, write_run
from tests.training.builders import SIZES, adapt, build, make_plan, write_base


def finish_run(plan: Plan, store: Store, folder: Path) -> TrainedRun:
    run = build(plan, store, folder)
    save_weights(run, run.paths.adapter)
    manifest = load_manifest(Path(plan.base.name).parent / "manifest.json").manifest
    return TrainedRun(paths=run.paths, plan=plan, manifest=manifest, outcome=None)


def test_base_with_attention_softcap_can_be_loaded(store: Store, tmp_path: Path) -> None:
    """transformers refuses Gemma 2 with SDPA, which has no softcap."""
    base = write_base(tmp_path / "gemma2" / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    plan = make_plan(base, {"attention.backend": "eager", "attention.fallbacks": ()})
    model: Any = load_trained_model(finish_run(plan, store, tmp_path / "run"), "fp32", torch.device("cpu"))
    assert model.get_base_model().config._attn_implementation == "eager"


@pytest.mark.parametrize(("casts_adapter", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_dtype_of_the_adapter(store: Store, tmp_path: Path, casts_adapter: bool, dtype: torch.dtype) -> None:
    """Merging needs it in FP32; generation computes in BF16 as training does."""
    base = write_base(tmp_path / "llama" / "base", LlamaConfig(**SIZES))
    run = finish_run(make_plan(base), store, tmp_path / "run")
    model = load_trained_model(run, "bf16", torch.device("cpu"), casts_adapter=casts_adapter)
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" in name} == {dtype}
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_kernel_in_the_config_of_a_model_is_not_downloaded(tmp_path: Path, key: str) -> None:
    folder = write_base(tmp_path / "model", LlamaConfig(**SIZES))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: "kernels-community/flash-attn2"}))
    assert load_from_folder(folder, "fp32", torch.device("cpu")).config._attn_implementation == "sdpa"


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    shutil.copy(TINY_BASE_FOLDER / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"cannot be loaded: .*no file named model\.safetensors"):
        load_from_folder(tmp_path, "fp32", torch.device("cpu"))


def set_targets(run: TrainedRun, **changes: object) -> None:
    file = run.paths.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    check_adapter(run.paths.adapter)


def adapted_modules(run: TrainedRun) -> set[str]:
    model = load_trained_model(run, "fp32", torch.device("cpu"))
    return {name.rpartition(".lora_A")[0] for name, _ in model.named_modules() if name.endswith(".lora_A")}


@pytest.fixture
def llama(store: Store, tmp_path: Path) -> TrainedRun:
    base = write_base(tmp_path / "llama" / "base", LlamaConfig(**SIZES))
    return finish_run(make_plan(base), store, tmp_path / "run")


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k|v|o|gate|up|down)_proj",
        r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj",
        # As Unsloth writes it.
        r"(?:.*?(?:language|text|layers).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        "all-linear",
    ],
)
def test_targets_may_be_a_pattern(llama: TrainedRun, pattern: str) -> None:
    by_names = adapted_modules(llama)
    assert by_names
    set_targets(llama, target_modules=pattern)
    assert adapted_modules(llama) == by_names
    assert not any("lm_head" in name for name in by_names)


def test_pattern_matches_whole_paths_as_in_peft(llama: TrainedRun) -> None:
    set_targets(llama, target_modules=r".*layers\.0.*proj", exclude_modules=r".*\.(mlp|self_attn)\.(o|down)_proj")
    paths = {name.removeprefix("base_model.model.model.") for name in adapted_modules(llama)}
    expected = {f"self_attn.{name}_proj" for name in "qkv"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert paths == {f"layers.0.{name}" for name in expected}
    set_targets(llama, target_modules="q_proj")
    with pytest.raises(InputError, match=r"not compatible with .*: target_modules 'q_proj' matches no module"):
        adapted_modules(llama)


def test_pattern_that_never_ends_is_interrupted(llama: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.training.inference.load.PATTERN_SECONDS", 0.2)
    set_targets(llama, target_modules="(.*)*(.*)*x$")
    began = time.monotonic()
    with pytest.raises(InputError, match=r"target_modules takes more than 0\.2 s to match"):
        adapted_modules(llama)
    assert time.monotonic() - began < 20


def change_weights(run: TrainedRun, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    file = run.paths.adapter / "adapter_model.safetensors"
    weights = load_file(file)
    first = min(weights)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return first


def test_adapter_with_missing_weights_is_refused(llama: TrainedRun) -> None:
    """PEFT only warns, and leaves the modules without them as they were initialized."""
    change_weights(llama, lambda weights: weights.pop(min(weights)))
    with pytest.raises(InputError, match=r"adapter is incomplete: weights of modules .* are missing"):
        load_trained_model(llama, "fp32", torch.device("cpu"))


def test_adapter_with_weights_of_other_modules_is_loaded_with_a_warning(
    llama: TrainedRun, caplog: pytest.LogCaptureFixture
) -> None:
    name = "base_model.model.model.layers.99.\x1b[31m.lora_A.weight"
    change_weights(llama, lambda weights: weights.update({name: torch.zeros(2, 2)}))
    load_trained_model(llama, "fp32", torch.device("cpu"))
    (message,) = caplog.messages
    assert message.endswith(r"1 weights are not used, such as base_model.model.model.layers.99.\x1b[31m.lora_A.weight")


def test_complete_adapter_is_loaded_without_a_warning(llama: TrainedRun, caplog: pytest.LogCaptureFixture) -> None:
    load_trained_model(llama, "fp32", torch.device("cpu"))
    assert caplog.messages == []


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_adapter_with_nonfinite_weights_is_refused(llama: TrainedRun, value: float) -> None:
    first = change_weights(llama, lambda weights: weights[min(weights)].view(-1)[:1].fill_(value))
    with pytest.raises(InputError, match=rf"{re.escape(first)} has NaN or infinite values"):
        load_trained_model(llama, "fp32", torch.device("cpu"))


def test_model_folder_with_missing_weights_is_refused(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "model", LlamaConfig(**SIZES))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"is incomplete: 1 weights are missing, such as model\.layers\.1\.mlp"):
        load_from_folder(folder, "fp32", torch.device("cpu"))


@pytest.mark.parametrize("pattern", ["(q_proj", "*", "(" * 2000 + ")" * 2000])
def test_invalid_pattern_is_refused(llama: TrainedRun, pattern: str) -> None:
    with pytest.raises(InputError, match=r"adapter_config\.json: target_modules .* is not a usable regular expression"):
        set_targets(llama, target_modules=pattern)


def test_feedforward_modules_of_ia3_may_be_a_pattern(store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "llama" / "base", LlamaConfig(**SIZES))
    run = finish_run(make_plan(base, adapt("ia3")), store, tmp_path / "run")
    set_targets(run, target_modules=r".*\.(k|v|down)_proj", feedforward_modules=r".*\.down_proj")
    model: Any = load_trained_model(run, "fp32", torch.device("cpu"))
    flags = {
        name.rpartition(".")[2]: module.is_feedforward
        for name, module in model.named_modules()
        if hasattr(module, "is_feedforward")
    }
    assert flags == {"k_proj": False, "v_proj": False, "down_proj": True}


@pytest.mark.parametrize(
    ("status", "words", "hint"),
    [
        ("done", "it is done after step 2, but its folder adapter/ is missing", "or train it again"),
        ("stopped", "it was stopped after step 2", "train it to the end"),
        ("crashed", "it crashed after step 2", "train it to the end"),
        (None, "it was not started, or its outcome.json is damaged", "train it to the end"),
    ],
)
def test_run_without_weights_says_why(tmp_path: Path, status: Status | None, words: str, hint: str) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=2, status=status))
    with pytest.raises(InputError, match=words) as raised:
        load_trained_run(paths.root)
    assert hint in raised.value.hint
