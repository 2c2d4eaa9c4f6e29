"""Saves the dashboard to W&B, in a process of its own: `python -m launcher.dashboard.saving`, started by the verb.

wandb without a network takes its time to say so, and no argument limits it: whoever started this process can end it.
The request is a line of JSON on stdin, the answer one on stdout.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Literal

from pydantic import ValidationError

from launcher.dashboard.content import DASHBOARD
from launcher.dashboard.workspace import Place, build_workspace, name_view
from launcher.processes import make_child_environment
from launcher.redaction import find_known_secrets, redact_text
from launcher.values import Frozen

_REACH_SECONDS = 5.0


class SavingRequest(Frozen):
    entity: str
    project: str
    name: str
    view: str | None


class Saved(Frozen):
    """What became of it."""

    status: Literal["created", "updated", "no key", "unreachable", "refused"]
    url: str = ""
    message: str = ""  # of the server, or of wandb


def save_within(place: Place, seconds: float) -> Saved:
    """Never longer than that: what does not answer counts as no network."""
    request = SavingRequest(entity=place.entity, project=place.project, name=place.name, view=place.view)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.dashboard.saving"],
        env={**make_child_environment(), "WANDB_SILENT": "true"},
        stdin=subprocess.PIPE,  # and no terminal: wandb would ask for a key
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        answer, errors = process.communicate(request.model_dump_json().encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return Saved(status="unreachable", message=f"no answer within {seconds:g} s")
    finally:
        process.kill()  # its service process ends by itself
        process.wait()
    try:
        return Saved.model_validate_json(answer.splitlines()[-1])
    except (IndexError, ValidationError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return Saved(status="refused", message=last[0] if last else f"exit code {process.returncode}")


def save(place: Place) -> Saved:
    """Creates the view, or updates the one that has its name. Blocks as long as wandb does."""
    import wandb
    from wandb.errors import UsageError

    base_url = wandb.setup().settings.base_url
    try:
        if (reason := _find_hindrance(base_url)) is not None:
            return Saved(status="unreachable", message=f"{base_url}: {reason}")
        entity = place.entity or wandb.Api().default_entity
        if not entity:
            return Saved(status="refused", message="this key has no entity of its own: --entity names one")
        known = Place(entity=entity, project=place.project, name=place.name, view=place.view)
        workspace = build_workspace(DASHBOARD, known)
        found = _find_view(known)
        if found is None and place.view is not None:
            return Saved(status="refused", message=f"{entity}/{place.project} has no saved view {place.view}")
        workspace._internal_id = found or ""
        workspace.save()  # type: ignore[no-untyped-call]
    except UsageError as error:
        return Saved(status="no key", message=str(error))
    except Exception as error:  # wandb has no one class for what a server may say
        return Saved(status="refused", message=_shorten(error))
    return Saved(status="updated" if found else "created", url=workspace.url)


def _find_view(place: Place) -> str | None:
    """The id of the view that has our name: what is saved with it is an update. Its content does not matter."""
    from wandb_workspaces.workspaces import internal

    try:
        return str(internal.get_view_dict(place.entity, place.project, name_view(place))["id"])
    except ValueError:  # no such project yet, which the first view makes, or no such view
        return None


def _find_hindrance(base_url: str) -> str | None:
    """Why the server cannot be reached; any answer will do, and so will a certificate that only wandb knows."""
    try:
        urllib.request.urlopen(base_url, timeout=_REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else str(reason)
    return None


def _shorten(error: Exception) -> str:
    text = redact_text(str(error), find_known_secrets(os.environ)).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def main() -> int:
    request = SavingRequest.model_validate_json(sys.stdin.readline())
    place = Place(entity=request.entity, project=request.project, name=request.name, view=request.view)
    print(save(place).model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
