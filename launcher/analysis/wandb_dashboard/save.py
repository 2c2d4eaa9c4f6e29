"""Save the dashboard to W&B in a separate process: `python -m launcher.analysis.wandb_dashboard.save`.

Without a network wandb blocks for a long time and has no timeout argument; the parent can kill this process instead.
Reads the view as one line of JSON from stdin and prints the result as one line of JSON.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Literal

from pydantic import ValidationError

from launcher.analysis.wandb_dashboard.workspace import ViewTarget, build_workspace, derive_view_name
from launcher.core.frozen_model import Frozen
from launcher.core.processes import make_child_environment
from launcher.core.redaction import redact_text
from launcher.runs.wandb_settings import without_local_settings

_REACH_SECONDS = 5.0


class SaveResult(Frozen):
    """Result of saving a view in a separate process."""

    status: Literal["created", "updated", "no key", "unreachable", "refused"]
    url: str = ""
    message: str = ""  # from the server or from wandb


def save_with_timeout(target: ViewTarget, seconds: float) -> SaveResult:
    """Save the view in a separate process; no response within the timeout counts as no network."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.analysis.wandb_dashboard.save"],
        env={**make_child_environment(), "WANDB_SILENT": "true"},
        stdin=subprocess.PIPE,  # no terminal, where wandb would prompt for a key
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate(target.model_dump_json().encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return SaveResult(status="unreachable", message=f"no response within {seconds:g} s")
    finally:
        process.kill()  # its service process exits by itself
        process.wait()
    try:
        return SaveResult.model_validate_json(output.splitlines()[-1])
    except (IndexError, ValidationError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return SaveResult(status="refused", message=last[0] if last else f"exit code {process.returncode}")


def save(target: ViewTarget) -> SaveResult:
    """Create the view, or update the one with its name; may block for a long time."""
    import wandb
    from wandb.errors import UsageError
    from wandb.sdk.wandb_setup import singleton

    with without_local_settings():
        base_url = singleton().settings.base_url
    try:
        if (reason := _check_reachable(base_url)) is not None:
            return SaveResult(status="unreachable", message=f"{base_url}: {reason}")
        entity = target.entity or wandb.Api().default_entity
        if not entity:
            return SaveResult(status="refused", message="this API key has no default entity: pass --entity")
        resolved = target.model_copy(update={"entity": entity})
        workspace = build_workspace(resolved)
        view_id = _find_view(resolved)
        if view_id is None and target.view is not None:
            return SaveResult(status="refused", message=f"{entity}/{target.project} has no saved view {target.view}")
        workspace._internal_id = view_id or ""
        workspace.save()  # type: ignore[no-untyped-call]
    except UsageError as error:
        return SaveResult(status="no key", message=str(error))
    except Exception as error:  # wandb has no common class for server errors
        return SaveResult(status="refused", message=_shorten(error))
    return SaveResult(status="updated" if view_id else "created", url=workspace.url)


def _find_view(target: ViewTarget) -> str | None:
    """Return the id of the existing view with our name; saving with this id updates it."""
    from wandb_workspaces.workspaces import internal

    try:
        return str(internal.get_view_dict(target.entity, target.project, derive_view_name(target))["id"])
    except ValueError:  # no such view, or no such project yet, which the first view creates
        return None


def _check_reachable(base_url: str) -> str | None:
    """Return why the server cannot be reached, or None; any HTTP status or certificate error counts as reachable."""
    try:
        urllib.request.urlopen(base_url, timeout=_REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else str(reason)
    return None


def _shorten(error: Exception) -> str:
    text = redact_text(str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def main() -> int:
    """Save the view that stdin describes as JSON, and print the result as JSON."""
    target = ViewTarget.model_validate_json(sys.stdin.readline())
    print(save(target).model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
