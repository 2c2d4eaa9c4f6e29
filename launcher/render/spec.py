"""Inputs of the rendered config files, made from a plan or a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.core.choices import DEEPSPEED_STRATEGIES, Offload, Strategy
from launcher.plan.model import Plan

Auto = Literal["auto"]

# The class that FSDP2 shards as one unit, by transformers' model_type. A base model's own `_no_split_modules` may name
# parts that its text model does not have, and accelerate refuses a class that it cannot find.
LAYER_CLASSES: dict[str, str] = {
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "phi": "PhiDecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """How a training is distributed over processes. "auto" in a batch field: train.py fills it in from the manifest."""

    strategy: Strategy
    offload: Offload
    mixed_precision: Literal["bf16", "fp16", "no"]
    num_nodes: int
    ranks_per_node: int
    on_cpu: bool
    layer_class: str | None  # None: the base's own `_no_split_modules`
    micro_batch_size: int | Auto
    gradient_accumulation_steps: int | Auto
    gradient_clipping: float | Auto  # 0.0: no clipping

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def uses_deepspeed(self) -> bool:
        return self.strategy in DEEPSPEED_STRATEGIES

    @property
    def has_agent(self) -> bool:
        """Whether accelerate starts torch's elastic agent, which uses ports and log folders, or the script directly."""
        return self.strategy != "single"


def make_launch_spec(plan: Plan) -> LaunchSpec:
    """Return how a plan distributes its training over processes."""
    return LaunchSpec(
        strategy=plan.strategy,
        offload=plan.offload,
        mixed_precision=plan.precision.mixed_precision,
        num_nodes=plan.hardware.nodes,
        ranks_per_node=plan.hardware.num_ranks // max(1, plan.hardware.nodes),
        on_cpu=plan.hardware.gpu is None,
        layer_class=LAYER_CLASSES.get(plan.base.model_type),
        micro_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        gradient_clipping=plan.optimizer.max_grad_norm or 0.0,
    )
