"""What a sequence of the batch costs, packed and not."""

from __future__ import annotations

import pytest

from launcher.base_models.shapes import load_shape
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.manifest import find_manifest, load_manifest
from launcher.plan.context import PlanContext, PlanOptions
from launcher.plan.estimate.dataset_size import RowEstimate
from launcher.plan.memory_budget import estimate_slot_tokens
from tests.unit.plan.conftest import plan_for


@pytest.mark.parametrize(
    ("config", "mean_tokens", "slot_tokens"),
    [
        ({"packing": "true"}, 350, 2048),
        ({"packing": "false"}, 350, 350 + 2048 / 16),
        ({"packing": "false", "group_by_length": "true"}, 350, 350 + 2048 / 16),
        ({"packing": "false", "max_seq_length": "512"}, 350, 350 + 512 / 16),
        ({"packing": "false"}, 2000, 2048),
        ({"packing": "false"}, 9000, 2048),
    ],
)
def test_computed_tokens_of_a_sequence(config: dict[str, str], mean_tokens: float, slot_tokens: float) -> None:
    """Rows that are not packed lie end to end, filled up to the next eighth: half an eighth on average."""
    overrides = [f"training.config.{key}={value}" for key, value in config.items()]
    manifest = load_manifest(find_manifest("neo4j"), overrides).manifest
    situation = PlanContext(
        manifest=manifest,
        config=manifest.training.config,
        hardware=make_hardware(lookup_gpu("h100"), gpus_per_node=1, nodes=1),
        base=load_shape("Qwen/Qwen3-0.6B", ()),
        rows=RowEstimate(num_rows=1000, mean_tokens=mean_tokens, count_basis="read", is_measured=True),
        options=PlanOptions(),
    )
    assert estimate_slot_tokens(situation) == slot_tokens


@pytest.mark.parametrize("gpu", ["t4", "rtx4090", "h100"])
def test_rows_that_are_not_packed_need_as_much_memory(gpu: str) -> None:
    """At worst all rows of a micro-batch are of full length. Only packed ones may be a CUDA graph."""
    one = {"batch_size": 1, "gradient_accumulation_steps": 1, "torch_compile": True, "torch_compile_mode": "default"}
    packed, loose = (plan_for(gpu=gpu, config={**one, "packing": packing}) for packing in (True, False))
    assert packed.memory == loose.memory
