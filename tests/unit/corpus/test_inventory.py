"""`launcher data` lists, deletes and moves stores without losing one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.bin_packing import PACKER_VERSION
from launcher.corpus.inventory import (
    StoreEntry,
    get_dataset_cache_dirs,
    list_cached_datasets,
    list_stores,
    move_store,
    remove_entries,
)
from launcher.corpus.spec import RULES_VERSION
from launcher.corpus.storage_kind import probe_storage
from launcher.corpus.store import (
    MARKER_FILE,
    create_marked_dir,
    find_damage,
    get_store_dir,
    lock_store,
    make_key,
    publish,
)
from launcher.manifest import list_experts
from tests.conftest import ROOT, python_path
from tests.forked_python import run_python

pytestmark = pytest.mark.long


def make_store(root: Path, expert: str = "neo4j", data: str = "one") -> str:
    scratch = root / ".scratch"
    root.mkdir(parents=True, exist_ok=True)
    create_marked_dir(scratch, make_key({"data": data}))
    (scratch / "audit.json").write_text(data * 100)
    return publish(scratch, root, expert, {"data": data}).manifest.key


def list_entries(root: Path, *keys: str | None) -> list[StoreEntry]:
    return list_stores([root], lambda _: keys or (None,))


def states(root: Path, *keys: str | None) -> dict[str, str]:
    return {entry.folder.name: entry.state for entry in list_entries(root, *keys)}


def test_store_state_depends_on_the_keys_of_its_requests(tmp_path: Path) -> None:
    old, new = make_store(tmp_path, data="old"), make_store(tmp_path, data="new")
    assert states(tmp_path, "other", new) == {new[:16]: "current", old[:16]: "stale"}
    assert states(tmp_path, None, new) == {new[:16]: "current", old[:16]: "unknown"}
    assert set(states(tmp_path).values()) == {"unknown"}


@pytest.mark.parametrize(
    ("part", "version", "state"), [("packer", 1, "stale"), ("rules", 3, "stale"), ("rules", 99, "unknown")]
)
def test_a_store_of_an_older_version_is_stale(tmp_path: Path, part: str, version: int, state: str) -> None:
    """Also if the expert's data is not on this machine; a store of a newer version is kept."""
    parts = {"data": "one", "packer": str(PACKER_VERSION), "rules": str(RULES_VERSION), part: str(version)}
    scratch = tmp_path / ".scratch"
    create_marked_dir(scratch, make_key(parts))
    publish(scratch, tmp_path, "neo4j", parts)
    assert list(states(tmp_path).values()) == [state]


def test_damage_and_leftovers_are_found_but_not_work_in_progress(tmp_path: Path) -> None:
    key = make_store(tmp_path)
    (get_store_dir(tmp_path, key) / "audit.json").write_text("other")
    left, busy = (f".{digit * 16}.making-1" for digit in "ab")
    create_marked_dir(tmp_path / left, "a" * 16)
    create_marked_dir(tmp_path / busy, "b" * 16)
    with (tmp_path / f".{'b' * 16}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = states(tmp_path)
    assert found == {key[:16]: "damaged", left: "left over", busy: "current"}


def test_folders_that_were_only_found_are_not_listed(tmp_path: Path) -> None:
    """Neither by their place nor by their name; a store of version 0.1 is known by its store.json."""
    key = make_store(tmp_path)
    (get_store_dir(tmp_path, key) / MARKER_FILE).unlink()
    elsewhere = tmp_path.parent / "elsewhere"
    other = get_store_dir(elsewhere, make_store(elsewhere, data="other"))
    for name in ("raw", ".git", "0" * 16, f".{'c' * 16}.making-7", ".x.making-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("mine")
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup/store.json").write_text((get_store_dir(tmp_path, key) / "store.json").read_text())
    (tmp_path / ("1" * 16)).symlink_to(elsewhere)
    (tmp_path / other.name).symlink_to(other)
    (tmp_path / ("2" * 16)).symlink_to("nowhere")
    os.mkfifo(tmp_path / ("0" * 16) / "store.json")
    os.mkfifo(tmp_path / ("0" * 16) / MARKER_FILE)
    (tmp_path / "raw" / MARKER_FILE).symlink_to(other / MARKER_FILE)
    assert states(tmp_path) == {key[:16]: "unknown"}
    assert len(list_stores([tmp_path, tmp_path / "raw/.."], lambda _: ())) == 1


def test_a_store_whose_manifest_is_lost_is_damaged(tmp_path: Path) -> None:
    folder = get_store_dir(tmp_path, make_store(tmp_path))
    (folder / "store.json").write_text("{")
    entries = list_entries(tmp_path)
    assert [entry.state for entry in entries] == ["damaged"]
    assert remove_entries(entries) == entries
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nested", "user"])
def test_a_store_with_something_of_the_user_is_kept(tmp_path: Path, kind: str) -> None:
    """Also if it appears after the list was made."""
    damaged, left = get_store_dir(tmp_path, make_store(tmp_path)), tmp_path / f".{'a' * 16}.making-1"
    (damaged / "store.json").write_text("{")
    create_marked_dir(left, "a" * 16)
    before = list_entries(tmp_path)
    assert {entry.state for entry in before} == {"damaged", "left over"}
    for folder in (damaged, left):
        if kind == "file":
            (folder / "notes.txt").write_text("mine")
        elif kind == "folder":
            (folder / "train.arrow").mkdir()
        elif kind == "link":
            (folder / "train.arrow").symlink_to(tmp_path.parent)
        elif kind == "nested":
            (folder / "audit.json").unlink(missing_ok=True)
            os.mkfifo(folder / "audit.json")
        elif os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            pytest.skip("needs root")
    assert {entry.state for entry in list_entries(tmp_path)} == {"unknown"}
    assert remove_entries(before) == []
    assert damaged.is_dir()
    assert left.is_dir()


def test_a_copied_marker_means_nothing(tmp_path: Path) -> None:
    store = get_store_dir(tmp_path, make_store(tmp_path))
    for name in ("0123456789abcdef", ".0123456789abcdef.making-5"):
        (tmp_path / name).mkdir()
        shutil.copy(store / MARKER_FILE, tmp_path / name)
        (tmp_path / name / "train.arrow").write_text("mine")
    shutil.copytree(store, tmp_path / ("f" * 16))
    assert list(states(tmp_path)) == [store.name]


@pytest.mark.parametrize("name", ["../precious.arrow", "/etc/hostname", "a/b.arrow", "thesis.tex"])
def test_a_manifest_that_names_other_files_is_no_manifest(tmp_path: Path, name: str) -> None:
    folder = get_store_dir(tmp_path, make_store(tmp_path))
    tree = json.loads((folder / "store.json").read_text())
    tree["files"] |= {name: {"num_bytes": 1, "sha256": "0"}}
    (folder / "store.json").write_text(json.dumps(tree))
    assert find_damage(folder) == "store.json is missing or broken"


def test_data_that_is_prepared_meanwhile_is_kept(tmp_path: Path) -> None:
    key = make_store(tmp_path)
    folder = get_store_dir(tmp_path, key)
    (folder / "audit.json").write_text("damaged")
    before = list_entries(tmp_path)
    assert [entry.state for entry in before] == ["damaged"]
    with lock_store(tmp_path, key):
        assert remove_entries(before) == []
    make_store(tmp_path)
    assert remove_entries(before) == []
    assert find_damage(folder) is None


def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / f".{'a' * 16}.lock").symlink_to("thesis.tex")
    with pytest.raises(InputError, match="is a symbolic link"), lock_store(tmp_path, "a" * 16):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    os.mkfifo(tmp_path / f".{'b' * 16}.lock")
    with lock_store(tmp_path, "b" * 16):
        pass


def test_prune_deletes_only_prunable_stores(tmp_path: Path) -> None:
    old, new = make_store(tmp_path, data="old"), make_store(tmp_path, data="new")
    entries = list_entries(tmp_path, new)
    removed = remove_entries(entry for entry in entries if entry.is_prunable)
    assert sum(entry.num_bytes for entry in removed) > 0
    assert not get_store_dir(tmp_path, old).exists()
    assert find_damage(get_store_dir(tmp_path, new)) is None


def entry_of(folder: Path) -> StoreEntry:
    return StoreEntry(folder=folder, expert="neo4j", num_bytes=1, state="current", reason="")


def test_move_never_loses_a_store(tmp_path: Path) -> None:
    """At the same place below the folder of all data: a manifest may name its own."""
    old, disk = tmp_path / "here", tmp_path / "fast"
    root = old / "cache/of/neo4j"
    key = make_store(root)
    target = move_store(entry_of(get_store_dir(root, key)), old, disk)
    assert target == disk / "cache/of/neo4j" / key[:16]
    assert find_damage(target) is None
    assert not get_store_dir(root, key).exists()
    make_store(root)
    with pytest.raises(InputError, match="already exists: nothing was moved"):
        move_store(entry_of(get_store_dir(root, key)), old, disk)
    assert find_damage(get_store_dir(root, key)) is None
    disk_file = tmp_path / "file"
    disk_file.write_text("no folder")
    with pytest.raises(InputError, match="cannot be moved to"):
        move_store(entry_of(get_store_dir(root, key)), old, disk_file)


def test_full_disk_is_named_when_a_store_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, disk = tmp_path / "here", tmp_path / "fast"
    folder = get_store_dir(root, make_store(root))

    def copy(*_: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(InputError, match=r"cannot be moved to .*: \[Errno 28\] No space left on device"):
        move_store(entry_of(folder), root.parent, disk)
    assert find_damage(folder) is None


def test_a_damaged_store_is_not_moved(tmp_path: Path) -> None:
    root, disk = tmp_path / "here", tmp_path / "fast"
    folder = get_store_dir(root, make_store(root))
    (folder / "audit.json").write_text("other")
    with pytest.raises(InputError, match=r"the copy .* is damaged") as caught:
        move_store(entry_of(folder), root.parent, disk)
    assert caught.value.hint == "the original was not touched"
    assert folder.is_dir()
    assert list((disk / root.name).iterdir()) == []


def test_caches_are_where_the_environment_says(tmp_path: Path) -> None:
    assert get_dataset_cache_dirs({}, tmp_path) == (
        tmp_path / ".cache/huggingface/hub",
        tmp_path / ".cache/huggingface/datasets",
    )
    assert get_dataset_cache_dirs({"HF_HOME": "/a"}, tmp_path) == (Path("/a/hub"), Path("/a/datasets"))
    given = {"HF_HUB_CACHE": "/b", "HF_DATASETS_CACHE": "/b"}
    assert get_dataset_cache_dirs(given, tmp_path) == (Path("/b"),)


def test_cached_datasets_are_named_sized_and_attributed(tmp_path: Path) -> None:
    blobs = tmp_path / "datasets--neo4j--text2cypher-2025v1/blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_bytes(b"x" * 1000)
    snapshot = blobs.parent / "snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "train.parquet").symlink_to(blobs / "abc")
    (tmp_path / "gretelai___synthetic_text_to_sql").mkdir()
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    users = {"neo4j/text2cypher-2025v1": ["neo4j"]}
    found = {dataset.name: dataset for dataset in list_cached_datasets([tmp_path, tmp_path / "none"], users)}
    assert set(found) == {"neo4j/text2cypher-2025v1", "gretelai/synthetic_text_to_sql"}
    assert found["neo4j/text2cypher-2025v1"].num_bytes == 1000
    assert found["neo4j/text2cypher-2025v1"].experts == ("neo4j",)


@pytest.mark.parametrize(
    ("filesystem", "rotational", "kind", "disk"),
    [
        ("ext4", "1", "hard disk", "sda"),
        ("ext4", "0", "ssd", "sda"),
        ("ext4", "1", "unknown", "vda1"),
        ("nfs4", None, "network", ""),
        ("tmpfs", None, "memory", ""),
        ("x", None, "unknown", ""),
    ],
)
def test_storage_kinds(tmp_path: Path, filesystem: str, rotational: str | None, kind: str, disk: str) -> None:
    """A made-up /proc and /sys, for the device that this folder really is on."""
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (root / "proc/mounts").write_text(f"none / ext2 rw 0 0\ndevice {tmp_path} {filesystem} rw 0 0\n")
    if rotational is not None:
        device = tmp_path.stat().st_dev
        queue = root / "sys/devices/block" / disk / "queue"
        queue.mkdir(parents=True)
        (queue / "rotational").write_text(f"{rotational}\n")
        block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
        block.parent.mkdir(parents=True)
        block.symlink_to(queue.parent)
    storage = probe_storage(tmp_path / "not/there/yet", root)
    assert (storage.kind, storage.filesystem, storage.mount) == (kind, filesystem, str(tmp_path))
    assert storage.is_slow == (kind in ("hard disk", "network"))
    assert storage.free_bytes > 0


def launcher_data(tmp_path: Path, *flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LAUNCHER_DATA_DIR": str(tmp_path / "data"), "HF_HOME": str(tmp_path / "hf")}
    environment |= {"PYTHONPATH": python_path(), "COLUMNS": "200"}
    return run_python(["-m", "launcher", "data", *flags], cwd=cwd, env=environment)


@pytest.mark.process
def test_the_command_lists_asks_and_prunes(tmp_path: Path) -> None:
    root = tmp_path / "data/datasets_optimized/neo4j"
    key = make_store(root)
    first, second = (root / f".{digit * 16}.making-9" for digit in "01")
    create_marked_dir(first, "0" * 16)
    listed = json.loads(launcher_data(tmp_path, "--json").stdout)
    assert {store["folder"]: store["state"] for store in listed["stores"]} == {
        str(get_store_dir(root, key)): "unknown",
        str(first): "left over",
    }
    asked = launcher_data(tmp_path, "--prune")
    assert asked.returncode == 2
    assert "no terminal to prompt on" in asked.stderr
    assert first.exists()
    done = launcher_data(tmp_path, "--prune", "--yes")
    assert done.returncode == 0, done.stderr
    assert not first.exists()
    assert find_damage(get_store_dir(root, key)) is None
    create_marked_dir(second, "1" * 16)
    report = json.loads(launcher_data(tmp_path, "--prune", "--yes", "--json").stdout)
    assert report["deleted"] == [str(second)]
    assert not second.exists()
    moved = launcher_data(tmp_path, "--move-to", str(tmp_path / "fast disk"), "--yes")
    assert moved.returncode == 0, moved.stderr
    assert f"export LAUNCHER_DATA_DIR='{tmp_path / 'fast disk'}'\n" in moved.stdout
    assert find_damage(tmp_path / "fast disk/datasets_optimized/neo4j" / key[:16]) is None


def test_experts_of_the_working_directory_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launcher new` writes them there; their prepared data is listed with its state."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert set(list_experts()) == {"json", "neo4j", "shop", "sql", "typescript"}


@pytest.mark.process
def test_inventory_without_data(tmp_path: Path) -> None:
    result = launcher_data(tmp_path)
    assert result.returncode == 0
    assert "No datasets in the Hugging Face caches." in result.stdout
    assert "No prepared data" in result.stdout


@pytest.mark.process
def test_a_broken_manifest_does_not_hide_everybodys_data(tmp_path: Path) -> None:
    (tmp_path / "experts/mine").mkdir(parents=True)
    (tmp_path / "experts/mine/manifest.json").write_text("{")
    key = make_store(tmp_path / "data/datasets_optimized/neo4j")
    result = launcher_data(tmp_path, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [store["folder"].rsplit("/", 1)[1] for store in json.loads(result.stdout)["stores"]] == [key[:16]]


def snapshot(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.process
@pytest.mark.parametrize("cache", ["data", pytest.param("datasets_optimized", marks=pytest.mark.slow)])
def test_pruning_keeps_folders_of_the_user(tmp_path: Path, cache: str) -> None:
    manifest = json.loads((ROOT / "experts/json/manifest.json").read_text())
    manifest["name"] = "expert-mine"
    manifest["training"]["config"]["pretokenized_cache"] = cache
    write_project(tmp_path, manifest)
    key = make_store(tmp_path / "datasets_optimized/json", expert="json")
    before = snapshot(tmp_path)
    listed = run_data(tmp_path, "--json")
    assert listed.returncode == 0, listed.stderr
    assert snapshot(tmp_path) == before
    assert [Path(store["folder"]).name for store in json.loads(listed.stdout)["stores"]] == [key[:16]]
    pruned = run_data(tmp_path, "--prune", "--yes")
    assert pruned.returncode == 0, pruned.stderr
    kept = {name for name in before if key[:16] not in name}
    assert kept <= set(snapshot(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "cache"),
    [("expert-..", None), pytest.param("expert-mine", ".", marks=pytest.mark.slow), ("expert-mine", "../x")],
)
def test_a_hostile_manifest_deletes_nothing(tmp_path: Path, name: str, cache: str | None) -> None:
    manifest = json.loads((ROOT / "experts/json/manifest.json").read_text())
    manifest["name"] = name
    if cache is not None:
        manifest["training"]["config"]["pretokenized_cache"] = cache
    write_project(tmp_path, manifest)
    before = snapshot(tmp_path)
    pruned = run_data(tmp_path, "--prune", "--yes")
    assert pruned.returncode == 0, pruned.stderr
    assert "Nothing to delete" in pruned.stdout
    assert snapshot(tmp_path) == before


def write_project(folder: Path, manifest: object) -> None:
    for name in ("experts/mine/sample", "data/raw", ".git", "my-thesis", "runs/one", "datasets_optimized/notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("mine")
    (folder / "experts/mine/manifest.json").write_text(json.dumps(manifest))
    for file in (ROOT / "experts/json/sample").glob("*.jsonl"):
        (folder / "experts/mine/sample" / file.name).write_bytes(file.read_bytes())
    (folder / "data/link").symlink_to(folder / "my-thesis")


def run_data(cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_launcher(cwd, "data", *flags)


def run_launcher(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HOME": str(cwd.parent / "hf"), "COLUMNS": "200"}
    environment.pop("LAUNCHER_DATA_DIR", None)
    return run_python(["-m", "launcher", *words], cwd=cwd, env=environment)


@pytest.mark.process
def test_data_that_a_later_command_uses_is_not_stale(tmp_path: Path) -> None:
    """Of experts in the working folder or named by path, with other flags, until the manifest or the rows change."""
    manifest = json.loads((ROOT / "experts/json/manifest.json").read_text())
    for name in ("mine", "elsewhere/other"):
        folder = tmp_path / name
        (folder / "sample").mkdir(parents=True)
        manifest["name"] = f"expert-{folder.name}"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for file in (ROOT / "experts/json/sample").glob("*.jsonl"):
            (folder / "sample" / file.name).write_text("".join(file.open().readlines()[:40]))
    length = ("--set", "training.config.max_seq_length=256")
    for words in (("mine",), ("mine", *length), ("elsewhere/other",), ("elsewhere/other", *length)):
        prepared = run_launcher(tmp_path, "prepare", *words, "--profile", "smoke")
        assert prepared.returncode == 0, prepared.stderr
    stores = json.loads(run_data(tmp_path, "--json").stdout)["stores"]
    assert sorted((store["expert"], store["state"]) for store in stores) == [
        (name, "current") for name in ("mine", "mine", "other", "other")
    ]
    assert len((Path(tmp_path / stores[0]["folder"]) / "requests.jsonl").read_text().splitlines()) == 1
    (tmp_path / "elsewhere/other/manifest.json").rename(tmp_path / "manifest.json")
    with (tmp_path / "mine/sample/train.jsonl").open("a") as rows:
        rows.write(file.open().readline())
    stores = json.loads(run_data(tmp_path, "--json").stdout)["stores"]
    assert {(store["expert"], store["state"]) for store in stores} == {("mine", "stale"), ("other", "unknown")}
