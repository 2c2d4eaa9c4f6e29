"""Settings copied from the manifest into the plan: the data, and the trackers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.estimate.dataset_size import SAMPLE_TEST, SAMPLE_TRAIN, SAMPLE_VALIDATION
from launcher.plan.model import DataPlan, Decision, WandbPlan

DEFAULT_WANDB_PROJECT = "expert-launcher"
_TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow"}


def make_data_plan(context: PlanContext) -> DataPlan:
    """Return the training data; in the smoke profile the sample of the manifest's folder."""
    dataset = context.manifest.training.dataset
    if context.is_smoke and context.options.uses_sample:
        sample = {"path": SAMPLE_TRAIN, "validation_path": SAMPLE_VALIDATION, "test_path": SAMPLE_TEST}
        dataset = dataset.model_copy(
            update={**sample, "type": "single", "format": "jsonl", "revision": None, "tasks": None}
        )
    return DataPlan(
        folder=context.options.manifest_folder,
        kind="huggingface" if dataset.format == "huggingface" else dataset.type,
        path=dataset.path,
        format=dataset.format,
        revision=dataset.revision,
        validation_path=dataset.validation_path,
        test_path=dataset.test_path,
        tasks=dataset.tasks or {},
        streaming=dataset.streaming,
        max_rows=dataset.max_rows,
        field_mapping=dataset.mapping,
        system_prompt=dataset.system_prompt,
        prompt_template=_get_template(context),
        chat_template=context.options.chat_template,
        chat_template_file=context.entry.chat_template if context.options.chat_template is not None else None,
        end_token=None if context.is_smoke else context.entry.end_token,
        new_tokens=context.config.new_tokens,
        cache_dir=context.config.pretokenized_cache,
        num_rows=context.rows.num_rows,
        mean_tokens=context.rows.mean_tokens,
        basis=context.rows.basis,
        is_length_assumed=context.rows.is_length_assumed,
    )


def _get_template(context: PlanContext) -> str:
    """Return the prompt template: chatml where the smoke profile's tiny base lacks the manifest's special tokens."""
    template = context.entry.prompt_template
    is_missing = context.entry.chat_template is not None and context.options.chat_template is None
    return "chatml" if context.is_smoke and (template == "llama3" or is_missing) else template


def explain_trackers(context: PlanContext) -> Iterator[Decision]:
    """Yield the decisions about trackers; whether W&B has an API key is known only where the run starts."""
    wandb, report_to = context.config.wandb, context.config.report_to
    if report_to is not None:
        named = ", ".join(_TITLES[name] for name in report_to) or "none"
        yield manifest_decision("trackers", named, "training.config.report_to")
    if report_to is not None and "wandb" not in report_to:
        return
    if wandb.mode is not None:
        yield manifest_decision("W&B", wandb.mode, "training.config.wandb.mode")
    elif _is_wandb_requested(context):
        where = "settings in training.config.wandb" if wandb.model_fields_set else "training.config.report_to"
        yield manifest_decision("W&B", "online with an API key, else offline", where)
    else:
        yield plan_decision("W&B", "online with an API key, else off", "not requested; --wandb offline writes files")


def list_other_trackers(context: PlanContext) -> tuple[Literal["tensorboard", "mlflow"], ...]:
    """Return the trackers besides W&B, each once."""
    return tuple(dict.fromkeys(name for name in context.config.report_to or () if name != "wandb"))


def make_wandb_plan(context: PlanContext) -> WandbPlan:
    """Return the settings of the Weights & Biases run."""
    wandb, report_to = context.config.wandb, context.config.report_to
    return WandbPlan(
        project=wandb.project or DEFAULT_WANDB_PROJECT,
        entity=wandb.entity,
        group=wandb.group or context.manifest.expert,
        name=wandb.name,
        tags=wandb.tags,
        notes=wandb.notes,
        mode=wandb.mode if report_to is None or "wandb" in report_to else "disabled",
        is_requested=_is_wandb_requested(context),
        artifacts=wandb.artifacts,
    )


def _is_wandb_requested(context: PlanContext) -> bool:
    return bool(context.config.wandb.model_fields_set) or "wandb" in (context.config.report_to or ())
