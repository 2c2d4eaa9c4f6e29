"""Settings of a manifest or of --set: each is shown by the plan, or refused if it has no effect."""

from __future__ import annotations

import pytest

from launcher.core.errors import InputError
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import decision, plan_for


@pytest.mark.parametrize(
    ("overrides", "reason", "fix"),
    [
        (["save_steps=9"], "save_strategy is epoch", ["save_strategy=steps", "evaluation_strategy=steps"]),
        (["eval_steps=9"], "evaluation_strategy is epoch", ["save_strategy=steps", "evaluation_strategy=steps"]),
        (["warmup_steps=9"], "warmup_ratio 0.03 takes precedence", ["warmup_ratio=null"]),
        (
            ["lr_scheduler=constant", "warmup_ratio=0.1"],
            "lr_scheduler constant has no warm-up",
            ["lr_scheduler=constant_with_warmup"],
        ),
        (["early_stopping_threshold=0.1"], "early_stopping_patience is absent", ["early_stopping_patience=3"]),
        (["optim=sgd", "adam_beta1=0.8"], "optim sgd is not AdamW", ["optim=adamw_torch"]),
        (["precision=bf16", "bf16=false"], "precision bf16 takes precedence", ["precision=null"]),
    ],
)
def test_overrides_without_effect_are_refused(overrides: list[str], reason: str, fix: list[str]) -> None:
    words = [f"training.config.{each}" for each in overrides]
    with pytest.raises(InputError) as caught:
        plan_for(overrides=tuple(words))
    assert caught.value.title.startswith(f"--set {words[-1].partition('=')[0]} has no effect: {reason}")
    changes = [f"training.config.{each}" for each in fix]
    assert all(f"--set {change}" in caught.value.hint for change in changes if "precision" not in change)
    plan_for(overrides=(*words, *changes))


def test_epochs_by_flag_are_refused_if_the_manifest_has_max_steps(write_manifest: WriteManifest) -> None:
    path = str(write_manifest({"training.config.max_steps": 9}))
    with pytest.raises(InputError, match="epochs has no effect: max_steps 9 takes precedence"):
        plan_for(path, overrides=("training.config.epochs=1",))
    longer = plan_for(path, overrides=("training.config.epochs=1", "training.config.max_steps=0"))
    assert longer.schedule.max_steps is None


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        ({"lr_scheduler_kwargs": {"num_cycles": 3.0}}, "learning rate", "cosine (num_cycles 3), "),
        ({"load_best_model_at_end": False}, "exported checkpoint", "the last one | --set "),
        ({"metric_for_best_model": "eval/parses"}, "exported checkpoint", "that with the highest eval/parses | --set "),
        (
            {"early_stopping_patience": 1, "early_stopping_threshold": 0.5},
            "exported checkpoint",
            "that with the lowest validation loss; stops after 1 evaluation without improvement by more than 0.5 | ",
        ),
        ({"weight_decay": 0.25}, "weight decay", "0.25 | --set "),
        ({"adam_beta2": 0.95}, "weight decay", "; β 0.9 and 0.95, ε 1e-08 | --set "),
        ({"torch_compile_mode": "max-autotune"}, "CUDA graph", "off | --set "),
        (
            {"torch_compile": False, "torch_compile_backend": "inductor"},
            "compile options",
            "not used | --set training.config.torch_compile, --set training.config.torch_compile_backend",
        ),
    ],
)
def test_every_setting_of_the_manifest_is_shown(config: dict[str, object], name: str, said: str) -> None:
    assert said in decision(plan_for(gpu="h100", config=config), name)


def test_no_checkpoint_is_best_without_evaluations(write_manifest: WriteManifest) -> None:
    never = {"training.config.evaluation_strategy": "no", "training.config.load_best_model_at_end": False}
    plan = plan_for(str(write_manifest(never)))
    assert not [each for each in plan.decisions if each.name == "exported checkpoint"]
