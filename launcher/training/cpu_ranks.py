"""FSDP2 and ZeRO on ranks without a GPU: for tests and rehearsals. The only place that reaches into accelerate.

Without this, accelerate given an FSDP or DeepSpeed file on a machine without a GPU trains as many separate copies as
there are processes, in silence; told that it is a CPU, it falls back to DDP, in silence too.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def enable_cpu_ranks() -> None:
    """Before the first Accelerator: gloo in place of NCCL, and the engines that the files ask for."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    PartialState._prepare_backend = _answer_gloo


def _answer_gloo(_state: Any, *_arguments: Any, **_more: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU
