"""Settings of the old configuration with their reasons, and which of them differ between two plans.

Only execution settings differ. Everything that affects learning is the expert's own in both runs: adapter, learning
rate, schedule, seed, rows. So is the precision: nearly all published manifests use BF16, and without a GPU there is
only FP32.

Some properties of the old loop have no manifest key: rows padded to the longest of a batch, micro-batches of two rows,
full logits, a host sync after every micro-step. The old run is therefore faster here than it was, and the reported
speedup is a lower bound; benchmarks/before_after.py measures the old loop itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.plan.model import Plan

PREFIX = "training.config."


@dataclass(frozen=True, kw_only=True, slots=True)
class OldSetting:
    """A manifest key with its value in the old configuration."""

    key: str  # below training.config
    value: str
    name: str  # for display
    reason: str
    read: Callable[[Plan], str]  # the resulting value in a plan

    @property
    def override(self) -> str:
        """The `--set` override."""
        return f"{PREFIX}{self.key}={self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """A setting in both plans; equal where the hardware leaves no choice."""

    name: str
    override: str
    reason: str
    old: str
    new: str

    @property
    def has_effect(self) -> bool:
        """Whether the plans differ."""
        return self.old != self.new


def make_old_settings(new: Plan) -> tuple[OldSetting, ...]:
    """Return the old settings for the machine of the new plan."""
    return (
        OldSetting(
            key="packing",
            value="false",
            name="rows",
            reason="packed rows attend to each other unless attention knows their boundaries",
            read=_read_rows,
        ),
        OldSetting(
            key="attention",
            value=_old_attention(new),
            name="attention",
            reason="published manifests have use_sdpa: flash-attn had to be built",
            read=lambda plan: plan.attention.backend,
        ),
        OldSetting(
            key="torch_compile",
            value="false",
            name="torch.compile",
            reason="published manifests disable it: every batch length was recompiled",
            read=lambda plan: "off" if plan.compile is None else f"on, by {plan.compile.scope}",
        ),
        OldSetting(
            key="optim",
            value="adamw_torch",
            name="optimizer",
            reason="PyTorch's default: several kernels instead of one",
            read=lambda plan: plan.optimizer.name,
        ),
        OldSetting(
            key="gradient_checkpointing",
            value="true",
            name="gradient checkpointing",
            reason="memory was not estimated, so it was always saved",
            read=lambda plan: "off" if plan.checkpointing == "none" else plan.checkpointing,
        ),
        OldSetting(
            key="dataloader_num_workers",
            value="0",
            name="loader workers",
            reason="published manifests have none: batches are built between steps",
            read=lambda plan: f"{plan.loader.num_workers}",
        ),
        OldSetting(
            key="dataloader_pin_memory",
            value="false",
            name="pinned memory",
            reason="as above",
            read=lambda plan: "on" if plan.loader.pin_memory else "off",
        ),
    )


def compare_settings(settings: tuple[OldSetting, ...], old: Plan, new: Plan) -> tuple[SettingChange, ...]:
    """Look every setting up in both plans."""
    return tuple(
        SettingChange(
            name=setting.name,
            override=setting.override,
            reason=setting.reason,
            old=setting.read(old),
            new=setting.read(new),
        )
        for setting in settings
    )


def _old_attention(new: Plan) -> str:
    """Return SDPA, or eager for base models with logit soft-capping, which SDPA does not support."""
    backends = (new.attention.backend, *new.attention.fallbacks)
    return "eager" if "eager" in backends and "sdpa" not in backends else "sdpa"


def _read_rows(plan: Plan) -> str:
    batch = plan.batch
    if batch.packed:
        return f"packed, {batch.global_batch_size} sequences of {batch.sequence_length:,} tokens per step"
    return f"not packed, {batch.global_batch_size} per step"
