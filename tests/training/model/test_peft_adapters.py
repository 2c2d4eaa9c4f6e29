"""LoRA, DoRA, IA3 and full fine-tuning: built as planned, and one step of each trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from launcher.core.errors import InputError
from launcher.corpus.store import Store
from launcher.manifest.config import TrainingConfig
from launcher.plan.model import Plan
from launcher.training.checkpoint.weights import save_weights
from launcher.training.engine.optimizer import build_optimizer, build_scheduler
from launcher.training.engine.run import TrainingRun, build_model
from launcher.training.export.logits_check import computing_in_fp32
from tests.training.builders import (
    VOCABULARY,
    adapt,
    build,
    make_config,
    make_plan,
    train_recorded,
    trained_weights,
    vary,
    write_base,
)

KINDS = ("lora", "dora", "ia3", "full")


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_changes_the_adapter(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    changes = {**adapt(kind), "schedule.max_steps": 1, "schedule.warmup_ratio": 0.0}
    run = build(vary(plan, changes), store, tmp_path, is_checked=True)
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
    plain = train_recorded(
        build(vary(plan, {**adapt("full"), "schedule.max_steps": 1}), store, tmp_path, is_checked=True)
    ).losses
    adapted = train_recorded(
        build(vary(plan, {**adapt(kind), "schedule.max_steps": 1}), store, tmp_path, is_checked=True)
    ).losses
    assert adapted == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("base_dtype", "trainable_dtype", "kind"),
    [
        ("bf16", "fp32", "lora"),
        ("bf16", "bf16", "dora"),
        *(("fp32", "fp32", kind) for kind in ("lora", "dora", "ia3")),
        *(pytest.param("bf16", "fp32", kind, marks=pytest.mark.slow) for kind in ("dora", "ia3")),
        *(pytest.param("bf16", "bf16", kind, marks=pytest.mark.slow) for kind in ("lora", "ia3")),
    ],
)
def test_dtypes_follow_the_plan(
    plan: Plan, store: Store, tmp_path: Path, kind: str, base_dtype: str, trainable_dtype: str
) -> None:
    names: dict[str, Any] = {"bf16": torch.bfloat16, "fp32": torch.float32}
    compute = "bf16" if base_dtype == "bf16" else "fp32"
    precision = {"compute_dtype": compute, "base_dtype": base_dtype, "trainable_dtype": trainable_dtype}
    changes = {f"precision.{key}": value for key, value in precision.items()}
    run = build(vary(plan, {**adapt(kind), **changes, "schedule.max_steps": 1}), store, tmp_path, is_checked=True)
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
    run = build(
        vary(plan, adapt("lora", rank=3, alpha=9, target_modules=("q_proj", "up_proj"))),
        store,
        tmp_path,
        is_checked=True,
    )
    shapes = {name: tuple(weight.shape) for name, weight in trained_weights(run).items()}
    assert {name.split(".")[-4] for name in shapes} == {"q_proj", "up_proj"}
    assert all(3 in shape for shape in shapes.values())
    model: Any = run.engine.module.model
    assert model.peft_config["default"].lora_alpha == 9
    assert len(shapes) == 2 * 2 * 2  # matrices, modules, layers


def test_missing_target_modules_are_listed(plan: Plan, store: Store, tmp_path: Path) -> None:
    wanted = adapt("lora", target_modules=("q_proj", "query_key_value", "wo"))
    with pytest.raises(InputError) as error:
        build(vary(plan, wanted), store, tmp_path, is_checked=True)
    message = str(error.value)
    assert "query_key_value is not a linear layer" in message
    assert "wo is not a linear layer" in message
    assert "q_proj is not" not in message
    assert "hint: it has: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_rslora_and_loraplus_train_as_plain_peft(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    """Three steps of our run and of PEFT's own model and optimizer, on the same batches."""
    options = {**adapt(kind, use_rslora=True), "optimizer.loraplus_lr_ratio": 16.0, "optimizer.max_grad_norm": None}
    run = build(
        vary(plan, {**options, "schedule.max_steps": 3, "schedule.warmup_ratio": 0.0}), store, tmp_path, is_checked=True
    )
    optimizer_plan, adapter = run.plan.optimizer, run.plan.adapter
    base: Any = AutoModelForCausalLM.from_pretrained(run.plan.base.name, dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, use_dora=kind == "dora", target_modules=list(adapter.target_modules)
    )
    plain: Any = get_peft_model(base, config)
    start = _copy_start(run, plain)
    optimizer: Any = create_loraplus_optimizer(
        plain,
        torch.optim.AdamW,
        lr=optimizer_plan.learning_rate,
        loraplus_lr_ratio=16.0,
        loraplus_weight_decay=optimizer_plan.weight_decay,
        betas=optimizer_plan.betas,
        eps=optimizer_plan.epsilon,
    )
    _train_both(run, plain, optimizer)
    _assert_same(run, plain, start)


@pytest.mark.parametrize("names", [("embed_tokens", "lm_head"), ("lm_head",), ("embed_tokens",)])
@pytest.mark.parametrize("tied", [True, False])
def test_modules_to_save_train_and_load_as_plain_peft(
    store: Store, tmp_path: Path, names: tuple[str, ...], tied: bool
) -> None:
    """Three steps, then the saved adapter in plain PEFT, and merged."""
    base = write_base(tmp_path / "base", make_config(tie_word_embeddings=tied))
    options = {**adapt("lora", modules_to_save=names), "optimizer.max_grad_norm": None}
    schedule = {"schedule.max_steps": 3, "schedule.warmup_ratio": 0.0, "batch.micro_batch_size": 4}
    run = build(vary(make_plan(base), {**options, **schedule}), store, tmp_path / "run", is_checked=True)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(run.plan.adapter.target_modules),
        modules_to_save=list(names),
        ensure_weight_tying=tied,
    )
    plain: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    start = _copy_start(run, plain)
    saved = [name for name in start if "modules_to_save" in name]
    assert len(saved) == (1 if tied else len(names))
    assert sum(start[name].numel() for name in saved) == VOCABULARY * 32 * len(saved)
    _train_both(run, plain, build_optimizer(run.plan.optimizer, plain))
    _assert_same(run, plain, start)
    save_weights(run, tmp_path / "adapter")
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    ids = torch.arange(1, 30)[None]
    _copy_start(run, plain)
    expected = plain.eval()(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    loaded.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("use_rslora", "kind"),
    [
        (False, "pissa"),
        (True, "pissa_niter_16"),
        pytest.param(True, "pissa", marks=pytest.mark.slow),
        pytest.param(False, "pissa_niter_16", marks=pytest.mark.slow),
    ],
)
def test_pissa_trains_as_plain_peft_and_loads_on_the_base(
    plan: Plan, store: Store, tmp_path: Path, kind: Any, use_rslora: bool
) -> None:
    options = {**adapt("lora", init_lora_weights=kind, use_rslora=use_rslora), "optimizer.max_grad_norm": None}
    run = build(
        vary(plan, {**options, "schedule.max_steps": 3, "schedule.warmup_ratio": 0.0}), store, tmp_path, is_checked=True
    )
    base: Any = AutoModelForCausalLM.from_pretrained(run.plan.base.name, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    targets = list(run.plan.adapter.target_modules)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=kind, use_rslora=use_rslora)
    set_seed(run.plan.schedule.seed)
    plain: Any = get_peft_model(base, config)
    own = run.engine.module.model.state_dict()
    for name, weight in plain.state_dict().items():  # the rest of the base, and the initial adapter, to the bit
        assert torch.equal(own[name], weight), name
        if ".base_layer." in name:
            published = before[name.removeprefix("base_model.model.").replace(".base_layer", "")]
            assert not torch.equal(weight, published)
    start = _copy_start(run, plain)
    _train_both(run, plain, build_optimizer(run.plan.optimizer, plain))
    _assert_same(run, plain, start)
    _copy_start(run, plain)
    save_weights(run, tmp_path / "adapter")
    again: Any = AutoModelForCausalLM.from_pretrained(run.plan.base.name)
    loaded: Any = PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
    assert loaded.peft_config["default"].r == 8
    ids = torch.arange(1, 30)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, plain.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)


NEW_TOKENS = ("<a>", "<b>", "<c>", "<d>")


EMBEDDINGS = ("embed_tokens",)


@pytest.mark.parametrize(
    ("has_rows", "tied", "saved"),
    [  # every pair of values
        (True, True, ()),
        (True, False, EMBEDDINGS),
        (False, True, EMBEDDINGS),
        (False, False, ()),
        pytest.param(True, True, EMBEDDINGS, marks=pytest.mark.slow),
        pytest.param(True, False, (), marks=pytest.mark.slow),
        pytest.param(False, True, (), marks=pytest.mark.slow),
        pytest.param(False, False, EMBEDDINGS, marks=pytest.mark.slow),
    ],
)
def test_new_tokens_train_and_load_as_plain_peft(
    store: Store, tmp_path: Path, has_rows: bool, tied: bool, saved: tuple[str, ...]
) -> None:
    """The ids of the tokens are the last four that the rows contain; a base has their embeddings, or gets them."""
    first = VOCABULARY - len(NEW_TOKENS)
    ids = list(range(first, VOCABULARY))
    config = make_config(tie_word_embeddings=tied, vocab_size=VOCABULARY if has_rows else first)
    base = write_base(tmp_path / "base", config)
    words = {f"w{number}": number for number in range(first)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(base / "tokenizer.json"))
    options = {**adapt("lora", modules_to_save=saved), "optimizer.max_grad_norm": None, "data.new_tokens": NEW_TOKENS}
    schedule = {"schedule.max_steps": 3, "schedule.warmup_ratio": 0.0, "batch.micro_batch_size": 4}
    run = build(vary(make_plan(base), {**options, **schedule}), store, tmp_path / "run", is_checked=True)
    plain = _make_plain_with_rows(base, run, ids, tied=tied)
    names = [
        name
        for name in ("embed_tokens", "lm_head")
        if name not in saved and not (tied and (saved or name == "lm_head"))
    ]
    config_ = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(run.plan.adapter.target_modules),
        modules_to_save=list(saved) or None,
        ensure_weight_tying=tied and bool(saved),
        trainable_token_indices=dict.fromkeys(names, ids) or None,
    )
    plain = get_peft_model(plain, config_)
    own = {name.removeprefix("model."): weight for name, weight in trained_weights(run).items()}
    initial = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert own.keys() == initial.keys()
    for name in own:
        if "lora" not in name:  # the mean of all embeddings, whatever the seed
            torch.testing.assert_close(own[name], initial[name].detach())
    start = _copy_start(run, plain)
    _train_both(run, plain, build_optimizer(run.plan.optimizer, plain))
    _assert_same(run, plain, start)
    _copy_start(run, plain)
    save_weights(run, tmp_path / "adapter")
    again: Any = AutoModelForCausalLM.from_pretrained(base)
    again.resize_token_embeddings(VOCABULARY)  # draws new rows, which the adapter replaces
    loaded: Any = PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
    tokens = torch.arange(90, VOCABULARY)[None]
    expected = plain.eval()(input_ids=tokens).logits
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)
    with computing_in_fp32(loaded):  # as export checks it
        torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)
    loaded.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)


def _make_plain_with_rows(base: Path, run: TrainingRun, ids: list[int], *, tied: bool) -> Any:
    """Return the base with the mean of all embeddings in new rows, by transformers alone."""
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(VOCABULARY)
    assert run.engine.module.base.config.vocab_size == VOCABULARY
    heads = [plain.get_input_embeddings()] if tied else [plain.get_input_embeddings(), plain.get_output_embeddings()]
    for part in heads:
        part.weight.data[ids] = part.weight.data[: min(ids)].mean(0)
    return plain


def test_trained_embeddings_feed_the_base_in_its_dtype(plan: Plan, store: Store, tmp_path: Path) -> None:
    dtypes = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16", "schedule.max_steps": 1}
    run = build(
        vary(plan, {**adapt("lora", modules_to_save=("embed_tokens",)), **dtypes}), store, tmp_path, is_checked=True
    )
    seen: list[torch.dtype] = []
    run.engine.module.layers[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    train_recorded(run)
    assert set(seen) == {torch.bfloat16}
    assert {weight.dtype for weight in trained_weights(run).values()} == {torch.float32}


def _copy_start(run: TrainingRun, plain: Any) -> dict[str, torch.Tensor]:
    """Give plain PEFT the adapter's initial weights, and return them."""
    start = {name.removeprefix("model."): weight for name, weight in trained_weights(run).items()}
    assert not plain.load_state_dict(start, strict=False).unexpected_keys
    return start


def _train_both(run: TrainingRun, plain: Any, optimizer: Any) -> None:
    """Train our run, and plain PEFT on the same batches."""
    schedule = build_scheduler(run.plan.schedule, optimizer, run.num_steps)
    batches = run.batches()
    for batch in (batches[index] for index in range(run.num_steps)):
        _plain_loss(plain, batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    train_recorded(run)


def _assert_same(run: TrainingRun, plain: Any, start: dict[str, torch.Tensor]) -> None:
    expected = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert expected.keys() == start.keys()
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


@pytest.mark.parametrize("key", ["use_rslora", "loraplus_lr_ratio", "modules_to_save"])
def test_lora_options_are_refused_for_other_adapters(key: str) -> None:
    config = {"method": "sft", "adapter_type": "full", "epochs": 1, "learning_rate": 1e-4, "batch_size": 1, key: 2.0}
    values: dict[str, Any] = {"use_rslora": True, "modules_to_save": ("lm_head",)}
    with pytest.raises(ValueError, match=f"{key}: not applicable to adapter_type full"):
        TrainingConfig.model_validate(config | {key: values.get(key, 2.0)})
