"""What a local base model lacks for a training: a tokenizer, or weight files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.base_models.catalogue import find_config
from launcher.base_models.weight_index import list_missing_files


def describe_missing_tokenizer(name: str, search: Sequence[Path]) -> str:
    """Return a note if a base model is a local folder without tokenizer.json; empty otherwise."""
    config = find_config(name, search)
    if config is None or "snapshots" in config.parts or (config.parent / "tokenizer.json").is_file():
        return ""
    folder = config.parent
    slow = next((file for file in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / file).is_file()), "")
    way_out = "copy it from the model that the weights come from"
    if slow:
        path = repr(str(folder))
        way_out = f"AutoTokenizer.from_pretrained({path}).save_pretrained({path}) creates it from {slow}"
    what = f"the base model {name!r} has no tokenizer: {folder} has no tokenizer.json"
    return f"{what}, so no row can be tokenized; {way_out}"


def describe_old_weights(name: str, search: Sequence[Path]) -> str:
    """Return a note if a local base model has pytorch_model*.bin files and no safetensors; empty otherwise."""
    config = find_config(name, search)
    if config is None or "snapshots" in config.parts or any(config.parent.glob("*.safetensors")):
        return ""
    folder = str(config.parent)
    old = next((file.name for file in sorted(config.parent.glob("pytorch_model*.bin"))), "")
    way_out = f"AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained({folder!r}) converts them"
    return f"the weights of {name!r} are in {old}, and training loads *.safetensors; {way_out}" if old else ""


def describe_missing_weights(name: str, search: Sequence[Path]) -> str:
    """Return a note if a local base model lacks some of its weight files; empty if it has all, or none at all."""
    config = find_config(name, search)
    missing = () if config is None or "snapshots" in config.parts else list_missing_files(config.parent)
    if config is None or not missing:
        return ""
    files = missing[0] if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
    return f"the base model {name!r} is incomplete: {config.parent} lacks {files} of its index; download it again"


def describe_download_error(name: str, error: BaseException) -> tuple[str, str]:
    """Return why a base model cannot be downloaded from the Hub, and what to do, by the classes of the hub's client."""
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        kinds |= {kind.__name__ for kind in type(cause).__mro__}
        cause = cause.__cause__ or cause.__context__
    account = "`hf auth login`, or set HF_TOKEN to a token of an account that has access"
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE forbids downloads", "unset HF_HUB_OFFLINE"
    if "GatedRepoError" in kinds:
        return (
            "it is gated: its conditions must be accepted",
            f"accept them on the page of {name}, then {account}",
        )
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return "the Hub has no such public model", f"check the spelling of {name}; for a private model, {account}"
    if "RevisionNotFoundError" in kinds:
        return "the Hub has no such revision of it", "check base_models[0].revision"
    return "the Hub cannot be reached", "check the network, and HTTPS_PROXY if you use a proxy"


def note_missing_files(name: str, search: Sequence[Path]) -> Iterator[str]:
    """Yield notes on what a local base model lacks for training: tokenizer, safetensors, weight files."""
    for describe in (describe_missing_tokenizer, describe_old_weights, describe_missing_weights):
        if note := describe(name, search):
            yield note
