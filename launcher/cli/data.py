"""`launcher data`: which data lies where, how large, on what storage, who uses it, and what can go."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ExitCode, InputError

if TYPE_CHECKING:
    from launcher.corpus.inventory import StoreEntry
    from launcher.preparing import DataInventory

HELP = "list cached datasets and prepared data; delete what is stale, move stores to a faster disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prune", action="store_true", help="delete stale, damaged and left-over stores; asks first")
    what.add_argument("--move-to", metavar="DIR", help="move the stores to a folder on another disk")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the list, and what was done, as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.preparing import take_inventory

    inventory = take_inventory()
    if arguments.json:
        _print_json(arguments, inventory)
        return ExitCode.DONE
    from launcher.cli.show_data import print_inventory

    print_inventory(inventory)
    if arguments.prune:
        _prune(inventory.stores, ask=not arguments.yes)
    elif arguments.move_to:
        _move(inventory.stores, Path(arguments.move_to), ask=not arguments.yes)
    return ExitCode.DONE


def _print_json(arguments: argparse.Namespace, inventory: DataInventory) -> None:
    """What was there; and what was done about it, for which nobody can be asked."""
    from launcher.cli.show_data import as_json
    from launcher.corpus.inventory import move_store, remove_entries
    from launcher.corpus.preparation import data_dir

    told = as_json(inventory)
    if (arguments.prune or arguments.move_to) and not arguments.yes:
        raise InputError("with --json nobody is asked", hint="--yes does it without asking")
    if arguments.prune:
        chosen = [entry for entry in inventory.stores if entry.is_prunable]
        told["deleted"] = [str(entry.folder) for entry in chosen]
        told["freed_bytes"] = remove_entries(chosen)
    elif arguments.move_to:
        target, movable = Path(arguments.move_to), [entry for entry in inventory.stores if entry.is_movable]
        told["moved"] = [
            {"from": str(entry.folder), "to": str(move_store(entry, data_dir(), target))} for entry in movable
        ]
    json.dump(told, sys.stdout, indent=2, ensure_ascii=False)
    print()


def _prune(stores: tuple[StoreEntry, ...], *, ask: bool) -> None:
    from launcher.corpus.inventory import remove_entries
    from launcher.units import format_gib

    chosen = [entry for entry in stores if entry.is_prunable]
    if not chosen:
        print("\nNothing to delete.")
        return
    print("\nTo be deleted:")
    for entry in chosen:
        print(f"  {entry.folder} ({entry.state}: {entry.reason})")
    if _agreed("Delete them?", ask):
        print(f"Freed {format_gib(remove_entries(chosen))}.")


def _move(stores: tuple[StoreEntry, ...], target: Path, *, ask: bool) -> None:
    from launcher.corpus.inventory import move_store
    from launcher.corpus.preparation import data_dir

    chosen = [entry for entry in stores if entry.is_movable]
    if not chosen:
        print("\nNothing to move.")
        return
    if _agreed(f"\nMove {len(chosen)} stores to {target}?", ask):
        for entry in chosen:
            print(f"  {entry.folder} -> {move_store(entry, data_dir(), target)}")
        print(f"From now on: export LAUNCHER_DATA_DIR={target}")


def _agreed(question: str, ask: bool) -> bool:
    if not ask:
        return True
    if not sys.stdin.isatty():
        raise InputError("nobody is there to answer", hint="--yes does it without asking")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
