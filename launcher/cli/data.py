"""`launcher data`: list cached datasets and prepared data, delete stale stores, move stores to another disk."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.tables import confirm, print_json, print_table
from launcher.core.errors import ExitCode, InputError
from launcher.core.run_paths import expand_home
from launcher.core.units import format_gib

if TYPE_CHECKING:
    from launcher.corpus.inventory import CachedDataset, StoreEntry
    from launcher.launch.prepare_data import DataInventory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher data`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prune", action="store_true", help="delete stale, damaged and temporary stores (asks first)")
    what.add_argument("--move-to", type=expand_home, metavar="DIR", help="move the stores to a folder on another disk")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print the list and the result as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run `launcher data`."""
    from launcher.launch.prepare_data import take_inventory

    inventory = take_inventory()
    if arguments.json:
        _print_json(arguments, inventory)
        return ExitCode.DONE
    print_inventory(inventory)
    if arguments.prune:
        _prune(inventory.stores, ask=not arguments.yes)
    elif arguments.move_to:
        _move(inventory.stores, Path(arguments.move_to), ask=not arguments.yes)
    return ExitCode.DONE


def _print_json(arguments: argparse.Namespace, inventory: DataInventory) -> None:
    """Print the inventory and what was deleted or moved as JSON; refuse to delete or move anything without --yes."""
    from launcher.corpus.inventory import move_store, remove_entries
    from launcher.manifest.cache_dir import get_data_dir

    report = as_json(inventory)
    if (arguments.prune or arguments.move_to) and not arguments.yes:
        raise InputError("--json cannot prompt", hint="pass --yes")
    if arguments.prune:
        removed = remove_entries(entry for entry in inventory.stores if entry.is_prunable)
        report["deleted"] = [str(entry.folder) for entry in removed]
        report["freed_bytes"] = sum(entry.num_bytes for entry in removed)
    elif arguments.move_to:
        target, movable = Path(arguments.move_to), [entry for entry in inventory.stores if entry.is_movable]
        report["moved"] = [
            {"from": str(entry.folder), "to": str(move_store(entry, get_data_dir(), target))} for entry in movable
        ]
    print_json(report)


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
    if confirm("Delete them?", ask):
        print(f"Freed {format_gib(sum(entry.num_bytes for entry in remove_entries(chosen)))}.")


def _move(stores: tuple[StoreEntry, ...], target: Path, *, ask: bool) -> None:
    from launcher.corpus.inventory import move_store
    from launcher.manifest.cache_dir import get_data_dir

    chosen = [entry for entry in stores if entry.is_movable]
    if not chosen:
        print("\nNothing to move.")
        return
    if confirm(f"\nMove {len(chosen)} stores to {target}?", ask):
        for entry in chosen:
            print(f"  {entry.folder} -> {move_store(entry, get_data_dir(), target)}")
        print(f"To use them: export LAUNCHER_DATA_DIR={shlex.quote(str(target.absolute()))}")


def print_inventory(inventory: DataInventory) -> None:
    """Print the cached datasets and the prepared data as tables."""
    if inventory.datasets:
        print("Datasets in Hugging Face caches:")
        rows = [
            (
                d.name,
                format_gib(d.num_bytes),
                _storage(d),
                ", ".join(d.experts) or "-",
                str(d.folder),
            )
            for d in inventory.datasets
        ]
        print_table(("dataset", "size", "storage", "used by", "folder"), rows, styles=("cyan",))
    else:
        print("No datasets in the Hugging Face caches.")
    print()
    if inventory.stores:
        print("Prepared data:")
        stores = [(s.expert, format_gib(s.num_bytes), s.state, s.reason, str(s.folder)) for s in inventory.stores]
        print_table(("expert", "size", "state", "reason", "folder"), stores, styles=("cyan",))
    else:
        print("No prepared data; create it with `launcher prepare EXPERT`.")


def _storage(dataset: CachedDataset) -> str:
    return f"{dataset.storage.kind} (slow)" if dataset.storage.is_slow else dataset.storage.kind


def as_json(inventory: DataInventory) -> dict[str, Any]:
    """Return the cached datasets and the prepared data as a JSON object."""
    return {
        "datasets": [
            {
                "name": d.name,
                "folder": str(d.folder),
                "bytes": d.num_bytes,
                "storage": d.storage.kind,
                "slow": d.storage.is_slow,
                "experts": list(d.experts),
            }
            for d in inventory.datasets
        ],
        "stores": [
            {"expert": s.expert, "folder": str(s.folder), "bytes": s.num_bytes, "state": s.state, "reason": s.reason}
            for s in inventory.stores
        ],
    }
