"""`launcher dashboard`: create or update the W&B workspace, or write its specification to a file."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from launcher.cli.tables import print_json
from launcher.core.errors import ExitCode, InputError
from launcher.core.log import get_logger
from launcher.core.output_path import check_output_file
from launcher.core.run_paths import expand_home
from launcher.request.flag_types import positive_int

if TYPE_CHECKING:
    from launcher.analysis.wandb_dashboard.save import SaveResult
    from launcher.analysis.wandb_dashboard.workspace import ViewTarget

log = get_logger(__name__)


_FILE = "dashboard.json"
_ONLINE = "`launcher dashboard` with an API key (`wandb login`) and a network creates or updates this workspace"
_NAME = "expert launcher"
_SECONDS = 30
_VIEW = re.compile(r"[A-Za-z0-9]{1,40}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher dashboard`."""
    parser.add_argument("--project", metavar="NAME", help="W&B project (default: WANDB_PROJECT, or expert-launcher)")
    parser.add_argument("--entity", metavar="NAME", help="user or team (default: WANDB_ENTITY, or the API key's)")
    parser.add_argument("--name", metavar="TEXT", help=f"name of the saved view (default: {_NAME})")
    parser.add_argument("--url", metavar="URL", help="update this saved view (default: derived from project and name)")
    parser.add_argument(
        "-o", "--output", type=expand_home, metavar="FILE", help=f"file for the specification (default: {_FILE})"
    )
    parser.add_argument(
        "--offline", "--dry-run", action="store_true", dest="offline", help="only write the specification"
    )
    parser.add_argument(
        "--timeout",
        type=positive_int,
        default=_SECONDS,
        metavar="SECONDS",
        help=f"server timeout (default {_SECONDS})",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Create or update the W&B workspace; without an API key or a network, write its specification to a file."""
    from launcher.analysis.wandb_dashboard.workspace import check_installed

    check_installed()
    target = resolve_target(arguments)
    if arguments.output is not None or arguments.offline:
        file = _write_specification(arguments, target)
    if arguments.offline:
        _print_status(arguments, "written", specification=str(file))
        return ExitCode.DONE
    from launcher.analysis.wandb_dashboard.save import save_with_timeout
    from launcher.runs.wandb_settings import decide_tracking

    tracking = decide_tracking(None, os.environ, is_requested=True)
    if tracking.mode != "online":
        return _write_offline(arguments, target, tracking.reason)
    return _report_result(arguments, target, save_with_timeout(target, arguments.timeout))


def resolve_target(arguments: argparse.Namespace) -> ViewTarget:
    """Return the W&B view to save: entity, project and name, from the flags and the WANDB_* variables."""
    from launcher.analysis.wandb_dashboard.workspace import ViewTarget
    from launcher.plan.passthrough import DEFAULT_WANDB_PROJECT

    name = _check_name(arguments.name or _NAME)
    if arguments.url is not None:
        if arguments.entity is not None or arguments.project is not None:
            raise InputError("--url already names entity and project: omit --entity and --project")
        entity, project, view = _parse_url(arguments.url)
        return ViewTarget(entity=entity, project=project, name=name, view=view)
    entity = arguments.entity or os.environ.get("WANDB_ENTITY") or ""
    project = arguments.project or os.environ.get("WANDB_PROJECT") or DEFAULT_WANDB_PROJECT
    if entity:
        _check_part("--entity", entity)
    return ViewTarget(entity=entity, project=_check_part("--project", project), name=name)


def _parse_url(url: str) -> tuple[str, str, str]:
    """Parse https://wandb.ai/ENTITY/PROJECT?nw=VIEW, the URL of a saved view."""
    try:
        parts = urlsplit(url)
        folders = [part for part in parts.path.split("/") if part]
        view = parse_qs(parts.query).get("nw", [""])[0]
    except ValueError:
        folders, view = [], ""
    is_view = _VIEW.fullmatch(view) is not None and not view.startswith("nwuser")
    if len(folders) < 2 or not is_view or not all(_PART.fullmatch(part) for part in folders[:2]):
        raise InputError(
            f"--url {url!r} is not the URL of a saved view",
            hint="expected https://wandb.ai/ENTITY/PROJECT?nw=a0b1c2d3; personal views (nw=nwuser…) are not supported",
        )
    return folders[0], folders[1], view


def _check_part(flag: str, value: str) -> str:
    if not _PART.fullmatch(value):
        raise InputError(f"{flag} {value!r}: use at most 128 letters, digits, dots, dashes and underscores")
    return value


def _check_name(name: str) -> str:
    """Return the name of a view; reject symbols, which wandb-workspaces refuses, and names too long for W&B."""
    if not name.strip() or len(name) > 128 or not all(char.isalnum() or char in " -_.,:()/" for char in name):
        raise InputError(f"--name {name!r}: use 1 to 128 letters, digits, spaces and . , : ( ) / - _")
    return name.strip()


def _report_result(arguments: argparse.Namespace, target: ViewTarget, result: SaveResult) -> ExitCode:
    if result.status in ("created", "updated"):
        _print_status(arguments, result.status, url=result.url)
        return ExitCode.DONE
    if result.status == "refused":
        raise InputError(
            f"W&B rejected the dashboard: {result.message}",
            hint="check WANDB_API_KEY, --entity and --project; with --offline the dashboard is only written to a file",
        )
    return _write_offline(arguments, target, result.message)


def _write_offline(arguments: argparse.Namespace, target: ViewTarget, reason: str) -> ExitCode:
    file = arguments.output if arguments.output is not None else _write_specification(arguments, target)
    log.info(f"nothing sent to W&B: {reason}")
    _print_status(arguments, "written", specification=str(file))
    return ExitCode.DONE


def _print_status(arguments: argparse.Namespace, status: str, *, url: str = "", specification: str = "") -> None:
    if arguments.json:
        print_json({"status": status, "url": url or None, "specification": specification or None})
    else:
        print(f"specification: {specification}" if specification else f"{status}: {url}")
    log.info("next: " + (_ONLINE if specification else "open it in a browser; it shows the runs of its W&B project"))


def _write_specification(arguments: argparse.Namespace, target: ViewTarget) -> Path:
    from launcher.analysis.wandb_dashboard.workspace import render_specification
    from launcher.core.run_paths import write_text_atomically

    name = _FILE if arguments.output is None else arguments.output
    file = check_output_file(name, "--output")
    write_text_atomically(file, render_specification(target))
    return file
