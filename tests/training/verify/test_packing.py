"""The packing check accepts correct backends on every family and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    StableLmConfig,
)

from launcher.core.choices import AttentionBackend
from launcher.core.errors import InputError, RunFailedError
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.build import build_run
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.model import attention, loss, packed_lm
from launcher.training.model.attention import BACKENDS, Backend
from launcher.training.verify import packing
from launcher.training.verify.attention_grads import check_attention_grads, collect_variants
from launcher.training.verify.packing import PackingCheck, check_packing, select_documents
from tests.training.builders import (
    SEQUENCE_LENGTH,
    SIZES,
    adapt,
    build,
    make_config,
    make_document,
    make_documents,
    pack_greedily,
    pack_singly,
    reset_accelerate,
    split,
    train_recorded,
    vary,
    wake_adapter,
    write_base,
    write_store,
)

# Hidden states of another kernel in fp32, over two layers. Measured: 4e-7. The check itself allows 1e-4.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Packs of several documents each."""
    return write_store(tmp_path_factory.mktemp("shared"), pack_greedily(make_documents(14, seed=3)))


def build_and_check(
    plan: Plan, store: Store, root: Path, backend: AttentionBackend, base: Path | None = None
) -> PackingCheck:
    changes: dict[str, Any] = {"attention.backend": backend, "attention.fallbacks": ()}
    if base is not None:
        changes |= {"base.name": str(base), **adapt("full")}
    varied = vary(plan, changes)
    reset_accelerate()
    _, check = build_run(varied, RunPaths(root), store, (), build_accelerator(varied))
    return check


def assert_equal(check: PackingCheck) -> None:
    assert check.num_documents > 2
    assert check.hidden < ROUNDING
    assert check.loss < ROUNDING
    assert check.without_boundaries > 1000 * ROUNDING, "leakage must be visible"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_cpu_backends_pass(plan: Plan, shared: Store, tmp_path: Path, backend: AttentionBackend) -> None:
    assert_equal(build_and_check(plan, shared, tmp_path, backend))


def test_flex_passes_forward_on_cpu_and_has_no_backward(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"flex does not work here: .* does not support backward on CPU"):
        build_and_check(plan, shared, tmp_path, "flex")
    for backward in ("check_attention_grads", "check_lora_grads"):
        monkeypatch.setattr(f"launcher.training.build.{backward}", lambda *_arguments: 0.0)
    assert_equal(build_and_check(plan, shared, tmp_path, "flex"))


WINDOW = 6  # tokens: less than most documents have
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=9),
    "granite": GraniteConfig(
        **SIZES, logits_scaling=3.0, attention_multiplier=0.5, embedding_multiplier=4.0, residual_multiplier=0.5
    ),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_every_family_passes(plan: Plan, shared: Store, tmp_path: Path, family: str, backend: AttentionBackend) -> None:
    base = write_base(tmp_path / "base", FAMILIES[family])
    assert_equal(build_and_check(plan, shared, tmp_path, backend, base))


GEMMA2 = Gemma2Config(
    **SIZES,
    sliding_window=WINDOW,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    query_pre_attn_scalar=9,
)


def test_softcapped_scores_fall_back_to_eager(
    plan: Plan, shared: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base", GEMMA2)
    assert_equal(build_and_check(plan, shared, tmp_path, "eager", base))
    with pytest.raises(InputError, match=r"sdpa does not work here: .* does not support softcapped"):
        build_and_check(plan, shared, tmp_path, "sdpa", base)
    with_fallback = vary(plan, {"base.name": str(base), "attention.fallbacks": ("eager",), **adapt("full")})
    reset_accelerate()
    run, check = build_run(with_fallback, RunPaths(tmp_path), shared, (), build_accelerator(with_fallback))
    assert_equal(check)
    assert run.plan.attention.backend == "eager"
    assert "sdpa does not work here" in capsys.readouterr().err


@pytest.mark.parametrize("config", [FAMILIES["mistral"], GEMMA2], ids=["mistral", "gemma2"])
def test_flex_applies_windows_and_softcaps(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, config: PretrainedConfig
) -> None:
    for backward in ("check_attention_grads", "check_lora_grads"):  # not on a CPU; see the test on a GPU below
        monkeypatch.setattr(f"launcher.training.build.{backward}", lambda *_arguments: 0.0)
    assert_equal(build_and_check(plan, shared, tmp_path, "flex", write_base(tmp_path / "base", config)))


def test_a_kernel_that_does_not_compile_falls_back(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: Any) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    broken = Backend(kernel=fail, build_metadata=BACKENDS["flex"].build_metadata)
    for name in ("flex", "sdpa"):
        monkeypatch.setitem(BACKENDS, name, broken)
    changes = {"attention.backend": "flex", "attention.fallbacks": ("eager",), **adapt("full")}
    reset_accelerate()
    varied = vary(plan, changes)
    assert (
        build_run(varied, RunPaths(tmp_path), shared, (), build_accelerator(varied))[0].plan.attention.backend
        == "eager"
    )
    assert "flex does not work here (out of resource: shared memory); trying eager" in capsys.readouterr().err
    reset_accelerate()
    other = vary(plan, {**changes, "attention.backend": "sdpa"})
    with pytest.raises(RuntimeError, match="out of resource"):
        build_run(other, RunPaths(tmp_path), shared, (), build_accelerator(other))


def test_family_that_drops_attention_kwargs_is_refused(plan: Plan, shared: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", StableLmConfig(**{**SIZES, "num_key_value_heads": 2}))
    with pytest.raises(InputError, match="does not pass keyword arguments on to its attention"):
        build_and_check(plan, shared, tmp_path, "sdpa", base)


def test_registered_names_do_not_trigger_transformers_kernels() -> None:
    """transformers searches the name, and would load its own FlashAttention or refuse a family."""
    for name, backend in BACKENDS.items():
        registered = attention.register_backend(name, backend)
        assert not any(word in registered for word in ("flash", "sdpa", "flex_attention"))


def test_trained_adapter_passes_and_state_is_restored(plan: Plan, shared: Store, tmp_path: Path) -> None:
    run = build(plan, shared, tmp_path, is_checked=True)
    train_recorded(run)
    wake_adapter(run)
    engine = run.engine
    assert_equal(check_packing(run.plan, engine.module, engine.model, run.train.file, engine.device))
    assert engine.model.training, "training mode is restored"
    assert engine.module.base.config._attn_implementation == "launcher_SDPA"


# Wrong backends in place of sdpa --------------------------------------------------------------------------------------

Visible = Callable[[Tensor, Tensor], Tensor]  # (document of each token, position in the row) -> [query, key]


def dense(visible: Visible, scale: float = 1.0, factor: float = 1.0) -> Backend:
    """Dense attention under a given mask."""

    def build_metadata(batch: PackedBatch) -> dict[str, Any]:
        lengths = torch.tensor(batch.document_lengths)
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return {"mask": visible(document, torch.arange(len(document)))}

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: dict[str, Any],
        scaling: float | None,
        _softcap: float | None,
        _window: int | None,
    ) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=documents["mask"],
            scale=scale * (scaling or query.shape[-1] ** -0.5),
            enable_gqa=True,
        )
        return (factor * out).transpose(1, 2)

    return Backend(kernel=kernel, build_metadata=build_metadata)


def _correct(document: Tensor, position: Tensor) -> Tensor:
    return (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])


def _all_previous_tokens(_document: Tensor, position: Tensor) -> Tensor:
    return position[:, None] >= position[None, :]


def _last_token_of_previous_document(document: Tensor, position: Tensor) -> Tensor:
    is_last = torch.cat([document[1:] != document[:-1], torch.tensor([True])])
    return _correct(document, position) | ((document[:, None] == document[None, :] + 1) & is_last[None, :])


def _leaks_into_last_document(document: Tensor, position: Tensor) -> Tensor:
    return _correct(document, position) | ((document[:, None] == document.max()) & (document[None, :] == 0))


def _future(document: Tensor, _position: Tensor) -> Tensor:
    return document[:, None] == document[None, :]


def _next_token(document: Tensor, position: Tensor) -> Tensor:
    return _correct(document, position) | (_future(document, position) & (position[:, None] + 1 == position[None, :]))


def _only_itself(_document: Tensor, position: Tensor) -> Tensor:
    return position[:, None] == position[None, :]


WRONG: dict[str, Backend] = {
    "ignores boundaries": dense(_all_previous_tokens),
    "sees the last token of the previous document": dense(_last_token_of_previous_document),
    "leaks into one document of many": dense(_leaks_into_last_document),
    "sees the future": dense(_future),
    "sees the next token": dense(_next_token),
    "sees only itself": dense(_only_itself),
    "scale is 10 % too small": dense(_correct, scale=0.9),
    "output is 1 % too large": dense(_correct, factor=1.01),
    "gives NaN": dense(_correct, factor=float("nan")),
}


def test_dense_test_backend_is_correct(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_correct))
    assert_equal(build_and_check(plan, shared, tmp_path, "sdpa"))


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, wrong: str
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG[wrong])
    with pytest.raises(RunFailedError, match="the attention backend sdpa") as error:
        build_and_check(plan, shared, tmp_path, "sdpa")
    assert "hint: " in str(error.value)


def test_wrong_backend_does_not_fall_back(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores boundaries"])
    assert plan.attention.fallbacks == ("eager",)
    with pytest.raises(RunFailedError, match="the attention backend sdpa lets packed documents see each other"):
        build(plan, shared, tmp_path, is_checked=True)


def test_wrong_backends_are_refused_in_bf16(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    bf16 = vary(plan, {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"})
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_correct))
    check = build_and_check(bf16, shared, tmp_path, "sdpa")
    assert 1e-4 < check.hidden < 0.05 < check.without_boundaries
    for wrong in ("ignores boundaries", "sees the last token of the previous document", "sees the future"):
        monkeypatch.setitem(BACKENDS, "sdpa", WRONG[wrong])
        with pytest.raises(RunFailedError, match="the attention backend sdpa"):
            build_and_check(bf16, shared, tmp_path, "sdpa")


def test_rounding_of_a_sensitive_base_is_measured_against_fp32(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if pretrained weights amplified rounding errors: every difference is larger than the usual tolerance."""
    bf16 = vary(plan, {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"})
    monkeypatch.setattr(packing, "_HIDDEN_TOLERANCE", {"bf16": 1e-6})
    check = build_and_check(bf16, shared, tmp_path, "sdpa")
    assert 1e-4 < check.hidden < 0.05
    for wrong in ("sees the future", "scale is 10 % too small"):
        monkeypatch.setitem(BACKENDS, "sdpa", WRONG[wrong])
        with pytest.raises(RunFailedError, match="the attention backend sdpa"):
            build_and_check(bf16, shared, tmp_path, "sdpa")
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_correct))
    with monkeypatch.context() as patch:
        patch.setattr(packing, "Upcast", Mock(side_effect=RuntimeError("no FP32 here")))
        with pytest.raises(RunFailedError, match="gives other results than transformers"):
            build_and_check(bf16, shared, tmp_path, "sdpa")
    assert "cannot compare with FP32 (RuntimeError: no FP32 here)" in capsys.readouterr().err
    monkeypatch.setattr(packed_lm, "compute_summed_loss", lambda *given: 1.1 * loss.compute_summed_loss(*given))
    with pytest.raises(RunFailedError, match=r"loss of \d documents differs by 1.0e-01"):
        build_and_check(bf16, shared, tmp_path, "sdpa")


def test_loss_may_differ_as_much_as_the_hidden_states(plan: Plan) -> None:
    """On an H200, Qwen2.5-Coder-1.5B in BF16 on short rows: the loss by 0.051, hidden states by 0.12."""
    bf16 = vary(plan, {"precision.compute_dtype": "bf16"})
    check = PackingCheck(
        num_documents=8, loss=0.051, hidden=0.12, hidden_first=0.1, without_boundaries=0.97, leaks=False
    )
    assert packing._is_rounding(bf16, check)
    assert not packing._is_rounding(bf16, replace(check, hidden=0.03))
    assert not packing._is_rounding(bf16, replace(check, hidden=0.2))
    assert not packing._is_rounding(bf16, replace(check, hidden=float("nan")))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_leakage_is_detected_with_random_weights(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, dtype: str
) -> None:
    """With freshly initialized weights the loss does not show leakage, but hidden states do."""
    base = write_base(tmp_path / "base", make_config(initializer_range=0.02))
    dtypes = {f"precision.{name}": dtype for name in ("compute_dtype", "base_dtype", "trainable_dtype")}
    varied = vary(plan, dtypes)
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_correct))
    build_and_check(varied, shared, tmp_path, "sdpa", base)
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores boundaries"])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        build_and_check(varied, shared, tmp_path, "sdpa", base)


def test_leakage_is_detected_with_one_document_per_pack(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    """Each pack holds one document, but a micro-batch concatenates several packs."""
    long = write_store(tmp_path / "store", pack_singly(make_document(40 + index, 30, index) for index in range(8)))
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores boundaries"])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        build_and_check(vary(plan, {**split(4, 1), "batch.packed": False}), long, tmp_path, "sdpa")


def test_selected_documents_fit_and_are_trained(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """At most eight complete documents that fit, each with trained tokens."""
    run = build(plan, shared, tmp_path, is_checked=True)
    selected = select_documents(run.train.file, SEQUENCE_LENGTH)
    assert 2 <= len(selected) <= 8
    assert sum(len(document.input_ids) for document in selected) <= SEQUENCE_LENGTH
    assert all(document.trained.any() and len(document.document_lengths) == 1 for document in selected)


def test_half_of_the_selected_documents_are_the_longest(plan: Plan, tmp_path: Path) -> None:
    """Packs of many short documents come first in the file, long ones last."""
    short = [[make_document(8, 4, 10 * pack + index) for index in range(6)] for pack in range(8)]
    long = [[make_document(50 + index, 30, 500 + index)] for index in range(6)]
    run = build(plan, write_store(tmp_path / "store", [*short, *long]), tmp_path / "run", is_checked=True)
    lengths = [len(document.input_ids) for document in select_documents(run.train.file, 16 * SEQUENCE_LENGTH)]
    assert lengths == [8] * 4 + [55, 54, 53, 52]


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}


@pytest.mark.parametrize(
    ("lengths", "is_refused"), [((20, 40), True), ((20, 31), False), ((40, 50), False)], ids=["both", "short", "long"]
)
def test_longrope_is_refused_where_it_would_mix(
    plan: Plan, tmp_path: Path, lengths: tuple[int, int], is_refused: bool
) -> None:
    rope: dict[str, Any] = {
        "original_max_position_embeddings": 32,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32},
    }
    base = write_base(tmp_path / "base", Phi3Config(**SIZES, **rope))
    documents = [make_document(lengths[index % 2], 10, index) for index in range(12)]
    store = write_store(tmp_path / "store", pack_singly(documents))
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    varied = vary(plan, {"base.name": str(base), **adapt("lora", target_modules=targets)})
    if not is_refused:
        build(varied, store, tmp_path / "run", is_checked=True)
        return
    with pytest.raises(InputError, match="longrope") as error:
        build(varied, store, tmp_path / "run", is_checked=True)
    assert error.value.hint == "--set training.config.max_seq_length=32"


def test_longrope_of_some_layers_is_refused_where_it_would_mix(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """Gemma 3 has position embeddings for each kind of layer."""
    rope = {
        "full_attention": {**LONGROPE, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    base = write_base(tmp_path / "base", Gemma3TextConfig(**SIZES, layer_types=kinds, rope_parameters=rope))
    with pytest.raises(InputError, match="longrope"):
        build(vary(plan, {"base.name": str(base)}), shared, tmp_path / "run", is_checked=True)


def test_logits_that_the_head_does_not_give_are_not_blamed_on_attention(
    plan: Plan, shared: Store, tmp_path: Path
) -> None:
    """Qwen3 ignores this key."""
    base = write_base(tmp_path / "base", make_config(logit_scale=0.5))
    with pytest.raises(RunFailedError, match=r"hidden states equal .* with logit_scale"):
        build_and_check(plan, shared, tmp_path, "sdpa", base)


def test_other_results_of_later_documents_are_not_called_leakage(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    own = BACKENDS["sdpa"]

    def kernel(*arguments: Any) -> Tensor:
        out = own.kernel(*arguments).clone()
        out[:, out.shape[1] // 2 :] *= 1.5
        return out

    monkeypatch.setitem(BACKENDS, "sdpa", Backend(kernel=kernel, build_metadata=own.build_metadata))
    with pytest.raises(RunFailedError, match="the attention backend sdpa gives other results than transformers"):
        build_and_check(plan, shared, tmp_path, "sdpa")


def test_softcap_reference_is_eager(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """transformers has no SDPA for it."""
    base = write_base(tmp_path / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    assert_equal(build_and_check(plan, shared, tmp_path / "run", "eager", base))


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "eager"])  # flex has no backward pass on a CPU
def test_backend_gradients_match_plain_attention(plan: Plan, name: AttentionBackend) -> None:
    variants = [(None, None, None), (0.3, None, 40)]
    assert check_attention_grads(plan, BACKENDS[name], torch.device("cpu"), variants) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("head_dim", [64, 256])
def test_flex_gradients_match_plain_attention_on_a_gpu(plan: Plan, head_dim: int) -> None:
    changes: dict[str, Any] = {"base.head_dim": head_dim, "precision.compute_dtype": "bf16"}
    variants = [(None, None, None), (0.06, 2.0, 40), (None, None, 40)]
    assert check_attention_grads(vary(plan, changes), BACKENDS["flex"], torch.device("cuda"), variants) < 2e-2


def test_gradients_are_checked_for_every_variant_of_the_base(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """A backend that is wrong only with a sliding window is refused for a base that uses one."""
    base = write_base(tmp_path / "base", FAMILIES["gemma3"])
    varied = vary(plan, {"base.name": str(base), **adapt("full")})
    variants = collect_variants(build(varied, shared, tmp_path / "run", is_checked=True).engine.module)
    assert {(scaling, window) for scaling, _, window in variants} >= {(9**-0.5, WINDOW)}
    correct = BACKENDS["sdpa"]

    def kernel(*arguments: Any) -> Tensor:
        query = arguments[0]
        return correct.kernel(_WrongBackward.apply(query) if arguments[6] is not None else query, *arguments[1:])

    broken = Backend(kernel=kernel, build_metadata=correct.build_metadata)
    assert check_attention_grads(plan, broken, torch.device("cpu"), [(None, None, None)]) < 1e-5
    with pytest.raises(RunFailedError, match="computes wrong gradients"):
        check_attention_grads(plan, broken, torch.device("cpu"), variants)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FAMILIES["mistral"], {(None, WINDOW)}),
        (MistralConfig(**SIZES, sliding_window=None), {(None, None)}),
        (Phi3Config(**SIZES, sliding_window=WINDOW), {(None, WINDOW)}),
        (GEMMA2, {(2.0, WINDOW), (2.0, None)}),
    ],
    ids=["mistral", "mistral without a window", "phi3", "gemma2"],
)
def test_windows_of_the_config_and_softcaps_are_checked(
    plan: Plan, shared: Store, tmp_path: Path, config: PretrainedConfig, expected: set[tuple[Any, Any]]
) -> None:
    base = write_base(tmp_path / "base", config)
    varied = vary(plan, {"base.name": str(base), "attention.backend": "eager", **adapt("full")})
    variants = collect_variants(build(varied, shared, tmp_path / "run", is_checked=True).engine.module)
    assert {(softcap, window) for _, softcap, window in variants} == expected


class _WrongBackward(torch.autograd.Function):
    """Correct forward; backward loses a tenth of the gradient."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Tensor:
        result: Tensor = grads[0] * 0.9
        return result


@pytest.mark.parametrize("which", [0, 1, 2])
def test_backend_with_wrong_backward_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, which: int
) -> None:
    correct = BACKENDS["sdpa"]

    def kernel(*arguments: Any) -> Tensor:
        heads = list(arguments)
        heads[which] = _WrongBackward.apply(heads[which])
        return correct.kernel(*heads)

    monkeypatch.setitem(BACKENDS, "sdpa", Backend(kernel=kernel, build_metadata=correct.build_metadata))
    with pytest.raises(RunFailedError, match="the attention backend sdpa computes wrong gradients"):
        build_and_check(plan, shared, tmp_path, "sdpa")
