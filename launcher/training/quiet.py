"""A quiet training: libraries greet, and warn of what nobody asked for; errors may quote a secret; threads spin."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

from launcher.processes import LAUNCHER_TERMINAL
from launcher.redaction import find_known_secrets, redact_text


def calm_threads() -> None:
    """Before torch is imported. Threads that wait shall soon sleep, not spin for long: where others use the cores too,
    spinning made a step ten times longer. Sleeping at once would cost a fifth on quiet cores."""
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def silence_libraries() -> None:
    """Before any of them is imported. Their errors still come through."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if os.environ.get(LAUNCHER_TERMINAL) != "1" and not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # moving bars, of transformers too
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # DeepSpeed's calls, every step
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for one, and prints that there is none


def quiet_transformers() -> None:
    """Where nobody watches a model being loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def take_stdout() -> TextIO:
    """Libraries greet on stdout, and so do their compilers: from here on that is stderr, and ours alone is returned."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


def hide_secrets() -> None:
    """From all that Python writes in this process: consoles and their logs are passed on."""
    if isinstance(sys.stderr, _Redacting):
        return
    known = find_known_secrets(os.environ)
    sys.stdout, sys.stderr = _Redacting(sys.stdout, known), _Redacting(sys.stderr, known)


class _Redacting:
    """A stream that blots secrets out. Everything but writing is the stream's own."""

    def __init__(self, stream: Any, known: tuple[str, ...]) -> None:
        self._stream, self._known = stream, known

    def write(self, text: str) -> int:
        self._stream.write(redact_text(text, self._known))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
