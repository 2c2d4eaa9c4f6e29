"""Decode steps of transformers' `generate` as a CUDA graph, because small models mostly wait for kernel launches.

`generate` compiles its decode steps if the model has a static KV cache on a GPU. Here it gets a function that captures
the forward pass of the first decode step once and replays it for the others, which needs no compilation. Models that
use SDPA get our own attention kernel for these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.core.errors import first_line
from launcher.core.log import get_logger
from launcher.training.kernels.availability import supports_triton

log = get_logger(__name__)

_ATTENTION_NAME = "launcher_decode"
_SCORE_OPTIONS = "position_bias", "softcap", "s_aux"  # of transformers' attention functions; our kernel has none

Forward = Callable[..., Any]
# (function) -> (function that computes it again from the same tensors, its result)
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


def make_static_cache(model: Any, max_length: int, config: GenerationConfig) -> Cache | None:
    """Return a KV cache of fixed size, or None if CUDA graphs of decode steps are not possible for this model.

    Layers with a sliding window keep all tokens: a replayed graph cannot shift them, and the mask excludes old ones.
    """
    if not model._supports_default_dynamic_cache():
        return None
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=max_length)
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "is_sliding", False):
            cache.layers[index] = StaticLayer(max_cache_len=max_length)
    return cache if model._valid_auto_compile_criteria({"past_key_values": cache}, config) else None


@contextmanager
def graphed_decoding(model: Any) -> Iterator[GraphedForward]:
    """Within this context, transformers' `generate` replays a CUDA graph instead of compiling the forward pass."""
    forward = GraphedForward(model, _capture_graph)
    model.get_compiled_call = lambda _config: forward
    try:
        with _decode_attention(model) if supports_triton(model.device) else nullcontext():
            yield forward
    finally:
        del model.get_compiled_call


@contextmanager
def _decode_attention(model: Any) -> Iterator[None]:
    """Compute the attention of decode steps by our kernel instead of SDPA."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa":
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, sdpa_mask)
    config._attn_implementation = _ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    is_decoding = query.shape[2] == 1 and key.shape[-1] == value.shape[-1]
    has_options = any(options.get(name) is not None for name in _SCORE_OPTIONS)
    if not is_decoding or has_options or attention_mask is None or attention_mask.dtype != torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    from launcher.training.kernels.decode_attention_triton import decode_attention  # Triton may be missing

    return decode_attention(query, key, value, attention_mask[:, 0, 0], scaling), None


class GraphedForward:
    """A forward pass that is captured at its second call and then replayed, with inputs copied to fixed addresses."""

    def __init__(self, model: Any, capture: Capture) -> None:
        self._model, self._capture = model, capture
        self._buffers: dict[str, Any] = {}
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None
        self.has_failed = False

    def __call__(self, **inputs: Any) -> Any:
        """Return the outputs of the forward pass; the next call overwrites them."""
        if self.has_failed:
            return self._model(**inputs)
        if not self._buffers:  # compiles kernels and allocates workspaces, which must not happen during capture
            self._buffers = {name: _map_tensors(torch.clone, value) for name, value in inputs.items()}
            return self._model(**self._buffers)
        for name, value in inputs.items():
            _copy_tensors(value, self._buffers[name])
        if self._replay is None:
            try:
                self._replay, self._outputs = self._capture(lambda: self._model(**self._buffers))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel that cannot be captured may raise anything
                self.has_failed = True
                log.info(f"note: cannot capture a CUDA graph, generating without it: {first_line(error)}")
                return self._model(**inputs)
        self._replay()
        return self._outputs


def _capture_graph(compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    graph, outer = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = compute()
    finally:  # a failed capture may leave its stream current
        torch.cuda.set_stream(outer)
    return graph.replay, outputs


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to a tensor, or to the values of a dict: models with sliding windows have several masks."""
    if isinstance(value, dict):
        return {name: _map_tensors(function, part) for name, part in value.items()}
    return function(value) if isinstance(value, Tensor) else value


def _copy_tensors(source: Any, target: Any) -> None:
    if isinstance(source, dict):
        for name, part in source.items():
            _copy_tensors(part, target[name])
    elif isinstance(source, Tensor):
        target.copy_(source)
