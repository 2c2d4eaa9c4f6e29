"""Logging of the package: progress, warnings and errors go to the logger "launcher", results of a command to stdout.

A program that imports the package configures that logger itself. Our own commands call `configure`, which logs plain
lines to stderr; LAUNCHER_LOG_LEVEL (debug, info, warning, error) sets the level.
"""

from __future__ import annotations

import logging
import os
import sys

from launcher.core.redaction import redact_text

LOG_LEVEL = "LAUNCHER_LOG_LEVEL"
_ROOT = "launcher"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

logging.getLogger(_ROOT).addHandler(logging.NullHandler())


class _Formatter(logging.Formatter):
    """Formatter of plain log lines: prefix "warning: " or "error: ", the rank unless it is 0, secrets redacted."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{'error' if record.levelno >= logging.ERROR else 'warning'}: {text}"
        rank = os.environ.get("RANK", "0")
        return redact_text(text if rank == "0" else f"[rank {rank}] {text}")


class _StderrHandler(logging.Handler):
    """Handler that writes to the current sys.stderr and, like print, raises write errors."""

    def emit(self, record: logging.LogRecord) -> None:
        # One write per line: torchrun prefixes whatever it reads, and print writes the newline separately.
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; for a module that runs as a script, the logger of the package."""
    return logging.getLogger(name if name.startswith(f"{_ROOT}.") else _ROOT)


def configure() -> None:
    """Configure logging to stderr; every process of the launcher calls this first."""
    logger = logging.getLogger(_ROOT)
    handler = _StderrHandler()
    handler.setFormatter(_Formatter())
    logger.handlers[:] = [handler]
    logger.propagate = False
    level = os.environ.get(LOG_LEVEL, "").strip().lower() or "info"
    logger.setLevel(_LEVELS.get(level, logging.INFO))
    if level not in _LEVELS:
        logger.warning(f"{LOG_LEVEL}={level!r} is not a log level; use one of {', '.join(_LEVELS)}")
