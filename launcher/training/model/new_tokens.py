"""New tokens: rows of the embeddings and of the LM head that are trained while all others stay frozen.

PEFT's `trainable_token_indices` holds the rows and saves them. Its forward pass copies the complete matrix to replace a
few rows, and its backward pass computes the gradient of the complete matrix. Here, new rows are looked up and
multiplied separately, with the same results.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.plan.model import Plan
from launcher.training.model.fused_lora.weights import ADAPTER_NAME

_ROW_MULTIPLE = 64  # aligns the head's matmuls for tensor cores


def get_new_token_ids(plan: Plan, folders: tuple[Path, ...]) -> list[int]:
    """Return the ids of the new tokens; empty if there are none."""
    return load_planned_tokenizer(plan, folders).new_token_ids if plan.data.new_tokens else []


def add_new_rows(model: PreTrainedModel, ids: list[int]) -> None:
    """Set the embeddings of new tokens to the mean of all known ones; add rows if the base does not have enough.

    Unlike transformers' `mean_resizing`, nothing is drawn: the rows do not depend on a seed.
    """
    embeddings: Any = model.get_input_embeddings()
    num_rows, num_known = len(embeddings.weight), min(ids)
    if max(ids) >= num_rows:
        model.resize_token_embeddings(max(ids) + 1, pad_to_multiple_of=_ROW_MULTIPLE, mean_resizing=False)
    parts: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tensors = [part.weight for part in parts] + [part.bias for part in parts if getattr(part, "bias", None) is not None]
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            mean = tensor[: min(num_known, num_rows)].float().mean(0).to(tensor)
            tensor[num_rows:] = mean
            tensor[ids] = mean


def separate_new_rows(model: nn.Module) -> None:
    """Make PEFT's embedding layers look new tokens up separately, without PEFT's copy of the complete matrix."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, TrainableTokensLayer)]
    for layer in layers:
        ids = torch.tensor(layer.token_indices[ADAPTER_NAME], device=layer.base_layer.weight.device)
        layer.register_buffer("new_ids", ids, persistent=False)
        if isinstance(layer.base_layer, nn.Embedding):
            row_of_token = torch.full((len(layer.base_layer.weight),), -1, device=ids.device)
            row_of_token[ids] = torch.arange(len(ids), device=ids.device)
            layer.register_buffer("row_of_token", row_of_token, persistent=False)
            layer.forward_adapters = partial(_embed, layer)


def _embed(layer: Any, tokens: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any) -> Tensor:
    if layer.disable_adapters or layer.merged or not active_adapters:
        hidden: Tensor = TrainableTokensLayer.forward_adapters(layer, tokens, active_adapters, *args, **kwargs)
        return hidden
    frozen: Tensor = layer.base_layer(tokens)
    row = layer.row_of_token[tokens]
    new = functional.embedding(row.clamp(min=0), layer.trainable_tokens_delta[ADAPTER_NAME])
    new = new.to(frozen.dtype)
    scale = layer._get_embed_scale()  # Gemma's, which the frozen embeddings apply themselves
    return torch.where((row >= 0)[..., None], new if scale is None else new * scale.to(new.dtype), frozen)


def split_head(head: Any) -> tuple[Any, Tensor | None, Tensor | None]:
    """Return (frozen LM head, ids of new tokens, their trained rows); ids and rows are None if no rows are trained."""
    if not isinstance(head, TrainableTokensWrapper):
        return head, None, None
    layer: Any = head.token_adapter
    return layer.base_layer, layer.new_ids, layer.trainable_tokens_delta[ADAPTER_NAME]
