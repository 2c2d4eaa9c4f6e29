"""The optimizer and the clipping. Learning values come from the manifest, the implementation from the plan."""

from __future__ import annotations

from launcher.choices import OptimizerName
from launcher.errors import InputError
from launcher.plan.model import Decision, OptimizerPlan
from launcher.plan.situation import Situation, asked, decided, forced


def decide_optimizer(situation: Situation) -> tuple[OptimizerPlan, list[Decision]]:
    config = situation.config
    name, decision = _decide_name(situation)
    clipping = config.max_grad_norm or None
    plan = OptimizerPlan(
        name=name,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        max_grad_norm=clipping,
    )
    given = "max_grad_norm" in config.model_fields_set
    reason = "max_grad_norm in the manifest" if given else "not given: what the published trainer used"
    clip = asked("gradient clipping", f"norm {clipping:g}" if clipping else "off", reason)
    return plan, [decision, clip]


def _decide_name(situation: Situation) -> tuple[OptimizerName, Decision]:
    wanted, gpu = situation.config.optim, situation.gpu
    if wanted == "adamw_bnb_8bit" and gpu is None:
        if not situation.is_smoke:
            raise InputError(
                "training.config.optim: adamw_bnb_8bit needs a CUDA GPU, this machine has none",
                hint="--gpu NAME plans for one, or --set training.config.optim=adamw_torch",
            )
        return "adamw_torch", forced("optimizer", "adamw_torch", "adamw_bnb_8bit needs a CUDA GPU")
    if wanted == "adamw_bnb_8bit" and situation.lacks("bitsandbytes"):
        raise InputError(
            "training.config.optim: adamw_bnb_8bit needs the package bitsandbytes, which is not installed here",
            hint="pip install 'expert-launcher[cuda]', or --set training.config.optim=adamw_torch_fused",
        )
    if wanted is not None:
        waits = "; a step waits until the host has seen its gradients, which adamw_torch_fused has no need of"
        reason = f"optim in the manifest{waits if wanted == 'adamw_bnb_8bit' else ''}"
        return wanted, asked("optimizer", wanted, reason)
    return "adamw_torch_fused", decided("optimizer", "adamw_torch_fused", "one kernel for all weights; same arithmetic")
