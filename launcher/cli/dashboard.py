"""`launcher dashboard`: our W&B workspace, created or updated; without a network, its specification as a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from launcher.arguments import positive
from launcher.errors import ExitCode, InputError

if TYPE_CHECKING:
    from launcher.dashboard.saving import Saved
    from launcher.dashboard.workspace import Place

HELP = "create or update the W&B workspace; without a network, write its specification to a file"

_FILE = "dashboard.json"
_NAME = "expert launcher"
_SECONDS = 30
_VIEW = re.compile(r"[A-Za-z0-9]{1,40}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", metavar="NAME", help="default: WANDB_PROJECT, or that of our manifests")
    parser.add_argument("--entity", metavar="NAME", help="user or team (default: WANDB_ENTITY, or your key's own)")
    parser.add_argument("--name", metavar="TEXT", help=f"of the saved view (default: {_NAME})")
    parser.add_argument(
        "--url", metavar="URL", help="update this saved view (default: the one that project and name make)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help=f"where the specification goes (default: {_FILE})")
    parser.add_argument(
        "--offline", "--dry-run", action="store_true", dest="offline", help="only write the specification"
    )
    parser.add_argument(
        "--timeout", type=positive, default=_SECONDS, metavar="SECONDS", help=f"for the server (default {_SECONDS})"
    )
    parser.add_argument("--json", action="store_true", help="print what became of it as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.dashboard.workspace import check_installed

    check_installed()
    place = find_place(arguments)
    if arguments.output is not None or arguments.offline:
        file = _write(arguments, place)
    if arguments.offline:
        _say(arguments, "written", specification=str(file))
        return ExitCode.DONE
    from launcher.dashboard.saving import save_within
    from launcher.tracking import decide_tracking

    tracking = decide_tracking(None, os.environ)
    if tracking.mode != "online":
        return _stay_here(arguments, place, tracking.reason)
    return _tell(arguments, place, save_within(place, arguments.timeout))


def find_place(arguments: argparse.Namespace) -> Place:
    from launcher.dashboard.workspace import Place
    from launcher.plan.carried import DEFAULT_WANDB_PROJECT

    name = _check_name(arguments.name or _NAME)
    if arguments.url is not None:
        if arguments.entity is not None or arguments.project is not None:
            raise InputError("--url says already which entity and project: leave out --entity and --project")
        entity, project, view = _read_url(arguments.url)
        return Place(entity=entity, project=project, name=name, view=view)
    entity = arguments.entity or os.environ.get("WANDB_ENTITY") or ""
    project = arguments.project or os.environ.get("WANDB_PROJECT") or DEFAULT_WANDB_PROJECT
    if entity:
        _check_part("--entity", entity)
    return Place(entity=entity, project=_check_part("--project", project), name=name)


def _read_url(url: str) -> tuple[str, str, str]:
    """https://wandb.ai/ENTITY/PROJECT?nw=VIEW, as W&B shows a saved view; a user's own has a longer name."""
    try:
        parts = urlsplit(url)
        folders = [part for part in parts.path.split("/") if part]
        view = parse_qs(parts.query).get("nw", [""])[0]
    except ValueError:
        folders, view = [], ""
    is_view = _VIEW.fullmatch(view) is not None and not view.startswith("nwuser")
    if len(folders) < 2 or not is_view or not all(_PART.fullmatch(part) for part in folders[:2]):
        raise InputError(
            f"--url {url!r} is not the address of a saved view",
            hint="it looks like https://wandb.ai/ENTITY/PROJECT?nw=a0b1c2d3; a view of one user (nw=nwuser…) is none",
        )
    return folders[0], folders[1], view


def _check_part(flag: str, value: str) -> str:
    if not _PART.fullmatch(value):
        raise InputError(f"{flag} {value!r}: a W&B name has letters, digits, dots, dashes and underscores, at most 128")
    return value


def _check_name(name: str) -> str:
    """wandb-workspaces refuses symbols, and W&B what is too long."""
    if not name.strip() or len(name) > 128 or not all(char.isalnum() or char in " -_.,:()/" for char in name):
        raise InputError(f"--name {name!r}: 1 to 128 letters, digits, spaces and . , : ( ) / - _")
    return name.strip()


def _tell(arguments: argparse.Namespace, place: Place, saved: Saved) -> ExitCode:
    if saved.status in ("created", "updated"):
        _say(arguments, saved.status, url=saved.url)
        return ExitCode.DONE
    if saved.status == "refused":
        raise InputError(
            f"W&B did not take the dashboard: {saved.message}",
            hint="are WANDB_API_KEY, --entity and --project right? --offline only writes the specification",
        )
    return _stay_here(arguments, place, saved.message)


def _stay_here(arguments: argparse.Namespace, place: Place, reason: str) -> ExitCode:
    file = Path(arguments.output) if arguments.output is not None else _write(arguments, place)
    print(f"nothing was sent to W&B: {reason}", file=sys.stderr)
    print("the same command with a key (`wandb login`) and a network creates or updates it", file=sys.stderr)
    _say(arguments, "written", specification=str(file))
    return ExitCode.DONE


def _say(arguments: argparse.Namespace, status: str, *, url: str = "", specification: str = "") -> None:
    if arguments.json:
        json.dump({"status": status, "url": url or None, "specification": specification or None}, sys.stdout, indent=2)
        print()
    else:
        print(f"specification: {specification}" if specification else f"{status}: {url}")


def _write(arguments: argparse.Namespace, place: Place) -> Path:
    from launcher.dashboard.content import DASHBOARD
    from launcher.dashboard.workspace import render_specification
    from launcher.paths import write_text_atomically

    file = Path(arguments.output or _FILE)
    write_text_atomically(file, render_specification(DASHBOARD, place))
    return file
