"""Settings copied from the manifest into the plan: the data, and Weights & Biases."""

from __future__ import annotations

from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.estimate.dataset_size import SAMPLE_TEST, SAMPLE_TRAIN, SAMPLE_VALIDATION
from launcher.plan.model import DataPlan, Decision, WandbPlan

DEFAULT_WANDB_PROJECT = "expert-launcher"


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
    """Return the prompt template; the tiny base of the smoke profile has special tokens for chatml only."""
    template = context.entry.prompt_template
    is_missing = context.entry.chat_template is not None and context.options.chat_template is None
    return "chatml" if context.is_smoke and (template == "llama3" or is_missing) else template


def explain_wandb(context: PlanContext) -> Decision:
    """Return the decision about Weights & Biases; the API key is known only where the run starts."""
    wandb = context.config.wandb
    if wandb.mode is not None:
        return manifest_decision("W&B", wandb.mode, "training.config.wandb.mode")
    if wandb.model_fields_set:
        return manifest_decision("W&B", "online with an API key, else offline", "settings in training.config.wandb")
    return plan_decision("W&B", "online with an API key, else off", "not requested; --wandb offline writes files")


def make_wandb_plan(context: PlanContext) -> WandbPlan:
    """Return the settings of the Weights & Biases run."""
    wandb = context.config.wandb
    return WandbPlan(
        project=wandb.project or DEFAULT_WANDB_PROJECT,
        entity=wandb.entity,
        group=wandb.group or context.manifest.expert,
        name=wandb.name,
        tags=wandb.tags,
        notes=wandb.notes,
        mode=wandb.mode,
        is_requested=bool(wandb.model_fields_set),
        artifacts=wandb.artifacts,
    )
