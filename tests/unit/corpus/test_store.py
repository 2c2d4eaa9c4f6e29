"""A store is used only if it is complete and intact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus import store
from launcher.corpus.store import (
    create_marked_dir,
    explain_miss,
    find_damage,
    find_store,
    find_stores,
    get_store_dir,
    is_locked,
    lock_store,
    make_key,
    make_scratch_dir,
    publish,
)

PARTS = {"template": "chatml", "packing": "True"}


def publish_one(root: Path, parts: dict[str, str], text: str = "content") -> Path:
    root.mkdir(exist_ok=True)
    with make_scratch_dir(root, make_key(parts)) as scratch:
        (scratch / "train.arrow").write_text(text)
        (scratch / "audit.json").write_text("{}")
        return publish(scratch, root, "neo4j", parts).folder


def test_what_was_published_is_found(tmp_path: Path) -> None:
    folder = publish_one(tmp_path, PARTS)
    store = find_store(tmp_path, make_key(PARTS))
    assert store is not None
    assert store.folder == folder
    assert store.splits == ("train",)
    assert store.num_bytes == len("content") + 2
    assert store.manifest.parts == PARTS
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_key_does_not_depend_on_the_order_of_parts() -> None:
    assert make_key(PARTS) == make_key(dict(reversed(PARTS.items())))
    assert make_key(PARTS) != make_key({**PARTS, "packing": "False"})


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        ("train.arrow", b"cOntent", "train.arrow does not match its hash"),
        ("train.arrow", b"cont", "train.arrow has 4 bytes, not 7"),
        ("train.arrow", None, "train.arrow is missing"),
        ("audit.json", None, "audit.json is missing"),
        ("store.json", None, "store.json is missing or broken"),
        ("store.json", b"", "store.json is missing or broken"),
        ("store.json", b"{}", "store.json is missing or broken"),
        ("store.json", b"\xff\xfe", "store.json is missing or broken"),
        ("store.json", b'{"schema_version": 2}', "store.json is missing or broken"),
    ],
)
def test_damage_is_detected_and_described(tmp_path: Path, name: str, content: bytes | None, damage: str) -> None:
    folder = publish_one(tmp_path, PARTS)
    assert find_damage(folder) is None
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert find_damage(folder) == damage
    assert find_store(tmp_path, make_key(PARTS)) is None


def test_a_store_under_another_key_is_not_used(tmp_path: Path) -> None:
    folder = publish_one(tmp_path, PARTS)
    other = make_key({"template": "qwen3"})
    folder.rename(get_store_dir(tmp_path, other))
    assert find_store(tmp_path, other) is None


def test_a_damaged_store_is_replaced(tmp_path: Path) -> None:
    folder = publish_one(tmp_path, PARTS)
    (folder / "train.arrow").write_text("damaged")
    assert publish_one(tmp_path, PARTS, "again") == folder
    assert (folder / "train.arrow").read_text() == "again"
    (folder / "train.arrow").write_text("damaged")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not created by this program"):
        publish_one(tmp_path, PARTS, "again")
    assert (folder / "notes.txt").exists()


def test_a_miss_is_explained_by_the_nearest_store(tmp_path: Path) -> None:
    assert explain_miss(tmp_path / "nowhere", PARTS) == "no data prepared yet"
    publish_one(tmp_path, {"template": "llama3", "packing": "False", "loss_on": "all"})
    publish_one(tmp_path, {"template": "chatml", "packing": "False"})
    assert explain_miss(tmp_path, PARTS) == "changed since the last preparation: packing"
    assert explain_miss(tmp_path, {**PARTS, "data (test)": "x"}).endswith("preparation: data (test), packing")


def test_incomplete_folders_are_not_listed(tmp_path: Path) -> None:
    folder = publish_one(tmp_path, PARTS)
    (tmp_path / ".x.making-1").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    assert [store.folder for store in find_stores(tmp_path)] == [folder]


def test_scratch_folder_is_always_removed(tmp_path: Path) -> None:
    def fail() -> None:
        with make_scratch_dir(tmp_path, "key") as scratch:
            (scratch / "half").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    key = make_key(PARTS)
    left, found = tmp_path / f".{key[:16]}.making-99999", tmp_path / f".{key[:16]}.making-5"
    create_marked_dir(left, key)
    found.mkdir()
    for folder in (left, found):
        (folder / "train.ids").write_text("x")
    with make_scratch_dir(tmp_path, key) as scratch:
        assert not left.exists()
        assert (found / "train.ids").exists()  # it has no marker
        assert scratch.is_dir()


def test_a_foreign_folder_at_the_place_of_a_store_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / make_key(PARTS)[:16]
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not created by this program"):
        publish_one(tmp_path, PARTS)
    assert (folder / "thesis.tex").exists()


def test_a_lock_is_seen_by_others_and_goes_with_its_holder(tmp_path: Path) -> None:
    assert not is_locked(tmp_path, "key")
    with lock_store(tmp_path, "key"):
        assert is_locked(tmp_path, "key")
        assert not is_locked(tmp_path, "other")
    assert not is_locked(tmp_path, "key")


def test_the_manifest_of_a_store_is_sorted_text(tmp_path: Path) -> None:
    text = (publish_one(tmp_path, PARTS) / "store.json").read_text()
    tree = json.loads(text)
    assert list(tree["parts"]) == sorted(tree["parts"])
    assert list(tree["files"]) == ["audit.json", "train.arrow"]
    assert text.endswith("}\n")


def test_a_large_file_is_read_once_and_its_damage_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is remembered by size, inode and times; writing changes those, even back to the same size."""
    monkeypatch.setattr(store, "_LARGE_BYTES", 1)
    scratch = tmp_path / ".scratch"
    scratch.mkdir()
    (scratch / "train.arrow").write_bytes(b"x" * 1000)
    folder = store.publish(scratch, tmp_path, "neo4j", {"data": "one"}).folder
    assert store.find_damage(folder) is None
    assert "train.arrow" in (tmp_path / ".fingerprints.json").read_text()
    (folder / "train.arrow").write_bytes(b"y" * 1000)
    assert store.find_damage(folder) == "train.arrow does not match its hash"
