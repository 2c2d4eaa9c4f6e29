"""DeepSpeed's own configuration class reads every JSON and reports what we meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from launcher.plan.model import Plan
from launcher.render import render_deepspeed
from launcher.render.presets import make_presets, render_presets
from launcher.render.spec import make_launch_spec

deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
MakePlan = Callable[..., Plan]
ReadConfig = Callable[[dict[str, Any], int], Any]
SHARED_FILES = sorted({preset.deepspeed_file for preset in make_presets() if preset.deepspeed_file is not None})


@pytest.fixture
def read_config(monkeypatch: pytest.MonkeyPatch) -> ReadConfig:
    def read(config: dict[str, Any], world_size: int) -> Any:
        monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda: world_size)
        return deepspeed_config.DeepSpeedConfig(config)

    return read


def device_of(section: Any) -> str:
    return "none" if section is None else str(getattr(section.device, "value", section.device))


def test_deepspeed_reads_a_plan_as_it_was_meant(zero_plan: Plan, read_config: ReadConfig) -> None:
    plan = zero_plan
    config = read_config(json.loads(render_deepspeed(make_launch_spec(plan))), plan.batch.num_ranks)
    assert f"zero{int(config.zero_optimization_stage)}" == plan.strategy
    assert config.train_batch_size == plan.batch.num_slots
    assert config.train_micro_batch_size_per_gpu == plan.batch.micro_batch_size
    assert config.gradient_accumulation_steps == plan.batch.gradient_accumulation_steps
    assert config.gradient_clipping == (plan.optimizer.max_grad_norm or 0.0)
    assert config.bfloat16_config.enabled == (plan.precision.compute_dtype == "bf16")
    assert config.float16_config.enabled == (plan.precision.compute_dtype == "fp16")
    optimizer, parameters = {
        "none": ("none", "none"),
        "optimizer": ("cpu", "none"),
        "optimizer_and_parameters": ("cpu", "cpu"),
    }[plan.offload]
    assert device_of(config.zero_config.offload_optimizer) == optimizer
    assert device_of(config.zero_config.offload_param) == parameters
    assert config.zero_force_ds_cpu_optimizer == (plan.offload == "none")
    assert config.optimizer_name is None
    assert config.scheduler_name is None


def test_gradients_are_summed_in_fp32(zero_plan: Plan, read_config: ReadConfig) -> None:
    """Without these keys DeepSpeed sums in the dtype of the weights."""
    config = read_config(json.loads(render_deepspeed(make_launch_spec(zero_plan))), zero_plan.batch.num_ranks)
    is_16_bit = zero_plan.precision.mixed_precision != "no"
    assert str(config.communication_data_type) == ("torch.float32" if is_16_bit else "None")
    is_supported = zero_plan.strategy == "zero3" or (zero_plan.strategy, zero_plan.offload) == ("zero2", "none")
    assert config.grad_accum_dtype == ("fp32" if is_16_bit and is_supported else None)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_every_stage_keeps_our_sizes(strategy: str, make_plan: MakePlan, read_config: ReadConfig) -> None:
    config = read_config(
        json.loads(render_deepspeed(make_launch_spec(make_plan(strategy=strategy, gpus=4)))), 4
    ).zero_config
    assert config.overlap_comm
    assert config.contiguous_gradients
    assert config.reduce_bucket_size == 50_000_000
    assert config.gather_16bit_weights_on_model_save == (strategy == "zero3")
    if strategy == "zero3":
        assert (config.max_live_parameters, config.param_persistence_threshold) == (500_000_000, 100_000)


def test_no_clipping_is_written_down(make_plan: MakePlan, read_config: ReadConfig) -> None:
    """DeepSpeed clips at 1.0 where the key is absent."""
    config = json.loads(render_deepspeed(make_launch_spec(make_plan(strategy="zero2", max_grad_norm=None))))
    assert read_config(config, 1).gradient_clipping == 0.0
    del config["gradient_clipping"]
    assert read_config(config, 1).gradient_clipping == 1.0


def test_fp16_scales_its_loss_dynamically(make_plan: MakePlan, read_config: ReadConfig) -> None:
    config = read_config(
        json.loads(render_deepspeed(make_launch_spec(make_plan(strategy="zero1", dtype="fp16")))), 1
    ).float16_config
    assert config.enabled
    assert config.loss_scale == 0
    assert config.initial_dynamic_scale() == 65536


def test_a_misspelt_zero_key_would_be_refused(make_plan: MakePlan, read_config: ReadConfig) -> None:
    config = json.loads(render_deepspeed(make_launch_spec(make_plan(strategy="zero2"))))
    config["zero_optimization"]["overlap_com"] = True
    with pytest.raises(ValueError, match="overlap_com"):
        read_config(config, 1)


TOP_LEVEL_KEYS = sorted(
    {key for path, text in render_presets().items() if path.endswith(".json") for key in json.loads(text)} | {"fp16"}
)


@pytest.mark.parametrize("key", TOP_LEVEL_KEYS)
def test_every_top_level_key_is_one_that_deepspeed_reads(key: str) -> None:
    """DeepSpeed ignores a misspelt key at the top level, so each is held against its own constants."""
    constants = pytest.importorskip("deepspeed.runtime.constants")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    known = {
        value for module in (constants, precision, zero) for value in vars(module).values() if isinstance(value, str)
    }
    assert key in known


@pytest.mark.parametrize("path", SHARED_FILES)
@pytest.mark.parametrize("world_size", [1, 2, 16])
def test_deepspeed_reads_a_preset_once_training_has_filled_it_in(
    path: str, world_size: int, read_config: ReadConfig
) -> None:
    config = json.loads(render_presets()[path])
    autos = {key for key, value in config.items() if value == "auto"}
    assert autos == {
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    }
    config |= {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2}
    config["train_batch_size"] = 6 * world_size
    read = read_config(config, world_size)
    assert f"zero{int(read.zero_optimization_stage)}" in path
    assert (device_of(read.zero_config.offload_optimizer) == "cpu") == ("offload" in path)
    assert read.bfloat16_config.enabled
