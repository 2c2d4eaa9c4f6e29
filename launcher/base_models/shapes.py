"""Shape of a base model from its `config.json` or the catalogue: parameters, bytes and FLOPs without loading it.

Nothing is downloaded, and torch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from launcher.base_models.catalogue import (
    find_config,
    get_hub_cache,
    get_last_component,
    load_config,
    lookup_base,
    suggest_bases,
)
from launcher.base_models.families import (
    FAMILIES,
    LLAMA,
    Experts,
    Family,
    Linear,
    Sizes,
    count_norms,
    make_linears,
)
from launcher.base_models.supported import ConfigKeys, check_supported, make_not_supported_error
from launcher.base_models.weight_index import (
    WeightIndex,
    list_indexed_names,
    load_weight_index,
)
from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import Frozen

Basis = Literal["catalogue", "config", "approximate"]

_MAX_SIZE = 2**31  # of one dimension; larger values mean a broken file


class ModelShape(Frozen):
    """Sizes of a decoder-only language model with identical layers."""

    name: str  # as requested, such as Qwen/Qwen3-0.6B
    model_type: str  # of transformers: qwen3, llama, ...
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a mixture of experts: the sum over the experts that a token uses
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    linears: tuple[Linear, ...]  # of one layer
    indexed_names: tuple[str, ...] = ()  # of matrices whose weights are not here, where `linears` has others
    indexed_embeddings: tuple[str, str] | None = None  # names of embeddings and LM head, for an unknown family
    experts: Experts | None = None  # of one layer; None: a dense model
    norm_parameters_per_layer: int  # everything in a layer that is not a Linear, nor an expert
    other_parameters: int  # outside layers and embeddings: the final norm, a bias of the head, a vision tower
    frozen_parameters: int = 0  # among other_parameters: a vision tower, which is loaded but never trained
    attention_dropout: float = 0.0  # of the base's config; training does not apply it
    gated_mlp: bool
    basis: Basis  # approximate: an architecture we do not know, read as llama's

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Return the number of parameters of the LM head; 0 if it is tied to the embeddings."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        experts = 0 if self.experts is None else self.experts.num_parameters
        return sum(linear.num_parameters for linear in self.linears) + self.norm_parameters_per_layer + experts

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that are active for a token: all of them in a dense model."""
        if self.experts is None:
            return self.num_parameters
        return self.num_parameters - self.num_layers * (self.experts.num_parameters - self.experts.active_weights)

    @property
    def num_parameters(self) -> int:
        return (
            self.embedding_parameters
            + self.head_parameters
            + self.num_layers * self.layer_parameters
            + self.other_parameters
        )

    @property
    def has_qk_norm(self) -> bool:
        """Return whether queries and keys have norms: hidden_size then does not divide the count of norm parameters."""
        family = FAMILIES.get(self.model_type)
        sinks = self.num_heads if family is not None and family.has_sinks else 0
        return (self.norm_parameters_per_layer - sinks) % self.hidden_size != 0

    @property
    def embedding_names(self) -> tuple[str, str]:
        """Return the module names of the embeddings and of the LM head."""
        return self.indexed_embeddings or FAMILIES.get(self.model_type, LLAMA).embeddings

    @property
    def has_head_bias(self) -> bool:
        """Return whether the LM head has a bias."""
        return FAMILIES.get(self.model_type, LLAMA).has_head_bias

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Return the module names that an adapter can target."""
        return tuple(linear.name for linear in self.linears)


# Defaults of SiglipVisionConfig.
_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}


def make_shape(
    config: ConfigKeys, name: str, basis: Literal["catalogue", "config"], weights: WeightIndex | None = None
) -> ModelShape:
    """Return the shape of the model that transformers would build from a config.json and its weights."""
    check_supported(config, name)
    tower, config = _count_vision_tower(config), _get_text_config(config)
    model_type = str(config["model_type"])
    family = FAMILIES.get(model_type, LLAMA)
    keys = {**family.defaults, **config}
    sizes, flags, experts = _read_keys(keys, family, name)
    shape = ModelShape(
        name=name,
        model_type=model_type,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate if experts is None else experts.num_active * experts.intermediate_size,
        vocab_size=sizes.vocab,
        max_positions=sizes.max_positions,
        tied_embeddings=flags["tie_word_embeddings"],
        linears=make_linears(sizes, family, flags),
        experts=experts,
        norm_parameters_per_layer=count_norms(sizes, family, flags),
        other_parameters=_count_others(sizes, family) + tower,
        frozen_parameters=tower,
        attention_dropout=_read_dropout(keys),
        gated_mlp=family.is_gated,
        basis=basis if model_type in FAMILIES else "approximate",
    )
    return shape if weights is None or experts is not None else _apply_weights(shape, weights)


def _apply_weights(shape: ModelShape, weights: WeightIndex) -> ModelShape:
    """Return the shape with linear layers and parameter counts of the weights where config.json implies others."""
    if not weights.linears:
        raise make_not_supported_error(
            shape.name, (Problem(where="weights", what="no decoder layers (`layers.0`) that can be trained"),)
        )
    if weights.has_experts:
        what = "an unknown mixture of experts: config.json gives the number of experts under no known key"
        raise make_not_supported_error(shape.name, (Problem(where="weights", what=what),))
    shape = _apply_embeddings(shape, weights.embeddings)
    same = sorted(weights.linears, key=repr) == sorted(shape.linears, key=repr)
    if weights.num_layers != shape.num_layers or (same and shape.basis != "approximate"):
        return shape
    linear_parameters = sum(linear.num_parameters for linear in weights.linears)
    norms = max(0, weights.layer_parameters // shape.num_layers - linear_parameters)
    rest = weights.layer_parameters - shape.num_layers * (linear_parameters + norms)  # if layers differ
    return shape.model_copy(
        update={
            "linears": weights.linears,
            "norm_parameters_per_layer": norms,
            "other_parameters": max(0, weights.other_parameters + rest),
            "frozen_parameters": weights.frozen_parameters,
            "basis": "config" if weights.is_uniform else "approximate",
        }
    )


def _apply_embeddings(shape: ModelShape, names: tuple[str, str]) -> ModelShape:
    """Return the shape with the weights' names of embeddings and LM head if its model type is not in FAMILIES."""
    return shape if shape.model_type in FAMILIES else shape.model_copy(update={"indexed_embeddings": names})


def _apply_names(shape: ModelShape, names: tuple[str, ...], embeddings: tuple[str, str]) -> ModelShape:
    """Return the shape with the layer and embedding names of a weight index, if they differ from the expected ones."""
    shape = _apply_embeddings(shape, embeddings)
    if not names or shape.experts is not None or set(names) == set(shape.linear_names):
        return shape
    return shape.model_copy(update={"indexed_names": names, "basis": "approximate"})


_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


def _read_dropout(keys: ConfigKeys) -> float:
    rate = next((keys[name] for name in _ATTENTION_DROPOUT if name in keys), None)
    return float(rate) if isinstance(rate, (int, float)) and 0 < rate < 1 else 0.0


def _count_others(sizes: Sizes, family: Family) -> int:
    final_norm = sizes.hidden * (2 if family.has_norm_bias else 1) if family.norms_per_layer else 0
    return final_norm + (sizes.vocab if family.has_head_bias else 0)


def _get_text_config(config: ConfigKeys) -> ConfigKeys:
    """Return the language model's config, which Gemma 3 nests from 4B up."""
    text = config.get("text_config")
    if config.get("model_type") == "gemma3" and isinstance(text, Mapping):
        return {"model_type": "gemma3_text", **text}
    return config


def _count_vision_tower(config: ConfigKeys) -> int:
    """Count the parameters of Gemma 3's vision tower (SigLIP) and of its projection into the language model."""
    vision, text = config.get("vision_config"), config.get("text_config")
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        return 0
    keys = {**_SIGLIP_DEFAULTS, **{key: size for key, size in vision.items() if isinstance(size, int) and size > 0}}
    hidden, inner, patch = keys["hidden_size"], keys["intermediate_size"], keys["patch_size"]
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    patches = (keys["image_size"] // patch) ** 2
    embeddings = hidden * (keys["num_channels"] * patch**2 + 1) + patches * hidden
    text_hidden = text.get("hidden_size")
    projection = hidden * (1 + (text_hidden if isinstance(text_hidden, int) else 0))
    return keys["num_hidden_layers"] * layer + embeddings + 2 * hidden + projection


def _read_keys(keys: ConfigKeys, family: Family, name: str) -> tuple[Sizes, Mapping[str, bool], Experts | None]:
    """Return the sizes, flags and experts of a config.json; raise one InputError that lists every wrong key."""
    problems: list[Problem] = []
    sizes = _read_sizes(keys, problems, has_mlp=family.experts is None)
    experts = _read_experts(keys, family, sizes.hidden, problems)
    flags = {key: _read_flag(keys, key, problems) for key in ("tie_word_embeddings", *family.flags)}
    if problems:
        raise InputError(
            f"base model {name}: its config.json cannot be used",
            tuple(problems),
            "the folder must hold the config.json of a decoder-only model as transformers saves it",
        )
    return sizes, flags, experts


def _read_experts(keys: ConfigKeys, family: Family, hidden: int, problems: list[Problem]) -> Experts | None:
    names = family.experts
    if names is None:
        return None
    count_key = "num_local_experts" if "num_local_experts" in keys else "num_experts"  # aliases
    count = _read_size(keys, count_key, problems)
    active, width = (_read_size(keys, key, problems) for key in ("num_experts_per_tok", names.width))
    if active > count and count_key in keys:
        problems.append(Problem(where="num_experts_per_tok", what=f"{active} exceeds {count_key} {count}"))
    return Experts(
        num_experts=count,
        num_active=active,
        hidden_size=hidden,
        intermediate_size=width,
        has_bias=names.has_bias,
        path=names.path,
    )


def _read_sizes(keys: ConfigKeys, problems: list[Problem], *, has_mlp: bool) -> Sizes:
    hidden = _read_size(keys, "hidden_size", problems)
    heads = _read_size(keys, "num_attention_heads", problems)
    kv_heads = _read_size(keys, "num_key_value_heads", problems, default=heads)
    wrong = {problem.where for problem in problems}
    if heads % kv_heads and wrong.isdisjoint(("num_attention_heads", "num_key_value_heads")):
        problems.append(
            Problem(where="num_key_value_heads", what=f"{kv_heads} does not divide num_attention_heads {heads}")
        )
    if keys.get("head_dim") is None and hidden % heads and wrong.isdisjoint(("num_attention_heads", "hidden_size")):
        problems.append(Problem(where="num_attention_heads", what=f"{heads} does not divide hidden_size {hidden}"))
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_read_size(keys, "head_dim", problems, default=hidden // heads),
        intermediate=_read_size(keys, "intermediate_size", problems, default=None if has_mlp else 1),
        layers=_read_size(keys, "num_hidden_layers", problems),
        vocab=_read_size(keys, "vocab_size", problems),
        max_positions=_read_size(keys, "max_position_embeddings", problems),
    )


def _read_size(keys: ConfigKeys, key: str, problems: list[Problem], default: int | None = None) -> int:
    """Return a positive integer. A wrong value is added to `problems` and read as 1, so that all are reported."""
    value = keys.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        problems.append(Problem(where=key, what="is missing"))
    elif isinstance(value, bool) or not isinstance(value, int):
        problems.append(Problem(where=key, what=f"must be a whole number, not {json.dumps(value, default=repr)[:60]}"))
    elif not 1 <= value <= _MAX_SIZE:
        problems.append(Problem(where=key, what=f"must be between 1 and {_MAX_SIZE}, not {str(value)[:60]}"))
    else:
        return value
    return 1


def _read_flag(keys: ConfigKeys, key: str, problems: list[Problem]) -> bool:
    value = keys.get(key, False)
    if not isinstance(value, bool):
        problems.append(Problem(where=key, what=f"must be true or false, not {json.dumps(value, default=repr)[:60]}"))
    return value is True


def load_shape(name: str, search: Sequence[Path]) -> ModelShape:
    """Return the shape of a base model: from a folder, `search`, the Hugging Face cache or the catalogue."""
    if path := find_config(name, search):
        weights = load_weight_index(path.parent)
        shape = make_shape(load_config(path), name, "config", weights)
        return shape if weights is not None else _apply_names(shape, *list_indexed_names(path.parent))
    if keys := lookup_base(name):
        return make_shape(keys, name, "catalogue")
    raise _not_found(name, search)


def describe_unusable_base(name: str, search: Sequence[Path]) -> str:
    """Return why a run with this base model would fail, as a note; empty if it would not."""
    try:
        load_shape(name, search)
    except InputError as error:
        places = "".join(f"; {problem.where}: {problem.what}" for problem in error.problems)
        return f"{error.title}{places}. The smoke profile works without it, a full training does not; {error.hint}"
    return ""


def _not_found(name: str, search: Sequence[Path]) -> InputError:
    try:
        is_folder = Path(name).is_dir()
    except OSError:
        is_folder = False
    folders = ", ".join(str(folder / get_last_component(name)) for folder in search)
    looked = [
        Problem(where="folder", what=f"{name} has no config.json" if is_folder else f"no folder {name} here"),
        *([Problem(where="folders", what=f"{folders}: no config.json")] if folders else []),
        Problem(where="Hugging Face cache", what=f"{get_hub_cache()}: no such model"),
        Problem(where="catalogue", what="no base model of this name"),
    ]
    close = suggest_bases(name, search)
    suggestion = f"did you mean {' or '.join(close)}? Otherwise " if close else ""
    way_out = "name a local folder that contains the model's config.json (planning downloads nothing)"
    return InputError(f"the base model {name!r} was not found", tuple(looked), suggestion + way_out)
