"""`launcher validate`: check a manifest and list the keys that training does not use."""

from __future__ import annotations

import argparse

from launcher.cli.tables import print_json
from launcher.core.errors import ExitCode, escape
from launcher.core.run_paths import expand_home

_UNREMARKABLE = ("schema_version", "description")  # unused keys that `launcher new` writes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a validation."""
    parser.add_argument(
        "expert", type=expand_home, metavar="EXPERT", help="an expert by name (neo4j), or the path of a manifest.json"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Check a manifest and list its keys without effect."""
    from launcher.corpus.first_rows import find_missing_files
    from launcher.manifest import find_manifest, load_manifest
    from launcher.manifest.ignored_keys import find_ignored_keys
    from launcher.manifest.trust import list_code
    from launcher.plan.task_eval import check_best_metric
    from launcher.request.request import check_inputs

    loaded = load_manifest(find_manifest(arguments.expert), arguments.overrides)
    check_best_metric(loaded.manifest)
    notes = check_inputs(loaded)
    missing = find_missing_files(loaded.manifest.training.dataset, loaded.folder)
    ignored_keys = [item for item in find_ignored_keys(loaded.keys) if item.path not in _UNREMARKABLE]
    if arguments.json:
        result = {
            "valid": True,
            "path": str(loaded.path),
            "expert": loaded.manifest.expert,
            "code": list(list_code(loaded.manifest)),
            "notes": list(notes),
            "missing_files": {key: str(path) for key, path in missing.items()},
            "not_used": [{"key": item.path, "reason": item.reason} for item in ignored_keys],
        }
        print_json(result)
        return ExitCode.DONE
    verdict = "valid" if not missing else f"valid, but {len(missing)} data file{'s'[: len(missing) != 1]} missing"
    print(f"{escape(str(loaded.path))}: {verdict} (expert {loaded.manifest.expert}, schema {loaded.schema_version})")
    for code in list_code(loaded.manifest):
        print(f"note: the manifest names code, which is executed only with --trust: {escape(code)}")
    for note in notes:
        print(f"note: {escape(note)}")
    if ignored_keys:
        from launcher.cli.tables import print_table

        print("\nKnown keys that training does not use:")
        print_table(("key", "reason"), [(item.path, item.reason) for item in ignored_keys])
    return ExitCode.DONE
