"""What the plan carries on for later stages as the manifest says it: the data, and where metrics go."""

from __future__ import annotations

from launcher.plan.model import DataPlan, WandbPlan
from launcher.plan.situation import Situation
from launcher.rows import SAMPLE_TEST, SAMPLE_TRAIN, SAMPLE_VALIDATION

DEFAULT_WANDB_PROJECT = "expert-launcher"


def make_data_plan(situation: Situation) -> DataPlan:
    dataset = situation.manifest.training.dataset
    if situation.is_smoke and situation.options.takes_sample:
        sample = {"path": SAMPLE_TRAIN, "validation_path": SAMPLE_VALIDATION, "test_path": SAMPLE_TEST}
        dataset = dataset.model_copy(
            update={**sample, "type": "single", "format": "jsonl", "revision": None, "tasks": None}
        )
    mapping = dataset.field_mapping
    if dataset.text_field is not None:
        mapping = mapping.model_copy(update={"text": dataset.text_field})
    return DataPlan(
        folder=situation.options.manifest_folder,
        kind="huggingface" if dataset.format == "huggingface" else dataset.type,
        path=dataset.path,
        format=dataset.format,
        revision=dataset.revision,
        validation_path=dataset.validation_path,
        test_path=dataset.test_path,
        tasks=dataset.tasks or {},
        streaming=dataset.streaming,
        field_mapping=mapping,
        prompt_template=_find_template(situation),
        cache_dir=situation.config.pretokenized_cache,
        num_rows=situation.rows.num_rows,
        mean_tokens=situation.rows.mean_tokens,
        basis=situation.rows.basis,
    )


def _find_template(situation: Situation) -> str:
    """The tiny base of the smoke profile knows no markers but chatml's: others could not be learnt as tokens."""
    wanted = situation.entry.prompt_template
    return "chatml" if situation.is_smoke and wanted == "llama3" else wanted


def make_wandb_plan(situation: Situation) -> WandbPlan:
    wandb = situation.config.wandb
    return WandbPlan(
        project=wandb.project or DEFAULT_WANDB_PROJECT,
        entity=wandb.entity,
        group=wandb.group or situation.manifest.expert,
        name=wandb.name,
        tags=wandb.tags,
        notes=wandb.notes,
        mode=wandb.mode,
        artifacts=wandb.artifacts,
    )
