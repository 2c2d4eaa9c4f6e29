"""Print the inventory of data as tables or JSON."""

from __future__ import annotations

from typing import Any

from launcher.cli.tables import print_table
from launcher.core.units import format_gib
from launcher.corpus.inventory import CachedDataset
from launcher.launch.prepare_data import DataInventory


def print_inventory(inventory: DataInventory) -> None:
    """Print datasets and stores as tables."""
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
    """Return the inventory as JSON."""
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
