"""Expert manifests: types, lookup and loading."""

from launcher.manifest.load import LoadedManifest, load_manifest, manifest_sha256
from launcher.manifest.locate import find_manifest, list_experts
from launcher.manifest.model import Manifest

__all__ = ["LoadedManifest", "Manifest", "find_manifest", "list_experts", "load_manifest", "manifest_sha256"]
