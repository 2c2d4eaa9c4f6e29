"""Why NF4 weights are stored as parameters of bytes for FSDP2: accelerate leaves those of bitsandbytes unsharded.

If this test fails after an update of accelerate, `launcher/training/model/nf4_linear.py` may not be needed any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.tensor import DTensor


class Params4bit(nn.Parameter):
    """A stand-in for bitsandbytes' class, which accelerate recognizes by its name."""


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = Params4bit(torch.zeros(64, dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(8, 8)


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:Found 1 non-floating frozen Params4bit")
def test_accelerate_leaves_nf4_weights_unsharded() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
        torch_device_mesh=None,
    )
    with torch.device("cpu"):
        model = fsdp2_prepare_model(accelerator, Quantized())
    assert not isinstance(model.packed, DTensor)
    assert isinstance(model.adapter.weight, DTensor)
