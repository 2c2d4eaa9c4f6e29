"""Catalogue of known base models, and lookup of models on this disk. Nothing is downloaded.

The numbers come from each model's published config.json. A test compares every entry with the parameter count of
transformers on the meta device, and most of them with their published totals.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from launcher.core.errors import InputError, Problem
from launcher.core.units import mib_to_bytes

BaseKeys = Mapping[str, str | int | bool]  # the keys of a config.json that decide the shape

TINY_BASE_NAME = "launcher/tiny"  # included in this project for the smoke profile
TINY_BASE_FOLDER = Path(__file__).resolve().parent / "tiny_base"

_MAX_CONFIG_MIB = 4
# Parts of a name that describe tuning or publication, not size.
_TUNING_WORDS = frozenset({"instruct", "base", "it", "chat", "hf", "pt", "meta"})


def _keys(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    vocab: int,
    positions: int,
    tied: bool = False,
    head_dim: int | None = None,
) -> BaseKeys:
    keys: dict[str, str | int | bool] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
    return MappingProxyType(keys if head_dim is None else {**keys, "head_dim": head_dim})


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, positions: int, tied: bool = False) -> BaseKeys:
    return _keys(
        "qwen3", hidden, layers, heads, 8, intermediate, vocab=151936, positions=positions, tied=tied, head_dim=128
    )


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, positions: int, tied: bool = False
) -> BaseKeys:
    vocab = 151936 if hidden <= 2048 else 152064  # padded further from 7B up
    return _keys("qwen2", hidden, layers, heads, kv_heads, intermediate, vocab=vocab, positions=positions, tied=tied)


def _llama3(
    hidden: int, layers: int, heads: int, intermediate: int, positions: int = 131072, tied: bool = False
) -> BaseKeys:
    return _keys("llama", hidden, layers, heads, 8, intermediate, vocab=128256, positions=positions, tied=tied)


def _smollm(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, positions: int) -> BaseKeys:
    return _keys("llama", hidden, layers, heads, kv_heads, intermediate, vocab=49152, positions=positions, tied=True)


def _gemma(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, head_dim: int = 256
) -> BaseKeys:
    return _keys(
        model_type,
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        vocab=256000,
        positions=8192,
        tied=True,
        head_dim=head_dim,
    )


def _mistral(hidden: int, layers: int, intermediate: int, vocab: int, positions: int) -> BaseKeys:
    return _keys("mistral", hidden, layers, 32, 8, intermediate, vocab=vocab, positions=positions, head_dim=128)


def _phi3(
    hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, positions: int, layers: int = 32
) -> BaseKeys:
    tied = vocab == 200064  # Phi-4-mini, the only one that ties
    return _keys("phi3", hidden, layers, heads, kv_heads, intermediate, vocab=vocab, positions=positions, tied=tied)


def _experts(keys: BaseKeys, count: int, active: int, width: int | None = None) -> BaseKeys:
    inner = {} if width is None else {"moe_intermediate_size": width}
    return MappingProxyType({**keys, "num_experts": count, "num_experts_per_tok": active, **inner})


def _qwen3_moe(hidden: int, layers: int, heads: int, intermediate: int, width: int, positions: int) -> BaseKeys:
    keys = _keys("qwen3_moe", hidden, layers, heads, 4, intermediate, vocab=151936, positions=positions, head_dim=128)
    return _experts(keys, 128, 8, width)


def _gpt_oss(layers: int, count: int) -> BaseKeys:
    keys = _keys("gpt_oss", 2880, layers, 64, 8, 2880, vocab=201088, positions=131072, head_dim=64)
    return _experts(keys, count, 4)


_PHI3_4K = _phi3(3072, 32, 32, 8192, 32064, 4096)
_PHI3_128K = _phi3(3072, 32, 32, 8192, 32064, 131072)
_PHI4_MINI = _phi3(3072, 24, 8, 8192, 200064, 131072)

# One entry per shape: every published name that has it, and its sizes. Base and tuned models of some families differ
# in context length and are separate entries.
_TABLE: tuple[tuple[str, BaseKeys], ...] = (
    (TINY_BASE_NAME, _keys("qwen3", 256, 6, 4, 2, 768, vocab=4096, positions=4096, tied=True, head_dim=64)),
    # Qwen3: hidden, layers, heads, intermediate, positions
    ("Qwen/Qwen3-0.6B", _qwen3(1024, 28, 16, 3072, 40960, tied=True)),
    ("Qwen/Qwen3-0.6B-Base", _qwen3(1024, 28, 16, 3072, 32768, tied=True)),
    ("Qwen/Qwen3-1.7B", _qwen3(2048, 28, 16, 6144, 40960, tied=True)),
    ("Qwen/Qwen3-1.7B-Base", _qwen3(2048, 28, 16, 6144, 32768, tied=True)),
    ("Qwen/Qwen3-4B", _qwen3(2560, 36, 32, 9728, 40960, tied=True)),
    ("Qwen/Qwen3-4B-Base", _qwen3(2560, 36, 32, 9728, 32768, tied=True)),
    ("Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507", _qwen3(2560, 36, 32, 9728, 262144, tied=True)),
    ("Qwen/Qwen3-8B", _qwen3(4096, 36, 32, 12288, 40960)),
    ("Qwen/Qwen3-8B-Base", _qwen3(4096, 36, 32, 12288, 32768)),
    ("Qwen/Qwen3-14B", _qwen3(5120, 40, 40, 17408, 40960)),
    ("Qwen/Qwen3-14B-Base", _qwen3(5120, 40, 40, 17408, 32768)),
    ("Qwen/Qwen3-32B", _qwen3(5120, 64, 64, 25600, 40960)),
    # Qwen2.5: hidden, layers, heads, key-value heads, intermediate, positions
    (
        "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-Coder-0.5B Qwen/Qwen2.5-Coder-0.5B-Instruct",
        _qwen2(896, 24, 14, 2, 4864, 32768, tied=True),
    ),
    ("Qwen/Qwen2.5-1.5B", _qwen2(1536, 28, 12, 2, 8960, 131072, tied=True)),
    (
        "Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-Coder-1.5B Qwen/Qwen2.5-Coder-1.5B-Instruct",
        _qwen2(1536, 28, 12, 2, 8960, 32768, tied=True),
    ),
    (
        "Qwen/Qwen2.5-3B Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-Coder-3B Qwen/Qwen2.5-Coder-3B-Instruct",
        _qwen2(2048, 36, 16, 2, 11008, 32768, tied=True),
    ),
    ("Qwen/Qwen2.5-7B", _qwen2(3584, 28, 28, 4, 18944, 131072)),
    (
        "Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-Coder-7B Qwen/Qwen2.5-Coder-7B-Instruct",
        _qwen2(3584, 28, 28, 4, 18944, 32768),
    ),
    ("Qwen/Qwen2.5-14B", _qwen2(5120, 48, 40, 8, 13824, 131072)),
    (
        "Qwen/Qwen2.5-14B-Instruct Qwen/Qwen2.5-Coder-14B Qwen/Qwen2.5-Coder-14B-Instruct",
        _qwen2(5120, 48, 40, 8, 13824, 32768),
    ),
    ("Qwen/Qwen2.5-32B", _qwen2(5120, 64, 40, 8, 27648, 131072)),
    (
        "Qwen/Qwen2.5-32B-Instruct Qwen/Qwen2.5-Coder-32B Qwen/Qwen2.5-Coder-32B-Instruct",
        _qwen2(5120, 64, 40, 8, 27648, 32768),
    ),
    ("Qwen/Qwen2.5-72B", _qwen2(8192, 80, 64, 8, 29568, 131072)),
    ("Qwen/Qwen2.5-72B-Instruct", _qwen2(8192, 80, 64, 8, 29568, 32768)),
    # Llama 3: hidden, layers, heads, intermediate
    ("meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct", _llama3(2048, 16, 32, 8192, tied=True)),
    ("meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct", _llama3(3072, 28, 24, 8192, tied=True)),
    ("meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct", _llama3(4096, 32, 32, 14336)),
    ("meta-llama/Llama-3.1-70B meta-llama/Llama-3.1-70B-Instruct", _llama3(8192, 80, 64, 28672)),
    (
        "meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct",
        _llama3(4096, 32, 32, 14336, positions=8192),
    ),
    # Mistral: hidden, layers, intermediate, vocabulary, positions
    (
        "mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.1 mistralai/Mistral-7B-Instruct-v0.2",
        _mistral(4096, 32, 14336, 32000, 32768),
    ),
    ("mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3", _mistral(4096, 32, 14336, 32768, 32768)),
    (
        "mistralai/Mistral-Nemo-Base-2407 mistralai/Mistral-Nemo-Instruct-2407 Mistral-Nemo-12B",
        _mistral(5120, 40, 14336, 131072, 128000),
    ),
    (
        "mistralai/Mistral-Small-24B-Base-2501 mistralai/Mistral-Small-24B-Instruct-2501 Mistral-Small-24B",
        _mistral(5120, 40, 32768, 131072, 32768),
    ),
    # Phi
    ("microsoft/phi-2", _keys("phi", 2560, 32, 32, 32, 10240, vocab=51200, positions=2048)),
    ("microsoft/Phi-3-mini-4k-instruct", _PHI3_4K),
    ("microsoft/Phi-3-mini-128k-instruct microsoft/Phi-3.5-mini-instruct", _PHI3_128K),
    ("microsoft/phi-4", _phi3(5120, 40, 10, 17920, 100352, 16384, layers=40)),
    ("microsoft/Phi-4-mini-instruct microsoft/Phi-4-mini-reasoning", _PHI4_MINI),
    # Gemma: hidden, layers, heads, key-value heads, intermediate
    ("google/gemma-2b google/gemma-2b-it", _gemma("gemma", 2048, 18, 8, 1, 16384)),
    ("google/gemma-7b google/gemma-7b-it", _gemma("gemma", 3072, 28, 16, 16, 24576)),
    ("google/gemma-2-2b google/gemma-2-2b-it", _gemma("gemma2", 2304, 26, 8, 4, 9216)),
    ("google/gemma-2-9b google/gemma-2-9b-it", _gemma("gemma2", 3584, 42, 16, 8, 14336)),
    ("google/gemma-2-27b google/gemma-2-27b-it", _gemma("gemma2", 4608, 46, 32, 16, 36864, head_dim=128)),
    (
        "google/gemma-3-1b-pt google/gemma-3-1b-it",
        _keys("gemma3_text", 1152, 26, 4, 1, 6912, vocab=262144, positions=32768, tied=True, head_dim=256),
    ),
    # SmolLM: hidden, layers, heads, key-value heads, intermediate, positions
    ("HuggingFaceTB/SmolLM-135M HuggingFaceTB/SmolLM-135M-Instruct", _smollm(576, 30, 9, 3, 1536, 2048)),
    ("HuggingFaceTB/SmolLM-360M HuggingFaceTB/SmolLM-360M-Instruct", _smollm(960, 32, 15, 5, 2560, 2048)),
    ("HuggingFaceTB/SmolLM-1.7B HuggingFaceTB/SmolLM-1.7B-Instruct", _smollm(2048, 24, 32, 32, 8192, 2048)),
    ("HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct", _smollm(576, 30, 9, 3, 1536, 8192)),
    ("HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-360M-Instruct", _smollm(960, 32, 15, 5, 2560, 8192)),
    ("HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-1.7B-Instruct", _smollm(2048, 24, 32, 32, 8192, 8192)),
    (
        "HuggingFaceTB/SmolLM3-3B HuggingFaceTB/SmolLM3-3B-Base",
        _keys("smollm3", 2048, 36, 16, 4, 11008, vocab=128256, positions=65536, tied=True),
    ),
    # Mixtures of experts. Qwen3: hidden, layers, heads, intermediate, intermediate of an expert, positions
    ("Qwen/Qwen3-30B-A3B", _qwen3_moe(2048, 48, 32, 6144, 768, 40960)),
    ("Qwen/Qwen3-30B-A3B-Base", _qwen3_moe(2048, 48, 32, 6144, 768, 32768)),
    (
        "Qwen/Qwen3-30B-A3B-Instruct-2507 Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-Coder-30B-A3B-Instruct",
        _qwen3_moe(2048, 48, 32, 6144, 768, 262144),
    ),
    ("Qwen/Qwen3-235B-A22B", _qwen3_moe(4096, 94, 64, 12288, 1536, 40960)),
    ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    (
        "mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x7B-Instruct-v0.1",
        _experts(_keys("mixtral", 4096, 32, 32, 8, 14336, vocab=32000, positions=32768), 8, 2),
    ),
    (
        "allenai/OLMoE-1B-7B-0924 allenai/OLMoE-1B-7B-0924-Instruct",
        _experts(_keys("olmoe", 2048, 16, 16, 16, 1024, vocab=50304, positions=4096), 64, 8),
    ),
)

BASES: Mapping[str, BaseKeys] = MappingProxyType({name: keys for names, keys in _TABLE for name in names.split()})


def get_last_component(name: str) -> str:
    """Return the last component of a hub name or path (also of a Windows path), such as `Qwen3-0.6B`."""
    parts = [part for part in re.split(r"[\\/]+", name.strip()) if part not in ("", ".", "..")]
    return parts[-1] if parts else ""


def lookup_base(name: str) -> BaseKeys | None:
    """Return the catalogue entry by full name, by last component, or by size ignoring the tuning suffix."""
    for spelling in (str.lower, _short_name, _size_name):
        wanted = spelling(name)
        found = [keys for known, keys in BASES.items() if spelling(known) == wanted]
        if found and all(keys == found[0] for keys in found):
            return found[0]
    return None


def _short_name(name: str) -> str:
    return get_last_component(name).lower()


def _size_name(name: str) -> str:
    return "-".join(word for word in _short_name(name).split("-") if word not in _TUNING_WORDS)


def suggest_bases(name: str, search: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return similar names, best first, from the catalogue and from folders under `search`."""
    local = (config.parent.name for folder in search for config in folder.glob("*/config.json"))
    full_names = {_short_name(known): known for known in (*BASES, *local)}
    return tuple(full_names[match] for match in difflib.get_close_matches(_short_name(name), full_names, 3, 0.7))


def find_config(name: str, search: Sequence[Path]) -> Path | None:
    """Return the config.json of a base model on this disk: a path, under `search`, or in the Hugging Face cache."""
    if not get_last_component(name):
        return None
    return next((path for path in _candidates(name, search) if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    """Return whether it is a file; False also for invalid paths, such as a name of a thousand letters."""
    try:
        return path.is_file()
    except OSError:
        return False


def _expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~user of an unknown user
        return Path(path)


def _candidates(name: str, search: Sequence[Path]) -> Iterator[Path]:
    given = _expand(name)
    if given.name == "config.json":
        yield given
    yield given / "config.json"
    parts = [part for part in re.split(r"[\\/]+", name) if part not in ("", ".", "..")]
    for folder in search:
        yield folder / parts[-1] / "config.json"
        yield folder.joinpath(*parts[-2:], "config.json")
    yield from _cached_configs(parts)


def get_hub_cache() -> Path:
    """Return the model cache of huggingface_hub, by its own rules."""
    environ = os.environ
    if explicit := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expand(explicit)
    if home := environ.get("HF_HOME"):
        return _expand(home) / "hub"
    return _expand(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _cached_configs(parts: Sequence[str]) -> Iterator[Path]:
    """Yield configs of `org/name`, or of the only cached model with this name: main's snapshot first, then by age."""
    suffix = "--".join(("models", *parts)) if len(parts) == 2 else f"--{parts[-1]}"
    try:
        repositories = [entry for entry in get_hub_cache().iterdir() if entry.name.lower().endswith(suffix.lower())]
        if len(repositories) == 1:
            yield from _snapshots(repositories[0])
    except OSError:
        return


def _snapshots(repository: Path) -> Iterator[Path]:
    main = repository / "refs" / "main"
    if _is_file(main):
        yield repository / "snapshots" / main.read_text().strip() / "config.json"
    folders = sorted((repository / "snapshots").iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    yield from (folder / "config.json" for folder in folders)


def load_config(path: Path) -> Mapping[str, object]:
    """Return the keys of a config.json; errors in broken files name line and column."""
    problem, hint = "", "save the model again, or name another folder"
    try:
        if path.stat().st_size > mib_to_bytes(_MAX_CONFIG_MIB):
            problem = f"is larger than {_MAX_CONFIG_MIB} MiB: not a model configuration"
        else:
            config = json.loads(path.read_bytes().decode("utf-8-sig"))
            if isinstance(config, dict):
                return config
            problem = f"holds a {type(config).__name__}, not an object with keys"
    except json.JSONDecodeError as error:
        problem = f"broken JSON at line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except (OSError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    raise InputError("a base model's configuration cannot be read", (Problem(where=str(path), what=problem),), hint)
