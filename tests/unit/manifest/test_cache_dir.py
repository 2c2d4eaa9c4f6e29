"""The folder of prepared data is inside the data folder and holds nothing else; names are path components."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import InputError, ManifestError
from launcher.manifest import load_manifest
from launcher.manifest.cache_dir import resolve_cache_dir
from tests.conftest import WriteManifest

CACHE = "training.config.pretokenized_cache"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "root"
    (folder / "experts").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LAUNCHER_DATA_DIR", raising=False)
    return folder


@pytest.mark.parametrize("cache", ["../outside", "a/../../outside", "/outside", "link/inside", ".."])
def test_a_manifest_cannot_write_outside_the_data_folder(root: Path, cache: str) -> None:
    (root.parent / "elsewhere").mkdir()
    (root / "link").symlink_to(root.parent / "elsewhere")
    with pytest.raises(InputError, match=r"pretokenized_cache: .* is outside the data folder") as caught:
        resolve_cache_dir(cache)
    assert "LAUNCHER_DATA_DIR" in caught.value.hint


@pytest.mark.parametrize("cache", ["a/../b/c", "data", "datasets_optimized", "experts/mine/cache", "..data", "a b"])
@pytest.mark.usefixtures("root")
def test_any_other_folder_inside_is_accepted(cache: str) -> None:
    assert resolve_cache_dir(cache) == Path() / cache


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (".", "is the data folder itself"),
        ("./", "is the data folder itself"),
        ("a/..", "is the data folder itself"),
        ("experts", "is the experts folder"),
        ("./experts/", "is the experts folder"),
        ("loop", "is the data folder itself"),
        ("a\0b", "is not a usable path"),
        ("ring", "is not a usable path"),
    ],
)
def test_a_cache_at_another_purpose_is_refused_with_the_manifest(
    root: Path, write_manifest: WriteManifest, cache: str, reason: str
) -> None:
    (root / "loop").symlink_to(root)
    (root / "ring").symlink_to(root / "ring")
    with pytest.raises(ManifestError, match=rf"training\.config\.pretokenized_cache: .*{reason}"):
        load_manifest(write_manifest({CACHE: cache}))


def test_a_cache_around_the_working_or_home_directory_is_refused(
    root: Path, write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(root.parent))
    (root.parent / "users/me").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(root.parent / "users/me"))
    for cache, reason in (
        ("root", "is the working directory"),
        ("users", "contains the home directory"),
        ("users/me", "is the home directory"),
    ):
        with pytest.raises(ManifestError, match=reason):
            load_manifest(write_manifest({CACHE: cache}))
    assert load_manifest(write_manifest({CACHE: "users/me/cache"})).manifest.expert == "neo4j"


@pytest.mark.parametrize(
    "name", ["expert-..", "expert-", "expert-.", "expert-.x", "expert--", "expert-_", "expert-../x"]
)
def test_a_name_that_is_no_folder_name_is_refused(write_manifest: WriteManifest, name: str) -> None:
    with pytest.raises(ManifestError, match="name: "):
        load_manifest(write_manifest({"name": name}))


@pytest.mark.parametrize("version", ["1.0.0\n$(id)", "1.0.0\n", "1.0", "1.0.0 ", "1.0.0-", "1.0.0/..", "\u0661.0.0"])
def test_a_version_has_no_other_text_after_it(write_manifest: WriteManifest, version: str) -> None:
    with pytest.raises(ManifestError, match="version: "):
        load_manifest(write_manifest({"version": version}))


@pytest.mark.parametrize("version", ["1.0.0", "1.2.3-rc.1", "1.2.3rc1", "1.2.3+build.5"])
def test_usual_versions_are_accepted(write_manifest: WriteManifest, version: str) -> None:
    assert load_manifest(write_manifest({"version": version})).manifest.version == version
