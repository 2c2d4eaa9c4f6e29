"""LoRA, DoRA, IA3 and full fine-tuning: built as planned, and one step of each trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM

from launcher.core.errors import InputError
from launcher.corpus.store import Store
from launcher.manifest.config import TrainingConfig
from launcher.plan.model import Plan
from launcher.training.engine.optimizer import build_scheduler
from launcher.training.engine.run import build_model
from tests.training.builders import adapt, build, train_recorded, trained_weights, vary

KINDS = ("lora", "dora", "ia3", "full")


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_changes_the_adapter(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    changes = {**adapt(kind), "schedule.max_steps": 1, "schedule.warmup_ratio": 0.0}
    run = build(vary(plan, changes), store, tmp_path)
    before = trained_weights(run)
    (loss,) = train_recorded(run).losses
    assert 4.0 < loss < 6.0  # a guess among 128 tokens: ln 128 = 4.85
    moved = [name for name, weight in trained_weights(run).items() if not torch.equal(weight, before[name])]
    still = sorted(set(before) - set(moved))
    # A LoRA begins as nothing: its first matrix has a gradient only once the second is something.
    assert all("lora_A" in name for name in still)
    assert moved
    assert isinstance(run.engine.module.model, PeftModel) == (kind != "full")


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_new_adapter_does_not_change_the_loss(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    """DoRA decomposes and recombines the weights in fp32: 1e-6."""
    plain = train_recorded(build(vary(plan, {**adapt("full"), "schedule.max_steps": 1}), store, tmp_path)).losses
    adapted = train_recorded(build(vary(plan, {**adapt(kind), "schedule.max_steps": 1}), store, tmp_path)).losses
    assert adapted == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize(("base_dtype", "trainable_dtype"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_dtypes_follow_the_plan(
    plan: Plan, store: Store, tmp_path: Path, kind: str, base_dtype: str, trainable_dtype: str
) -> None:
    names: dict[str, Any] = {"bf16": torch.bfloat16, "fp32": torch.float32}
    compute = "bf16" if base_dtype == "bf16" else "fp32"
    precision = {"compute_dtype": compute, "base_dtype": base_dtype, "trainable_dtype": trainable_dtype}
    changes = {f"precision.{key}": value for key, value in precision.items()}
    run = build(vary(plan, {**adapt(kind), **changes, "schedule.max_steps": 1}), store, tmp_path)
    train_recorded(run)
    for parameter in run.engine.module.parameters():
        assert parameter.dtype == names[trainable_dtype if parameter.requires_grad else base_dtype]


@pytest.mark.parametrize(("strategy", "dtype"), [("ddp", torch.float32), ("zero3", torch.bfloat16)])
def test_zero3_adapters_have_the_compute_dtype(plan: Plan, strategy: str, dtype: torch.dtype) -> None:
    """DeepSpeed does not cast parameters of a base that it partitioned while loading."""
    planned = vary(plan, {**adapt("lora"), "precision.compute_dtype": "bf16", "strategy": strategy})
    module = build_model(planned, (), torch.device("cpu"))
    assert {parameter.dtype for parameter in module.parameters() if parameter.requires_grad} == {dtype}


def test_ranks_and_targets_follow_the_plan(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, adapt("lora", rank=3, alpha=9, target_modules=("q_proj", "up_proj"))), store, tmp_path)
    shapes = {name: tuple(weight.shape) for name, weight in trained_weights(run).items()}
    assert {name.split(".")[-4] for name in shapes} == {"q_proj", "up_proj"}
    assert all(3 in shape for shape in shapes.values())
    model: Any = run.engine.module.model
    assert model.peft_config["default"].lora_alpha == 9
    assert len(shapes) == 2 * 2 * 2  # matrices, modules, layers


def test_missing_target_modules_are_listed(plan: Plan, store: Store, tmp_path: Path) -> None:
    wanted = adapt("lora", target_modules=("q_proj", "query_key_value", "wo"))
    with pytest.raises(InputError) as error:
        build(vary(plan, wanted), store, tmp_path)
    message = str(error.value)
    assert "query_key_value is not a linear layer" in message
    assert "wo is not a linear layer" in message
    assert "q_proj is not" not in message
    assert "hint: it has: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_rslora_and_loraplus_train_as_plain_peft(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    """Three steps of our run and of PEFT's own model and optimizer, on the same batches."""
    options = {**adapt(kind, use_rslora=True), "optimizer.loraplus_lr_ratio": 16.0, "optimizer.max_grad_norm": None}
    run = build(vary(plan, {**options, "schedule.max_steps": 3, "schedule.warmup_ratio": 0.0}), store, tmp_path)
    optimizer_plan, adapter = run.plan.optimizer, run.plan.adapter
    base: Any = AutoModelForCausalLM.from_pretrained(run.plan.base.name, dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, use_dora=kind == "dora", target_modules=list(adapter.target_modules)
    )
    plain: Any = get_peft_model(base, config)
    start = {name.removeprefix("model."): weight for name, weight in trained_weights(run).items()}
    plain.load_state_dict(start, strict=False)
    optimizer: Any = create_loraplus_optimizer(
        plain,
        torch.optim.AdamW,
        lr=optimizer_plan.learning_rate,
        loraplus_lr_ratio=16.0,
        loraplus_weight_decay=optimizer_plan.weight_decay,
        betas=optimizer_plan.betas,
        eps=optimizer_plan.epsilon,
    )
    schedule = build_scheduler(run.plan.schedule, optimizer, run.num_steps)
    batches = run.batches()
    for batch in (batches[index] for index in range(run.num_steps)):
        _plain_loss(plain, batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    train_recorded(run)
    expected = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for name, weight in trained_weights(run).items():
        moved = expected[name.removeprefix("model.")] - start[name.removeprefix("model.")]
        torch.testing.assert_close(weight, expected[name.removeprefix("model.")], rtol=1e-3, atol=1e-5)
        assert moved.abs().max() > 1e-4


def _plain_loss(model: Any, batch: Any) -> torch.Tensor:
    """Mean loss of the trained positions, document by document."""
    total, first = torch.zeros(()), 0
    targets = dict(zip(batch.trained_positions.tolist(), batch.targets.tolist(), strict=True))
    for length in batch.document_lengths:
        logits = model(input_ids=batch.input_ids[:, first : first + length]).logits[0]
        kept = [index for index in range(length) if first + index in targets]
        if kept:
            labels = torch.tensor([targets[first + index] for index in kept])
            total = total + torch.nn.functional.cross_entropy(logits[kept], labels, reduction="sum")
        first += length
    return total / len(targets)


@pytest.mark.parametrize("key", ["use_rslora", "loraplus_lr_ratio"])
def test_lora_options_are_refused_for_other_adapters(key: str) -> None:
    config = {"method": "sft", "adapter_type": "full", "epochs": 1, "learning_rate": 1e-4, "batch_size": 1, key: 2.0}
    with pytest.raises(ValueError, match=f"{key}: not applicable to adapter_type full"):
        TrainingConfig.model_validate(config | ({key: True} if key == "use_rslora" else {}))
