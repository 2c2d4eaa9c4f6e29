"""Change of the adapter type by `--set`: the manifest's keys and learning rate for its own type no longer apply."""

from __future__ import annotations

import copy
from collections.abc import Collection

from launcher.manifest.parse_json import Json

_CONFIG = "training.config."
ADAPTER_KEY = f"{_CONFIG}adapter_type"
# Of Stanford Alpaca. The best learning rate of LoRA is about ten times that of full fine-tuning ("LoRA Without Regret",
# Thinking Machines Lab, 2025), and LoRA manifests usually have 2e-4.
FULL_LEARNING_RATE = 2e-5
LORA_LEARNING_RATE = 1e-4  # and more: usual for LoRA, too large for full fine-tuning
_LORA_KEYS = ("rank", "alpha", "use_rslora", "loraplus_lr_ratio", "init_lora_weights", "dropout", "modules_to_save")
_FULL_KEYS = ("bf16_stochastic_round", "optimizer_in_bwd")
_NOT_APPLICABLE: dict[Json, tuple[str, ...]] = {
    "full": (*_LORA_KEYS, "target_modules", "feedforward_modules"),
    "ia3": (*_LORA_KEYS, *_FULL_KEYS),
    "lora": ("feedforward_modules", *_FULL_KEYS),
    "dora": ("feedforward_modules", "init_lora_weights", *_FULL_KEYS),
}


def adapt_to_adapter(
    tree: dict[str, Json], file_tree: dict[str, Json], overridden_keys: Collection[str]
) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Return the manifest without keys that the new adapter type does not use, and notes; keys set by flags stay."""
    config, own = (get_config(copy.deepcopy(each)) for each in (tree, file_tree))
    kind = config.get("adapter_type")
    if not isinstance(kind, str) or own.get("adapter_type") == kind:
        return tree, ()
    notes = []
    dropped = [
        key
        for key in _NOT_APPLICABLE.get(kind, ())
        if config.get(key) not in (None, False, [], 0) and f"{_CONFIG}{key}" not in overridden_keys
    ]
    if dropped:
        notes.append(f"adapter_type {kind}: {', '.join(dropped)} of the manifest do not apply and are ignored")
        config = {key: value for key, value in config.items() if key not in dropped}
    if kind == "full" and f"{_CONFIG}learning_rate" not in overridden_keys and "learning_rate" in config:
        notes.append(
            f"learning_rate {FULL_LEARNING_RATE:g} instead of the manifest's {config['learning_rate']}: full "
            f"fine-tuning needs about a tenth of a LoRA learning rate; --set {_CONFIG}learning_rate=... sets another"
        )
        config["learning_rate"] = FULL_LEARNING_RATE
    training = tree["training"]
    assert isinstance(training, dict)
    return {**tree, "training": {**training, "config": config}}, tuple(notes)


def note_scale(tree: dict[str, Json], file_tree: dict[str, Json], overridden_keys: Collection[str]) -> tuple[str, ...]:
    """Return a note if a rank set by a flag changes LoRA's scale, alpha / rank, because alpha stays."""
    (rank, alpha, root), (own_rank, own_alpha, _) = (
        [get_config(each).get(key) for key in ("rank", "alpha", "use_rslora")] for each in (tree, file_tree)
    )
    numbers = [each for each in (rank, alpha, own_rank, own_alpha) if type(each) is int and each > 0]
    if len(numbers) < 4 or f"{_CONFIG}rank" not in overridden_keys or f"{_CONFIG}alpha" in overridden_keys:
        return ()
    rank, alpha, own_rank, own_alpha = numbers
    if rank == own_rank:
        return ()
    name, power = ("alpha / sqrt(rank)", 0.5) if root is True else ("alpha / rank", 1.0)
    kept = round(own_alpha * (rank / own_rank) ** power)
    return (
        f"rank {rank} with the manifest's alpha {alpha}: the scale {name} is {alpha / rank**power:g} instead of "
        f"{own_alpha / own_rank**power:g}; --set {_CONFIG}alpha={max(1, kept)} keeps it",
    )


def get_config(tree: dict[str, Json]) -> dict[str, Json]:
    """Return training.config of a manifest's tree; empty if it is missing or not an object."""
    training = tree.get("training")
    config = training.get("config") if isinstance(training, dict) else None
    return config if isinstance(config, dict) else {}
