"""The trained module: takes a packed micro-batch, returns the summed loss of its trained positions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from launcher.core.choices import LossKernel
from launcher.core.errors import InputError
from launcher.plan.model import CompilePlan, Plan
from launcher.training.data.collate import PackedBatch
from launcher.training.kernels.availability import supports_triton
from launcher.training.model.attention import Backend
from launcher.training.model.base_model import DTYPES
from launcher.training.model.compile_checkpoint import compile_forward, prepare_layers
from launcher.training.model.fp8_blocks import use_fp8_blocks
from launcher.training.model.fp8_linear import Fp8Group, use_fp8_linears
from launcher.training.model.fused_lora.decoder_layer import fuse_decoder_layers, list_fusable_blocks
from launcher.training.model.fused_lora.fp8_base import round_remaining
from launcher.training.model.fused_lora.linear import FusedLoraModel, fuse_lora_layers
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.loss import LMHead, compute_summed_loss
from launcher.training.model.new_tokens import split_head
from launcher.training.model.peft_adapters import cast_embeddings


class PackedCausalLM(nn.Module):
    """A causal language model, with or without adapter, over packed documents."""

    def __init__(self, model: PreTrainedModel | PeftModel, backend: Backend, loss_kernel: LossKernel) -> None:
        super().__init__()
        self.model = model
        self.backend = backend
        self.loss_kernel = loss_kernel
        self.fused_lora = FusedLoraModel()
        self.fp8_groups: list[Fp8Group] = []

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, without PEFT's wrapper."""
        base: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return base

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        decoder: Any = self.base.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise InputError(
                f"{type(self.base).__name__} is not supported: its decoder has no `layers`",
                hint="supported families: Llama, Mistral, Qwen, Gemma, Phi and similar ones",
            )
        return list(layers)

    def forward(
        self, batch: PackedBatch, *, return_hidden: bool = False, is_reference: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss; only trained positions pass through the head. The flags are for verify/packing.py."""
        if is_reference:
            with use_reference_forward():
                return self._forward_reference(batch)
        self.fused_lora.refresh()
        hidden = self.hidden_states(batch)
        trained = hidden.index_select(0, batch.trained_positions)
        loss = compute_summed_loss(self.loss_kernel, trained, batch.targets, self.head())
        return (loss, hidden) if return_hidden else loss

    def _forward_reference(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return loss and hidden states of one document, computed by transformers and PEFT alone, with all logits."""
        head_inputs: list[Tensor] = []
        head: Any = self.base.get_output_embeddings()
        # output_hidden_states=True would leave hooks that break torch.compile's graphs.
        hook = head.register_forward_pre_hook(lambda _module, inputs: head_inputs.append(inputs[0]))
        try:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[0]
        finally:
            hook.remove()
        trained = logits.index_select(0, batch.trained_positions).float()
        return functional.cross_entropy(trained, batch.targets, reduction="sum"), head_inputs[0][0]

    def head(self) -> LMHead:
        """Return the LM head, with the logit scale and softcap that Gemma, Cohere and Granite configure."""
        head, new_ids, new_rows = split_head(self.base.get_output_embeddings())
        config: Any = self.base.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return LMHead(
            weight=head.weight,
            bias=getattr(head, "bias", None),
            new_ids=new_ids,
            new_rows=new_rows,
            scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states [tokens, hidden_size] after the final norm."""
        decoder: Any = self.base.get_decoder()
        hidden: Tensor = decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            documents=self.backend.build_metadata(batch),
        ).last_hidden_state
        return hidden[0]

    def clear_cached_outputs(self) -> None:
        """Drop cached outputs of an interrupted forward pass, which would keep its activations alive."""
        for weights in self.fused_lora.weights:
            weights.clear_cache()
        for group in self.fp8_groups:
            group.clear_cache()

    def tie_weights(self) -> None:
        """Tie embeddings and head again. accelerate calls this by name after sharding separated them."""
        self.base.tie_weights()

    def register_head_weight(self) -> None:
        """Register the head's weight with ZeRO-3, which otherwise gathers it only when the head module is called."""
        import deepspeed

        head: Any = self.base.get_output_embeddings()
        deepspeed.zero.register_external_parameter(self, head.weight)

    def prepare(self, plan: Plan) -> None:
        """Fuse LoRA layers, then apply checkpointing and torch.compile as planned. The module must be on its device."""
        self._check_signature()
        if plan.strategy == "zero3":
            self._gather_by_layer()
        if plan.strategy in ("single", "ddp"):  # the others shard weights, which fused blocks do not support
            dtype, device = DTYPES[plan.precision.compute_dtype], self.base.device
            is_faster = supports_triton(device) or (device.type == "cpu" and plan.compile is not None)
            fuses_blocks = is_faster and plan.checkpointing != "selective"  # which saves the outputs of single matmuls
            include_plain = list_fusable_blocks(self.layers) if fuses_blocks else []
            self.fused_lora = fuse_lora_layers(
                self.layers,
                dtype,
                compiled=plan.compile is not None,
                include_plain=include_plain,
                in_fp8=plan.precision.fp8_base,
            )
            if fuses_blocks:
                fuse_decoder_layers(self.layers)
            if plan.precision.fp8_base:
                round_remaining(self.layers)
        if plan.precision.fp8_layers:
            self._use_fp8_layers(plan)
        prepare_layers(self.layers, plan.checkpointing, plan.compile)
        if plan.compile is not None and plan.compile.scope == "model":
            self.compile_decoder(plan.compile)

    def _use_fp8_layers(self, plan: Plan) -> None:
        """Run trained linear layers in FP8. The residual stream is in the compute dtype, not in FP32."""
        dtype = DTYPES[plan.precision.compute_dtype]
        self.fp8_groups = use_fp8_linears(self.layers, dtype, compiled=plan.compile is not None)
        use_fp8_blocks(self.layers)
        cast_embeddings(self.base, dtype)

    def _check_signature(self) -> None:
        """Raise InputError if the decoder's forward takes no **kwargs, which carry document boundaries to attention."""
        decoder: Any = self.base.get_decoder()
        parameters = inspect.signature(decoder.forward).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            raise InputError(
                f"{type(decoder).__name__} is not supported: its forward method takes no further keyword arguments, "
                "so its attention cannot keep packed documents apart",
                hint="supported families: Llama, Mistral, Qwen, Gemma, Phi and similar ones",
            )

    def _gather_by_layer(self) -> None:
        """Attach ZeRO-3's hooks to decoder layers instead of to every module inside a compiled region.

        ZeRO-3 reduces a layer's gradients when the gradient of the layer's input arrives. The input of the first layer
        must therefore require a gradient.
        """
        from deepspeed.runtime.zero import linear as deepspeed_linear
        from deepspeed.runtime.zero.utils import is_zero_param
        from deepspeed.utils import set_z3_leaf_module

        # In a compiled layer, whose weights are gathered, torch 2.11 would guard on the id of each: a graph per layer.
        deepspeed_linear.is_zero_param = lambda weight: not torch.compiler.is_compiling() and is_zero_param(weight)
        for layer in self.layers:
            set_z3_leaf_module(layer, True)
        self.base.enable_input_require_grads()

    def compile_decoder(self, plan: CompilePlan) -> None:
        """Compile the complete decoder."""
        decoder: Any = self.base.get_decoder()
        decoder.forward = compile_forward(decoder.forward, plan)
