"""The expert manifest: its types, and how a file becomes one."""

from launcher.manifest.load import LoadedManifest, load_manifest, manifest_sha256
from launcher.manifest.locate import find_manifest, known_experts
from launcher.manifest.model import Manifest

__all__ = ["LoadedManifest", "Manifest", "find_manifest", "known_experts", "load_manifest", "manifest_sha256"]
