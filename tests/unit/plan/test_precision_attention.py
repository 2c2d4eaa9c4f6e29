"""Precision, attention and kernels: what the hardware can do, what the manifest asks for, and the reasons."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base_models.shapes import load_shape
from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.manifest import find_manifest, load_manifest
from launcher.plan import make_plan
from launcher.plan.estimate.dataset_size import RowEstimate
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for


def test_bf16_where_the_gpu_has_it() -> None:
    precision = plan_for(gpu="rtx4090").precision
    assert (precision.compute_dtype, precision.base_dtype, precision.trainable_dtype) == ("bf16", "bf16", "fp32")
    assert precision.use_tf32
    assert not precision.loss_scaling
    assert precision.mixed_precision == "bf16"


@pytest.mark.parametrize("gpu", ["t4", "v100"])
def test_fp16_with_loss_scaling_where_there_is_no_bf16(gpu: str) -> None:
    plan = plan_for(gpu=gpu)
    assert (plan.precision.compute_dtype, plan.precision.loss_scaling, plan.precision.use_tf32) == ("fp16", True, False)
    assert "has no BF16" in decision(plan, "precision")
    assert plan.loss_kernel == "chunked"
    assert plan.attention.backend == "sdpa"
    assert "flash kernels need 8.0" in decision(plan, "attention")


def test_fp16_that_the_manifest_asks_for_is_honoured_and_commented() -> None:
    plan = plan_for(config={"fp16": True, "bf16": False})
    assert plan.precision.loss_scaling
    assert "BF16 needs no loss scaling on this GPU" in decision(plan, "precision")


@pytest.mark.parametrize("gpu", ["rtx4090", "t4"])
@pytest.mark.parametrize("config", [{"bf16": False, "fp16": False}, {"precision": "fp32"}], ids=str)
def test_both_switched_off_is_fp32(gpu: str, config: dict[str, Any]) -> None:
    plan = plan_for(gpu=gpu, config=config)
    assert (plan.precision.compute_dtype, plan.precision.mixed_precision) == ("fp32", "no")


def test_gpu_before_volta_is_not_compiled_for_and_its_notes_fit_the_plan() -> None:
    gpu = lookup_gpu("v100").model_copy(update={"title": "Tesla P100", "compute_capability": (6, 0)})
    manifest = load_manifest(find_manifest("neo4j"), ("training.config.torch_compile=true",)).manifest
    plan = make_plan(
        manifest,
        make_hardware(gpu, gpus_per_node=1, nodes=1),
        base=load_shape("google/gemma-2-2b", ()),
        rows=RowEstimate(num_rows=1000, mean_tokens=350, count_basis="read", is_measured=True),
    )
    assert plan.compile is None
    assert "Triton needs compute capability 7.0" in decision(plan, "torch.compile")
    assert plan.attention.backend == "eager"
    assert not any("SDPA" in note for note in plan.notes)


def test_a_cpu_computes_in_fp32() -> None:
    plan = plan_for(gpu=None)
    assert plan.precision.compute_dtype == "fp32"
    assert "20 times slower" in decision(plan, "precision")


def test_full_fine_tuning_keeps_the_model_in_fp32() -> None:
    plan = plan_for(gpu="h100", overrides=FULL_FINE_TUNING)
    assert (plan.precision.base_dtype, plan.precision.trainable_dtype) == ("fp32", "fp32")
    assert plan.adapter.trainable_parameters == plan.base.num_parameters


def test_torchs_own_flash_attention_needs_no_package() -> None:
    plan = plan_for()
    assert plan.attention.backend == "varlen"
    assert plan.attention.fallbacks == ("flex", "sdpa", "eager")


@pytest.mark.parametrize(
    ("gpu", "packages", "backend"),
    [
        ("b200", ("flash_attn", "flash_attn.cute"), "flash_attention_4"),
        ("a100", ("flash_attn", "flash_attn_interface"), "flash_attention_2"),
        ("rtx4090", ("flash_attn", "flash_attn_interface"), "flash_attention_2"),
        ("t4", ("flash_attn",), "sdpa"),
    ],
)
def test_an_installed_flash_attn_is_used_where_it_can_run(gpu: str, packages: tuple[str, ...], backend: str) -> None:
    hardware = make_hardware(lookup_gpu(gpu), gpus_per_node=1, nodes=1).model_copy(update={"packages": packages})
    manifest = load_manifest(find_manifest("neo4j")).manifest
    rows = RowEstimate(num_rows=1000, mean_tokens=350, count_basis="read", is_measured=True)
    plan = make_plan(manifest, hardware, base=load_shape("Qwen3-0.6B", ()), rows=rows)
    assert plan.attention.backend == backend


def test_use_sdpa_means_torchs_kernels() -> None:
    plan = plan_for(config={"use_sdpa": True, "flash_attention_2": False})
    assert plan.attention.backend == "varlen"
    assert "--set training.config.use_sdpa; the flash kernel" in decision(plan, "attention")


def test_rows_that_are_not_packed_use_the_same_kernels() -> None:
    """They lie end to end like the documents of a pack."""
    packed, loose = plan_for(), plan_for(config={"packing": False})
    assert loose.attention == packed.attention
    assert "masks documents that share a sequence" in decision(packed, "attention")
    assert "masks documents that share a sequence" in decision(loose, "attention")
    assert plan_for(config={"packing": False, "attention": "flex"}).attention.backend == "flex"


def test_attention_sinks_get_our_kernels() -> None:
    for gpu, is_measured in (("h200", True), ("a100", False)):
        plan = plan_for(gpu=gpu, base="openai/gpt-oss-20b", config={"target_modules": ["q_proj", "v_proj"]})
        assert (plan.attention.backend, plan.attention.fallbacks) == ("triton", ("eager",))
        assert "attention sinks of this base" in decision(plan, "attention")
        assert ("not measured on this GPU" in decision(plan, "attention")) is not is_measured


def test_a_base_with_capped_scores_gets_a_backend_that_caps_them() -> None:
    plan = plan_for(gpu="h200", base="google/gemma-2-2b")
    assert (plan.attention.backend, plan.attention.fallbacks) == ("triton", ("flex", "eager"))
    assert "this base soft-caps attention scores" in decision(plan, "attention")
    other = plan_for(gpu="rtx4090", base="google/gemma-2-2b").attention
    assert (other.backend, other.fallbacks) == ("flex", ("eager",))
    old = plan_for(gpu="t4", base="google/gemma-2-2b", config={"max_seq_length": 512}).attention
    assert (old.backend, old.fallbacks) == ("eager", ())


def test_the_plan_names_the_path_of_the_layers() -> None:
    assert decision(plan_for(gpu="h200", base="google/gemma-2-2b"), "layers").startswith("blocks | norms, projections")
    phi = plan_for(gpu="h200", base="microsoft/Phi-4-mini-instruct", config={"target_modules": "all-linear"})
    assert "phi3's attention block keeps its own code" in decision(phi, "layers")
    eight = plan_for(gpu="h200", gpus=8, strategy="zero2")
    assert "zero2 splits the weights" in decision(eight, "layers")


def test_our_own_kernels_are_for_hopper_and_heads_that_fit_their_tiles() -> None:
    first = plan_for(gpu="h200")
    assert (first.attention.backend, first.attention.fallbacks) == ("triton", ("varlen", "flex", "sdpa", "eager"))
    assert "the fastest measured" in decision(first, "attention")
    assert "triton" not in plan_for(gpu="rtx4090").attention.fallbacks
    torchs = plan_for(gpu="h200", config={"use_sdpa": True, "flash_attention_2": False}).attention
    assert (torchs.backend, torchs.fallbacks[0]) == ("varlen", "triton")
    small_heads = plan_for(gpu="h200", base="Qwen/Qwen2.5-0.5B").attention
    assert small_heads.backend == "triton"
    with pytest.raises(InputError, match="triton cannot run on GeForce RTX 4090: it needs a Hopper GPU"):
        plan_for(config={"attention": "triton"})
    with pytest.raises(
        InputError, match=r"triton cannot run on H200.*: it needs .*, and a head size of 64, 128 or 256"
    ):
        plan_for(gpu="h200", base="microsoft/phi-2", config={"attention": "triton", "target_modules": ["q_proj"]})
    capped = plan_for(gpu="h200", base="google/gemma-2-27b", config={"batch_size": 1})
    assert (capped.attention.backend, capped.attention.fallbacks) == ("triton", ("flex", "eager"))


def test_a_named_backend_is_taken_or_refused() -> None:
    assert plan_for(config={"attention": "flex"}).attention.backend == "flex"
    with pytest.raises(InputError, match=r"varlen cannot run on Tesla T4: it needs compute capability 8.0") as caught:
        plan_for(gpu="t4", config={"attention": "varlen"})
    assert "one of: sdpa, eager" in caught.value.hint
    with pytest.raises(InputError, match="flash_attention_2 cannot run on a machine without a GPU"):
        plan_for(gpu=None, config={"attention": "flash_attention_2"})


def test_optional_packages_that_are_missing_here_are_not_planned_with() -> None:
    here = make_hardware(lookup_gpu("rtx4090"), gpus_per_node=1, nodes=1).model_copy(update={"source": "probe"})
    manifest = load_manifest(find_manifest("neo4j")).manifest
    rows = RowEstimate(num_rows=1000, mean_tokens=350, count_basis="read", is_measured=True)
    shape = load_shape("Qwen3-0.6B", ())
    assert make_plan(manifest, here, base=shape, rows=rows).loss_kernel == "chunked"
    with_triton = here.model_copy(update={"packages": ("triton",)})
    assert make_plan(manifest, with_triton, base=shape, rows=rows).loss_kernel == "fused"
    quantised = load_manifest(find_manifest("neo4j"), ["base_models.0.quantization=int4"]).manifest
    with pytest.raises(InputError, match="needs the package bitsandbytes, which is not installed"):
        make_plan(quantised, here, base=shape, rows=rows)
    sharded = load_manifest(find_manifest("neo4j"), ["training.config.strategy=zero2"]).manifest
    with pytest.raises(InputError, match="zero2 needs the package deepspeed"):
        make_plan(sharded, here, base=shape, rows=rows)


def test_4_bit_weights_are_stored_in_a_dtype_that_the_gpu_has() -> None:
    plan = plan_for(gpu="t4", gpus=3, base="Qwen/Qwen2.5-32B", overrides=("base_models.0.quantization=int4",))
    assert plan.strategy == "fsdp2"
    assert plan.quantization is not None
    assert plan.quantization.storage_dtype == plan.precision.compute_dtype == "fp16"


def test_fp32_is_not_given_to_kernels_of_16_bits() -> None:
    plan = plan_for(gpu="h200", config={"bf16": False, "fp16": False})
    assert plan.precision.compute_dtype == "fp32"
    assert (plan.attention.backend, plan.attention.fallbacks) == ("sdpa", ("eager",))
    assert "flash kernels compute in 16 bits" in decision(plan, "attention")
    with pytest.raises(InputError, match="varlen computes in 16 bits, but FP32 is requested"):
        plan_for(gpu="h200", config={"bf16": False, "fp16": False, "attention": "varlen"})


def test_precision_that_needs_a_gpu_is_named_as_not_used() -> None:
    assert decision(plan_for(gpu=None, config={"precision": "fp16"}), "precision").endswith(
        "; precision fp16 is not used"
    )
    assert "not used" not in decision(plan_for(gpu=None, config={"precision": "fp32"}), "precision")
