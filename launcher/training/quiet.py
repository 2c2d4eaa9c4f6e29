"""Libraries that greet: on a machine without a GPU bitsandbytes and DeepSpeed warn of what nobody asked them for."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path


def silence_libraries() -> None:
    """Before any of them is imported. Their errors still come through."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if os.environ.get("LAUNCHER_TERMINAL") != "1" and not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # moving bars, of transformers too
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # DeepSpeed's calls, every step
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for one, and prints that there is none
