"""The layer classes that FSDP2 wraps are transformers' own, and one exists per layer of the model."""

from __future__ import annotations

import pytest

from launcher.render.spec import LAYER_CLASSES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("model_type", sorted(LAYER_CLASSES))
def test_the_named_class_is_the_models_layer(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=3)
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    wrapped = [module for module in model.modules() if type(module).__name__ == LAYER_CLASSES[model_type]]
    assert len(wrapped) == 3
    assert LAYER_CLASSES[model_type] in model._no_split_modules
