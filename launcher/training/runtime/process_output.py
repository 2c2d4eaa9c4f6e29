"""Control what a process prints and how it waits: library output, secrets, stdout, spinning threads."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

from launcher.core.processes import LAUNCHER_TERMINAL
from launcher.core.redaction import redact_text


def limit_thread_spinning() -> None:
    """Let waiting OpenMP threads sleep soon instead of spinning. Call before torch is imported.

    With busy cores, spinning made a step ten times slower; with idle cores, sleeping at once made it 20 % slower.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def silence_libraries() -> None:
    """Silence banners and warnings of libraries, but not their errors. Call before they are imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if os.environ.get(LAUNCHER_TERMINAL) != "1" and not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
    # DeepSpeed's calls warn in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message="Slicing a flattened dim", module="torch.distributed")  # accelerate, HSDP
    # transformers 5.23 or later, of an attribute that PEFT reads
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it searches for a GPU and prints that there is none


def silence_transformers() -> None:
    """Silence warnings and progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def redirect_stdout() -> TextIO:
    """Send the output of libraries and compilers to stderr, and return the original stdout for our own output."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(stdout, "w", encoding="utf-8")


def redact_output() -> None:
    """Redact secrets in everything that Python prints, because consoles and logs are shared."""
    if isinstance(sys.stderr, _RedactedStream):
        return
    sys.stdout, sys.stderr = _RedactedStream(sys.stdout), _RedactedStream(sys.stderr)


class _RedactedStream:
    """A stream that redacts secrets; everything but writing is forwarded."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_text(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
