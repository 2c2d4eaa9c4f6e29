"""`launcher data`: list cached datasets and prepared data, delete stale stores, move stores to another disk."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core.errors import ExitCode, InputError

if TYPE_CHECKING:
    from launcher.corpus.inventory import StoreEntry
    from launcher.launch.prepare_data import DataInventory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher data`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prune", action="store_true", help="delete stale, damaged and temporary stores (asks first)")
    what.add_argument("--move-to", metavar="DIR", help="move the stores to a folder on another disk")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print the list and the result as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run `launcher data`."""
    from launcher.launch.prepare_data import take_inventory

    inventory = take_inventory()
    if arguments.json:
        _print_json(arguments, inventory)
        return ExitCode.DONE
    from launcher.cli.print_data import print_inventory

    print_inventory(inventory)
    if arguments.prune:
        _prune(inventory.stores, ask=not arguments.yes)
    elif arguments.move_to:
        _move(inventory.stores, Path(arguments.move_to), ask=not arguments.yes)
    return ExitCode.DONE


def _print_json(arguments: argparse.Namespace, inventory: DataInventory) -> None:
    """Print the inventory and the result; --json cannot prompt."""
    from launcher.cli.print_data import as_json
    from launcher.corpus.inventory import move_store, remove_entries
    from launcher.corpus.spec import get_data_dir

    report = as_json(inventory)
    if (arguments.prune or arguments.move_to) and not arguments.yes:
        raise InputError("--json cannot prompt", hint="pass --yes")
    if arguments.prune:
        chosen = [entry for entry in inventory.stores if entry.is_prunable]
        report["deleted"] = [str(entry.folder) for entry in chosen]
        report["freed_bytes"] = remove_entries(chosen)
    elif arguments.move_to:
        target, movable = Path(arguments.move_to), [entry for entry in inventory.stores if entry.is_movable]
        report["moved"] = [
            {"from": str(entry.folder), "to": str(move_store(entry, get_data_dir(), target))} for entry in movable
        ]
    json.dump(report, sys.stdout, indent=2, ensure_ascii=False)
    print()


def _prune(stores: tuple[StoreEntry, ...], *, ask: bool) -> None:
    from launcher.core.units import format_gib
    from launcher.corpus.inventory import remove_entries

    chosen = [entry for entry in stores if entry.is_prunable]
    if not chosen:
        print("\nNothing to delete.")
        return
    print("\nStores to delete:")
    for entry in chosen:
        print(f"  {entry.folder} ({entry.state}: {entry.reason})")
    if _confirm("Delete them?", ask):
        print(f"Freed {format_gib(remove_entries(chosen))}.")


def _move(stores: tuple[StoreEntry, ...], target: Path, *, ask: bool) -> None:
    from launcher.corpus.inventory import move_store
    from launcher.corpus.spec import get_data_dir

    chosen = [entry for entry in stores if entry.is_movable]
    if not chosen:
        print("\nNothing to move.")
        return
    if _confirm(f"\nMove {len(chosen)} stores to {target}?", ask):
        for entry in chosen:
            print(f"  {entry.folder} -> {move_store(entry, get_data_dir(), target)}")
        print(f"To use them: export LAUNCHER_DATA_DIR={target}")


def _confirm(question: str, ask: bool) -> bool:
    if not ask:
        return True
    if not sys.stdin.isatty():
        raise InputError("no terminal to prompt on", hint="pass --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
