"""What DeepSpeed's ZeRO keeps of a parameter: its FP32 master and its optimizer states, taken out whole and put back.

Stages 1 and 2 lay parameters end to end and give each rank a stretch of it; stage 3 cuts every parameter into parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.training.engine import Engine
from launcher.training.gathering import is_partitioned
from launcher.training.optim import innermost


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroStates:
    zero: Any  # DeepSpeed's optimizer around ours
    inner: Optimizer

    @staticmethod
    def of(engine: Engine) -> ZeroStates | None:
        """None where DeepSpeed does not run."""
        if not engine.is_deepspeed:
            return None
        return ZeroStates(zero=vars(engine.optimizer)["optimizer"], inner=innermost(engine.optimizer))

    def get_weight(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        weight: Tensor = safe_get_full_fp32_param(parameter)
        return weight

    def get_states(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """The count of steps is one for all: a stretch that another rank holds has no count here."""
        from deepspeed.utils import safe_get_full_optimizer_state

        flats = self._flats()
        state = self.inner.state[flats[0]]
        for key, value in sorted(state.items()):
            if isinstance(value, Tensor) and value.shape == flats[0].shape:
                yield key, safe_get_full_optimizer_state(parameter, key)
            else:
                yield key, value if isinstance(value, Tensor) else torch.tensor(value)

    def set_weight(self, parameter: Any, whole: Tensor) -> None:
        """The copy that computes, in 16 bits as a rule, and the master behind it."""
        import deepspeed

        with torch.no_grad():
            if is_partitioned(parameter):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(whole)
            else:
                parameter.data.copy_(whole)
            self._set(parameter, whole, None)

    def make_states(self, keys: Sequence[str]) -> None:
        """Empty ones, as the optimizer's first step would make them."""
        for flat in self._flats():
            for key in keys:
                self.inner.state[flat][key] = torch.zeros_like(flat)
        self.link()

    def link(self) -> None:
        """Stages 1 and 2 note where a parameter's states lie within the first group's first step, when those of other
        groups are not made yet. Here it is noted again."""
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def set_state(self, parameter: nn.Parameter, key: str, whole: Tensor) -> None:
        if whole.dim():
            with torch.no_grad():
                self._set(parameter, whole, key)
            return
        on_device = any(group.get("fused") for group in self.inner.param_groups)  # torch wants its count there then
        for flat in self._flats():
            count = whole.to(flat.device if on_device else "cpu", copy=True)
            self.inner.state[flat][key] = count if whole.is_floating_point() else int(count)

    def _set(self, parameter: Any, whole: Tensor, key: str | None) -> None:
        if not is_partitioned(parameter):
            parameter.set_full_hp_param(whole, key)
            return
        # DeepSpeed's own setter of the whole fails where a parameter does not divide: its last part is padded.
        part, _ = self.zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        rank = self.zero._get_param_partition_rank(parameter)
        mine = whole.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
        part.data[: mine.numel()].copy_(mine)

    def _flats(self) -> list[Tensor]:
        flats: list[Tensor] = getattr(self.zero, "fp32_partitioned_groups_flat", None) or list(
            self.zero.single_partition_of_fp32_groups
        )
        return flats
