"""The proof lets right backends pass on every family, and refuses each wrong one by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    PretrainedConfig,
    Qwen2Config,
    StableLmConfig,
)

from launcher.choices import AttentionBackend
from launcher.corpus.store import Store
from launcher.errors import InputError, RunFailedError
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training import attention, proof
from launcher.training.assembly import assemble
from launcher.training.attention import BACKENDS, Backend
from launcher.training.batches import PackedBatch
from launcher.training.gradient_proof import find_variants, prove_gradients
from launcher.training.proof import Proof, pick_documents, prove_attention
from launcher.training.starting import start
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

# Hidden states of another kernel in fp32, over two layers. Seen: 4e-7. The proof itself allows 1e-4.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Packs of several documents each."""
    return write_store(tmp_path_factory.mktemp("shared"), pack_greedily(make_documents(14, seed=3)))


def prove(plan: Plan, store: Store, root: Path, backend: AttentionBackend, base: Path | None = None) -> Proof:
    changes: dict[str, Any] = {"attention.backend": backend, "attention.fallbacks": ()}
    if base is not None:
        changes |= {"base.name": str(base), **adapt("full")}
    varied = vary(plan, changes)
    reset_accelerate()
    _, proof = assemble(varied, RunPaths(root), store, (), start(varied))
    return proof


def check_proven(proof: Proof) -> None:
    assert proof.num_documents > 2
    assert proof.hidden < ROUNDING
    assert proof.loss < ROUNDING
    assert proof.mixing > 1000 * ROUNDING, "mixing must show"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_backends_that_run_on_a_cpu(plan: Plan, shared: Store, tmp_path: Path, backend: AttentionBackend) -> None:
    check_proven(prove(plan, shared, tmp_path, backend))


def test_flex_runs_forward_on_a_cpu_and_is_right(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"flex cannot run here: .* does not support backward on CPU"):
        prove(plan, shared, tmp_path, "flex")
    for backward in ("prove_gradients", "prove_products"):
        monkeypatch.setattr(f"launcher.training.assembly.{backward}", lambda *_arguments: 0.0)
    check_proven(prove(plan, shared, tmp_path, "flex"))


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
def test_families(plan: Plan, shared: Store, tmp_path: Path, family: str, backend: AttentionBackend) -> None:
    base = write_base(tmp_path / "base", FAMILIES[family])
    check_proven(prove(plan, shared, tmp_path, backend, base))


GEMMA2 = Gemma2Config(
    **SIZES,
    sliding_window=WINDOW,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    query_pre_attn_scalar=9,
)


def test_capped_scores_are_left_to_eager(
    plan: Plan, shared: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base", GEMMA2)
    check_proven(prove(plan, shared, tmp_path, "eager", base))
    for backend in ("sdpa", "flex"):
        with pytest.raises(InputError, match=rf"{backend} cannot run here: .* caps its attention scores"):
            prove(plan, shared, tmp_path, backend, base)
    ladder = vary(plan, {"base.name": str(base), "attention.fallbacks": ("eager",), **adapt("full")})
    reset_accelerate()
    run, proof = assemble(ladder, RunPaths(tmp_path), shared, (), start(ladder))
    check_proven(proof)
    assert run.plan.attention.backend == "eager"
    assert "sdpa cannot run here" in capsys.readouterr().err


def test_a_window_is_refused_by_flex(plan: Plan, shared: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", FAMILIES["mistral"])
    with pytest.raises(InputError, match=r"flex cannot run here: .* looks back only so far"):
        prove(plan, shared, tmp_path, "flex", base)


def test_a_family_that_does_not_tell_attention_the_borders(plan: Plan, shared: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", StableLmConfig(**{**SIZES, "num_key_value_heads": 2}))
    with pytest.raises(InputError, match="does not pass on to attention where documents begin"):
        prove(plan, shared, tmp_path, "sdpa", base)


def test_no_name_calls_for_kernels_of_transformers() -> None:
    """It looks for words inside a name, and would want its own FlashAttention, or refuse a family."""
    for name, backend in BACKENDS.items():
        registered = attention.register(name, backend)
        assert not any(word in registered for word in ("flash", "sdpa", "flex_attention"))


def test_an_adapter_in_the_midst_of_training(plan: Plan, shared: Store, tmp_path: Path) -> None:
    run = build(plan, shared, tmp_path)
    train_recorded(run)
    wake_adapter(run)
    engine = run.engine
    check_proven(prove_attention(run.plan, engine.module, engine.model, run.train.file, engine.device))
    assert engine.model.training, "as it was before"
    assert engine.module.base.config._attn_implementation == "launcher_SDPA"


# Wrong backends, plugged in where sdpa stands ------------------------------------------------------------------------

Visible = Callable[[Tensor, Tensor], Tensor]  # (document of each token, position in the row) -> [query, key]


def dense(visible: Visible, scale: float = 1.0, factor: float = 1.0) -> Backend:
    """All tokens by all tokens, under a mask of the test's own."""

    def describe(batch: PackedBatch) -> dict[str, Any]:
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

    return Backend(kernel=kernel, describe=describe)


def _right(document: Tensor, place: Tensor) -> Tensor:
    return (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])


def _everything_before(_document: Tensor, place: Tensor) -> Tensor:
    return place[:, None] >= place[None, :]


def _last_token_of_the_document_before(document: Tensor, place: Tensor) -> Tensor:
    is_last = torch.cat([document[1:] != document[:-1], torch.tensor([True])])
    return _right(document, place) | ((document[:, None] == document[None, :] + 1) & is_last[None, :])


def _only_the_last_document_is_mixed(document: Tensor, place: Tensor) -> Tensor:
    return _right(document, place) | ((document[:, None] == document.max()) & (document[None, :] == 0))


def _future(document: Tensor, _place: Tensor) -> Tensor:
    return document[:, None] == document[None, :]


def _next_token(document: Tensor, place: Tensor) -> Tensor:
    return _right(document, place) | (_future(document, place) & (place[:, None] + 1 == place[None, :]))


def _itself_alone(_document: Tensor, place: Tensor) -> Tensor:
    return place[:, None] == place[None, :]


WRONG: dict[str, Backend] = {
    "ignores borders": dense(_everything_before),
    "sees the last token of the document before": dense(_last_token_of_the_document_before),
    "mixes one document of many": dense(_only_the_last_document_is_mixed),
    "sees the future": dense(_future),
    "sees the next token": dense(_next_token),
    "sees nothing but itself": dense(_itself_alone),
    "scales by a tenth less": dense(_right, scale=0.9),
    "gives a hundredth more": dense(_right, factor=1.01),
    "gives not-a-number": dense(_right, factor=float("nan")),
}


def test_the_backend_of_the_test_is_right(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_right))
    check_proven(prove(plan, shared, tmp_path, "sdpa"))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, wrong: str
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG[wrong])
    with pytest.raises(RunFailedError, match="the attention backend sdpa") as refused:
        prove(plan, shared, tmp_path, "sdpa")
    assert "hint: " in str(refused.value)


def test_a_wrong_backend_is_not_a_reason_to_try_the_next(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores borders"])
    assert plan.attention.fallbacks == ("eager",)
    with pytest.raises(RunFailedError, match="the attention backend sdpa lets documents of a pack see each other"):
        build(plan, shared, tmp_path)


@pytest.mark.parametrize("wrong", ["ignores borders", "sees the last token of the document before", "sees the future"])
def test_a_wrong_backend_is_refused_in_bf16(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, wrong: str
) -> None:
    bf16 = vary(plan, {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"})
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_right))
    proof = prove(bf16, shared, tmp_path, "sdpa")
    assert 1e-4 < proof.hidden < 0.05 < proof.mixing
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG[wrong])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        prove(bf16, shared, tmp_path, "sdpa")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mixing_is_seen_on_a_base_that_knows_nothing(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, dtype: str
) -> None:
    """Weights as they are drawn, with the usual small spread: a loss would tell nothing, hidden states do."""
    base = write_base(tmp_path / "base", make_config(initializer_range=0.02))
    dtypes = {f"precision.{name}": dtype for name in ("compute_dtype", "base_dtype", "trainable_dtype")}
    varied = vary(plan, dtypes)
    monkeypatch.setitem(BACKENDS, "sdpa", dense(_right))
    prove(varied, shared, tmp_path, "sdpa", base)
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores borders"])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        prove(varied, shared, tmp_path, "sdpa", base)


def test_mixing_is_seen_where_every_document_fills_more_than_half_a_sequence(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    """Each pack holds one document, but a micro-batch lays several packs end to end."""
    long = write_store(tmp_path / "store", pack_singly(make_document(40 + index, 30, index) for index in range(8)))
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores borders"])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        prove(vary(plan, {**split(4, 1), "batch.packed": False}), long, tmp_path, "sdpa")


def test_documents_of_the_proof(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """At most eight, as many as fit, whole, and each with something to predict."""
    run = build(plan, shared, tmp_path)
    picked = pick_documents(run.train.file, SEQUENCE_LENGTH)
    assert 2 <= len(picked) <= 8
    assert sum(len(document.input_ids) for document in picked) <= SEQUENCE_LENGTH
    assert all(document.trained.any() and len(document.document_lengths) == 1 for document in picked)


def test_long_documents_of_a_base_that_caps_its_scores(
    plan: Plan, shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has no SDPA for it: its eager attention is asked whatever it holds."""
    monkeypatch.setattr(proof, "_LONGEST_EAGER", 8)
    base = write_base(tmp_path / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    check_proven(prove(plan, shared, tmp_path / "run", "eager", base))


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "eager"])  # flex has no backward pass on a CPU
def test_gradients_of_the_backends(plan: Plan, name: AttentionBackend) -> None:
    variants = [(None, None, None), (0.3, None, 40)]
    assert prove_gradients(plan, BACKENDS[name], torch.device("cpu"), variants) < 1e-5


def test_gradients_are_proven_for_what_the_base_does(plan: Plan, shared: Store, tmp_path: Path) -> None:
    """Windows in some layers, another scale; a backend that is wrong only where a window is asked for is refused."""
    base = write_base(tmp_path / "base", FAMILIES["gemma3"])
    varied = vary(plan, {"base.name": str(base), **adapt("full")})
    found = find_variants(build(varied, shared, tmp_path / "run").engine.module)
    assert {(scaling, window) for scaling, _, window in found} >= {(9**-0.5, WINDOW)}
    right = BACKENDS["sdpa"]

    def kernel(*arguments: Any) -> Tensor:
        query = arguments[0]
        return right.kernel(_Turned.apply(query) if arguments[6] is not None else query, *arguments[1:])

    broken = Backend(kernel=kernel, describe=right.describe)
    assert prove_gradients(plan, broken, torch.device("cpu"), [(None, None, None)]) < 1e-5
    with pytest.raises(RunFailedError, match="has wrong gradients"):
        prove_gradients(plan, broken, torch.device("cpu"), found)


class _Turned(torch.autograd.Function):
    """Right forward; backward a tenth of the gradient is missing."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Tensor:
        result: Tensor = grads[0] * 0.9
        return result


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_backend_that_is_wrong_backward_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, shared: Store, tmp_path: Path, which: int
) -> None:
    right = BACKENDS["sdpa"]

    def kernel(*arguments: Any) -> Tensor:
        heads = list(arguments)
        heads[which] = _Turned.apply(heads[which])
        return right.kernel(*heads)

    monkeypatch.setitem(BACKENDS, "sdpa", Backend(kernel=kernel, describe=right.describe))
    with pytest.raises(RunFailedError, match="the attention backend sdpa has wrong gradients"):
        prove(plan, shared, tmp_path, "sdpa")
