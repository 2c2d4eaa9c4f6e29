"""Read and write DeepSpeed ZeRO's FP32 master weights and optimizer states as complete tensors.

Stages 1 and 2 concatenate parameters and give each rank a slice of the result; stage 3 partitions every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.training.engine.engine import Engine
from launcher.training.engine.optimizer import unwrap_optimizer


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 partitioned this parameter, which leaves an empty tensor in its place."""
    return hasattr(parameter, "ds_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroStates:
    """Access to the states of a ZeRO optimizer."""

    zero: Any  # DeepSpeed's optimizer, which wraps ours
    inner: Optimizer

    @staticmethod
    def of(engine: Engine) -> ZeroStates | None:
        """Return the states of an engine, or None if it does not use DeepSpeed."""
        if not engine.is_deepspeed:
            return None
        return ZeroStates(zero=vars(engine.optimizer)["optimizer"], inner=unwrap_optimizer(engine.optimizer))

    def get_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return the complete FP32 master weight."""
        from deepspeed.utils import safe_get_full_fp32_param

        weight: Tensor = safe_get_full_fp32_param(parameter)
        return weight

    def get_states(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yield name and complete value of each optimizer state of a parameter; all parameters share one step count."""
        from deepspeed.utils import safe_get_full_optimizer_state

        flats = self._flat_groups()
        for key, value in sorted(self.inner.state[flats[0]].items()):
            if isinstance(value, Tensor) and value.shape == flats[0].shape:
                yield key, safe_get_full_optimizer_state(parameter, key)
            else:
                yield key, value if isinstance(value, Tensor) else torch.tensor(value)

    def set_weight(self, parameter: Any, full: Tensor) -> None:
        """Set both the weight used in the forward pass, usually 16-bit, and its FP32 master."""
        import deepspeed

        with torch.no_grad():
            if is_partitioned(parameter):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(full)
            else:
                parameter.data.copy_(full)
            self._set(parameter, full, None)

    def create_states(self, keys: Sequence[str]) -> None:
        """Create zero-filled states, as the optimizer's first step would."""
        for flat in self._flat_groups():
            for key in keys:
                self.inner.state[flat][key] = torch.zeros_like(flat)
        self.link()

    def link(self) -> None:
        """Make DeepSpeed link parameters to their optimizer states again.

        Stages 1 and 2 do this during the first step of the first group, when other groups have no states yet.
        """
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def set_state(self, parameter: nn.Parameter, key: str, full: Tensor) -> None:
        """Set an optimizer state from its complete tensor, or a step count from a scalar."""
        if full.dim():
            with torch.no_grad():
                self._set(parameter, full, key)
            return
        on_device = any(group.get("fused") for group in self.inner.param_groups)  # fused optimizers count there
        for flat in self._flat_groups():
            count = full.to(flat.device if on_device else "cpu", copy=True)
            self.inner.state[flat][key] = count if full.is_floating_point() else int(count)

    def _set(self, parameter: Any, full: Tensor, key: str | None) -> None:
        if not is_partitioned(parameter):
            parameter.set_full_hp_param(full, key)
            return
        # DeepSpeed's own setter fails if the parameter is not divisible by the ranks: the last partition is padded.
        part, _ = self.zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        rank = self.zero._get_param_partition_rank(parameter)
        own = full.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
        part.data[: own.numel()].copy_(own)

    def _flat_groups(self) -> list[Tensor]:
        flats: list[Tensor] = getattr(self.zero, "fp32_partitioned_groups_flat", None) or list(
            self.zero.single_partition_of_fp32_groups
        )
        return flats
