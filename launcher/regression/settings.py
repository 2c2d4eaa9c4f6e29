"""What the old configuration is, key by key, with why it was so; and what really differs between two plans.

The keys are execution keys alone. What decides what is learnt stays the expert's own: adapter, learning rate, schedule,
seed, rows. So does the precision: nearly all published manifests ask for BF16, as the optimised ones do, and without a
GPU there is FP32 alone. An old training in FP32 would be slower, and nobody ran it.

What no key of a manifest asks for: rows padded to the longest of a batch, micro-batches of two rows, logits held whole,
a loss that is read after every micro-step. So the old side is faster here than it was by hand, and the gain in speed
that is shown is a lower bound; benchmarks/before_after.py measures the loop itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.plan.model import Plan

PREFIX = "training.config."


@dataclass(frozen=True, kw_only=True, slots=True)
class OldSetting:
    key: str  # below training.config
    value: str
    name: str  # of what it decides, for people
    why: str  # it was so
    read: Callable[[Plan], str]  # what a plan made of it

    @property
    def override(self) -> str:
        return f"{PREFIX}{self.key}={self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """One setting in both plans. Where the hardware leaves no choice, both are the same."""

    name: str
    override: str
    why: str
    old: str
    new: str

    @property
    def is_real(self) -> bool:
        return self.old != self.new


def make_old_settings(new: Plan) -> tuple[OldSetting, ...]:
    """For the machine that the optimised plan is for."""
    return (
        OldSetting(
            key="packing",
            value="false",
            name="rows",
            why="rows that share a sequence see each other, unless attention knows where they end",
            read=_read_rows,
        ),
        OldSetting(
            key="attention",
            value=_old_attention(new),
            name="attention",
            why="published manifests have use_sdpa: flash-attn had to be built",
            read=lambda plan: plan.attention.backend,
        ),
        OldSetting(
            key="torch_compile",
            value="false",
            name="torch.compile",
            why="published manifests switch it off: every length of a batch was compiled anew",
            read=lambda plan: "off" if plan.compile is None else f"on, by {plan.compile.scope}",
        ),
        OldSetting(
            key="optim",
            value="adamw_torch",
            name="optimizer",
            why="torch's own default: several kernels where one would do",
            read=lambda plan: plan.optimizer.name,
        ),
        OldSetting(
            key="gradient_checkpointing",
            value="true",
            name="gradient checkpointing",
            why="nobody predicted the memory, so it was saved in any case",
            read=lambda plan: "off" if plan.checkpointing == "none" else plan.checkpointing,
        ),
        OldSetting(
            key="dataloader_num_workers",
            value="0",
            name="loader workers",
            why="published manifests have none: batches are made between the steps",
            read=lambda plan: f"{plan.loader.num_workers}",
        ),
        OldSetting(
            key="dataloader_pin_memory",
            value="false",
            name="pinned memory",
            why="the same",
            read=lambda plan: "on" if plan.loader.pin_memory else "off",
        ),
    )


def compare_settings(settings: tuple[OldSetting, ...], old: Plan, new: Plan) -> tuple[SettingChange, ...]:
    return tuple(
        SettingChange(
            name=setting.name, override=setting.override, why=setting.why, old=setting.read(old), new=setting.read(new)
        )
        for setting in settings
    )


def _old_attention(new: Plan) -> str:
    """Plain SDPA, or eager for the bases that cap their scores: their ladder has no SDPA."""
    ladder = (new.attention.backend, *new.attention.fallbacks)
    return "eager" if "eager" in ladder and "sdpa" not in ladder else "sdpa"


def _read_rows(plan: Plan) -> str:
    batch = plan.batch
    if batch.packed:
        return f"packed, {batch.global_batch_size} sequences of {batch.sequence_length:,} tokens a step"
    return f"one by one, {batch.global_batch_size} a step"
