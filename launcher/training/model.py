"""The module that is trained: a packed micro-batch in, the summed loss of its trained positions out."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from launcher.choices import LossKernel
from launcher.errors import InputError
from launcher.plan.model import CompilePlan, Plan
from launcher.training.attention import Backend
from launcher.training.batches import PackedBatch
from launcher.training.joined import find_joinable, join_layers
from launcher.training.kernels import kernels_run_on
from launcher.training.layers import compiled, prepare_layers
from launcher.training.loading import DTYPES
from launcher.training.loss import Head, sum_loss
from launcher.training.products import Products, by_the_library, lay_out_products


class TrainedModel(nn.Module):
    def __init__(self, model: PreTrainedModel | PeftModel, backend: Backend, loss_kernel: LossKernel) -> None:
        super().__init__()
        self.model = model
        self._backend = backend
        self.loss_kernel = loss_kernel
        self.products = Products()

    @property
    def base(self) -> PreTrainedModel:
        base: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return base

    @property
    def layers(self) -> list[nn.Module]:
        decoder: Any = self.base.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise InputError(
                f"{type(self.base).__name__} cannot be trained here: its decoder has no `layers`, as older families",
                hint="Llama, Mistral, Qwen, Gemma, Phi and their relatives can",
            )
        return list(layers)

    def forward(
        self, batch: PackedBatch, *, shows_hidden: bool = False, is_reference: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Only the trained positions pass through the head. The two flags serve the proof (proof.py)."""
        if is_reference:
            with by_the_library():
                return self._forward_by_the_library(batch)
        self.products.refresh()
        hidden = self.hidden_states(batch)
        trained = hidden.index_select(0, batch.trained_positions)
        loss = sum_loss(self.loss_kernel, trained, batch.targets, self.head())
        return (loss, hidden) if shows_hidden else loss

    def _forward_by_the_library(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """transformers' and PEFT's own way, for one document: their attention, products, head, all logits."""
        seen: list[Tensor] = []
        head: Any = self.base.get_output_embeddings()
        # Asking for hidden states by argument leaves hooks behind that break torch.compile's graphs.
        hook = head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        try:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[0]
        finally:
            hook.remove()
        trained = logits.index_select(0, batch.trained_positions).float()
        return functional.cross_entropy(trained, batch.targets, reduction="sum"), seen[0][0]

    def head(self) -> Head:
        """As Gemma 2 and 3, Cohere and Granite name what they do to logits."""
        head: Any = self.base.get_output_embeddings()
        config: Any = self.base.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return Head(
            weight=head.weight,
            bias=getattr(head, "bias", None),
            scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[tokens, features], behind the last norm."""
        decoder: Any = self.base.get_decoder()
        hidden: Tensor = decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            documents=self._backend.describe(batch),
        ).last_hidden_state
        return hidden[0]

    def tie_weights(self) -> None:
        """accelerate calls this, by name, where sharding took embeddings and head apart that are one matrix."""
        self.base.tie_weights()

    def keep_head_at_hand(self) -> None:
        """ZeRO-3 gathers a module's parameters when it is called; the head's weight is used here without its call."""
        import deepspeed

        head: Any = self.base.get_output_embeddings()
        deepspeed.zero.register_external_parameter(self, head.weight)

    def prepare(self, plan: Plan) -> None:
        """Products, checkpointing and compiling, as planned; see layers.py for the order. On its device already."""
        if plan.strategy == "zero3":
            self._gather_by_layer()
        if plan.strategy in ("single", "ddp"):  # others cut weights to pieces, which a block of several cannot be
            dtype, device = DTYPES[plan.precision.compute_dtype], self.base.device
            is_faster = kernels_run_on(device) or (device.type == "cpu" and plan.compile is not None)
            joins = is_faster and plan.checkpointing != "selective"  # which keeps some products only
            filled = find_joinable(self.layers) if joins else []
            self.products = lay_out_products(self.layers, dtype, compiled=plan.compile is not None, filled=filled)
            if joins:
                join_layers(self.layers)
        prepare_layers(self.layers, plan.checkpointing, plan.compile)
        if plan.compile is not None and plan.compile.scope == "model":
            self.compile_decoder(plan.compile)

    def _gather_by_layer(self) -> None:
        """ZeRO-3 hooks into every module with parameters, in the midst of what is compiled; here into whole layers.

        It then takes a layer's gradients when that of its input is there: the first layer's input must have one too.
        """
        from deepspeed.utils import set_z3_leaf_module

        for layer in self.layers:
            set_z3_leaf_module(layer, True)
        self.base.enable_input_require_grads()

    def compile_decoder(self, plan: CompilePlan) -> None:
        decoder: Any = self.base.get_decoder()
        decoder.forward = compiled(decoder.forward, plan)
