"""A plan that was written, read back."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from launcher.errors import InputError
from launcher.plan.model import Plan


def load_plan(file: Path) -> Plan:
    try:
        return Plan.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file}: not a plan: it is not UTF-8") from None
    except ValidationError as error:
        raise InputError(
            f"{file}: not a plan of this version ({error.error_count()} problems)",
            hint="use the launcher version that wrote it",
        ) from None
