"""Export writes a merged model that agrees with base and adapter, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.core.errors import RunFailedError
from launcher.core.run_paths import RunPaths
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.training.export import export, merge
from launcher.training.export.logits_check import check_agreement, compare_logits, compute_logits, computing_in_fp32
from launcher.training.export.merge import pick_rows
from launcher.training.inference.trained_run import load_trained_run
from tests.training.trained_run import (  # noqa: F401
    Trained,
    copy_run,
    data_dir,
    launcher,
    load_plan,
    make_tiny,
    run_python,
    trained,
)
from tests.unit.corpus.families import FAMILIES, write_family
from tests.unit.corpus.inputs import write_base
from tests.unit.corpus.test_chat_template import THINKING

CPU = torch.device("cpu")
NF4 = {"kind": "int4", "storage_dtype": "uint8", "double_quantization": True}
PROMPT = "<|im_start|>user\nWho acted in most films?<|im_end|>\n<|im_start|>assistant\n"
# No module of ours: what anybody has who gets the folder.
LOAD_MERGED = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
torch.save({"ids": ids, "logits": model(ids).logits, "end": model.generation_config.eos_token_id}, out)
assert not any(name.split(".")[0] == "launcher" for name in sys.modules)
"""
LOAD_ADAPTER = """
import sys, torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, out, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
made = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
torch.save({"ids": ids, "logits": model(ids).logits, "made": made}, out)
assert not any(name.split(".")[0] == "launcher" for name in sys.modules)
"""


def run_script(script: str, trained: Trained, out: Path, *arguments: str) -> dict[str, Any]:  # noqa: F811
    result = run_python(["-c", script, *arguments, str(out), PROMPT], trained, cwd=out.parent)
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = torch.load(out)
    return values


def export_here(paths: RunPaths, *arguments: str) -> int:
    return export.main([f"--run={paths.root}", *arguments])


def list_leftovers(paths: RunPaths) -> list[str]:
    return [file.name for file in paths.root.iterdir() if "merged" in file.name]


@pytest.fixture
def _few_compared_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: a wrong merge differs at each token."""
    monkeypatch.setattr(merge, "_COMPARED_TOKENS", 160)


@pytest.mark.slow
def test_merged_model_loads_without_the_launcher_and_agrees(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    result = launcher(trained, "export", "a", "--out", str(tmp_path / "merged"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'merged'}\n"
    assert "100.0% of it merged" in result.stderr
    files = {file.name for file in (tmp_path / "merged").iterdir()}
    wanted = "model.safetensors config.json generation_config.json tokenizer.json tokenizer_config.json README.md"
    assert {*wanted.split(), "chat_template.jinja"} == files  # the template of the training
    assert [file.name for file in tmp_path.iterdir()] == ["merged"]
    merged = run_script(LOAD_MERGED, trained, tmp_path / "merged.pt", str(tmp_path / "merged"))
    apart = run_script(LOAD_ADAPTER, trained, tmp_path / "apart.pt", str(trained.base), str(trained.paths.adapter))
    assert torch.equal(merged["ids"], apart["ids"])
    torch.testing.assert_close(merged["logits"], apart["logits"], rtol=1e-4, atol=1e-4)
    alone = AutoModelForCausalLM.from_pretrained(trained.base)(merged["ids"]).logits
    assert (merged["logits"] - alone).norm() > 1e-2 * alone.norm()
    assert merged["end"] == load_tokenizer("launcher/tiny", ()).backend.token_to_id("<|im_end|>")


def test_adapter_loads_and_generates_with_peft_alone(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    values = run_script(LOAD_ADAPTER, trained, tmp_path / "out.pt", str(trained.base), str(trained.paths.adapter))
    num_prompt = values["ids"].shape[1]
    assert num_prompt < values["made"].shape[1] <= num_prompt + 5
    assert values["made"][0, num_prompt] == values["logits"][0, -1].argmax()
    assert json.loads((trained.paths.adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "launcher/tiny"
    )


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
@pytest.mark.parametrize("damage", ["dropped", "doubled", "one weight", "not a number"])
def test_wrong_merge_is_refused_and_leaves_no_files(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    paths = copy_run(trained, tmp_path)
    right = peft.LoraModel.merge_and_unload

    def merge(self: peft.LoraModel, **options: Any) -> Any:
        if damage == "dropped":
            return self.unload()
        if damage == "doubled":
            for name, parameter in self.named_parameters():
                if "lora_B" in name:
                    parameter.data *= 2
        model: Any = right(self, **options)
        if damage == "one weight":
            model.model.layers[3].mlp.down_proj.weight.data *= 1.01
        if damage == "not a number":
            model.model.layers[3].mlp.down_proj.weight.data[0, 0] = float("nan")
        return model

    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", merge)
    assert export_here(paths) == 4
    assert "differs from base and adapter" in capsys.readouterr().err
    assert list_leftovers(paths) == []


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
def test_nan_adapter_is_refused(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = copy_run(trained, tmp_path)
    right = PeftModel.from_pretrained

    def load(*arguments: Any, **options: Any) -> PeftModel:
        model: Any = right(*arguments, **options)
        next(p for name, p in model.named_parameters() if "lora_A" in name).data.fill_(float("nan"))
        return model

    monkeypatch.setattr(PeftModel, "from_pretrained", load)
    assert export_here(paths) == 4
    assert list_leftovers(paths) == []


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", "bfloat16"), pytest.param("fp16", "float16", marks=pytest.mark.slow)]
)
def test_dtype_flag_sets_the_saved_dtype(trained: Trained, tmp_path: Path, dtype: str, name: str) -> None:  # noqa: F811
    out = tmp_path / "out" / "model"
    rubbish = out.with_name(f".model.making-{2**31 - 1}")  # of a process that cannot be
    rubbish.mkdir(parents=True)
    assert export_here(trained.paths, f"--out={out}", f"--dtype={dtype}") == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {getattr(torch, name)}
    assert json.loads((out / "config.json").read_text())["dtype"] == name
    assert (out / "model.safetensors").stat().st_mode & 0o777 == (out / "config.json").stat().st_mode & 0o777
    assert f"dtype=torch.{name}" in (out / "README.md").read_text()
    assert [file.name for file in out.parent.iterdir()] == ["model"]


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_dora_and_ia3_adapters_merge(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    paths = copy_run(trained, tmp_path, plan={"adapter.kind": kind})
    targets = ["k_proj", "v_proj", "down_proj"]
    config = (
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, use_dora=True)
        if kind == "dora"
        else IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=["down_proj"])
    )
    model = get_peft_model(make_tiny(load_plan(paths)), config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(str(paths.adapter))
    assert export_here(paths) == 0
    assert "100.0% of it merged" in capsys.readouterr().err
    ids = torch.arange(40)[None]
    merged = AutoModelForCausalLM.from_pretrained(paths.merged)(ids).logits
    torch.testing.assert_close(merged, model.eval()(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
def test_full_fine_tuning_is_copied(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path, plan={"adapter.kind": "full", "adapter.rank": None})
    model: Any = make_tiny(load_plan(paths))
    model.model.norm.weight.data *= 1.5
    for file in paths.adapter.iterdir():
        file.unlink()
    model.save_pretrained(str(paths.adapter))
    assert export_here(paths) == 0
    assert "no adapter to merge" in capsys.readouterr().err
    ids = torch.arange(40)[None]
    copied = AutoModelForCausalLM.from_pretrained(paths.merged)(ids).logits
    assert torch.equal(copied, model.eval()(ids).logits)
    assert (paths.merged / "tokenizer.json").is_file()


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
def test_quantized_training_is_merged_into_the_weights_that_it_computed_with(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = copy_run(trained, tmp_path, plan={"quantization": NF4})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("launcher.training.inference.load.round_to_nf4", double_norms)
    assert export_here(paths) == 0
    assert "trained on a base in NF4: merging into its dequantized weights" in capsys.readouterr().err
    merged, base = load_file(paths.merged / "model.safetensors"), load_file(trained.base / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    assert torch.equal(merged["model.norm.weight"], 2 * base["model.norm.weight"].float())


@pytest.mark.usefixtures("data_dir")
def test_quantized_training_needs_bitsandbytes(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = copy_run(trained, tmp_path, plan={"quantization": NF4})
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert export_here(paths) == 2
    error = capsys.readouterr().err
    assert "trained on a base in NF4 (QLoRA), which needs the package bitsandbytes" in error
    assert "pip install 'expert-launcher[cuda]'" in error
    assert not list_leftovers(paths)


def double_norms(base: Any, _dtype: torch.dtype, **_options: bool) -> None:
    base.model.norm.weight.data *= 2


def test_compared_rows_are_of_the_run(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    run, tokenizer = load_trained_run(trained.paths.root), load_tokenizer("launcher/tiny", ())
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(trained.data_dir))
    rows = pick_rows(run, tokenizer)
    assert len(rows) > 1
    assert sum(map(len, rows)) <= 512
    assert all(
        "<|im_start|>user\n" in tokenizer.backend.decode(row.tolist(), skip_special_tokens=False) for row in rows
    )
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path))
    (fixed,) = pick_rows(run, tokenizer)
    assert tokenizer.backend.decode(fixed.tolist(), skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_unknown_run_lists_existing_runs(trained: Trained) -> None:  # noqa: F811
    result = launcher(trained, "export", "b")
    assert result.returncode == 2
    assert "no run called 'b'\n  a: done\n" in result.stderr
    assert "Traceback" not in result.stderr
    elsewhere = run_python(["-m", "launcher", "export", "b", "--runs-dir", str(trained.data_dir)], trained)
    assert elsewhere.returncode == 2
    assert "has no runs" in elsewhere.stderr


def test_existing_target_is_not_touched(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    result = launcher(trained, "export", str(trained.paths.root), "--out", str(tmp_path))
    assert result.returncode == 2
    assert f"{tmp_path} already exists" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "words"),
    [("failed", "it failed after step 2"), ("stopped", "was stopped after step 2"), ("running", "it is still running")],
)
def test_run_without_weights_is_refused_with_the_reason(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: str,
    words: str,
) -> None:
    paths = copy_run(trained, tmp_path, outcome={"status": status, "steps_done": 2})
    paths.adapter.rename(tmp_path / "gone")
    assert export_here(paths) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "step-000003" in said


@pytest.mark.parametrize(
    ("plan", "words"), [({"random_weights": True}, "--random-weights"), ({"schema_version": 99}, "plan format 99")]
)
def test_untrained_runs_are_refused(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plan: dict[str, Any],
    words: str,
) -> None:
    assert export_here(copy_run(trained, tmp_path, plan=plan)) == 2
    assert words in capsys.readouterr().err


def test_incomplete_adapter_is_refused(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    paths = copy_run(trained, tmp_path)
    (paths.adapter / "adapter_model.safetensors").unlink()
    assert export_here(paths) == 2
    assert "adapter_model.safetensors is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("data_dir", "_few_compared_tokens")
def test_damaged_adapter_is_refused(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path)
    (paths.adapter / "adapter_model.safetensors").write_bytes(b"rubbish")
    assert export_here(paths) == 2
    assert "is not compatible with launcher/tiny" in capsys.readouterr().err
    assert list_leftovers(paths) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": "(.*)*(.*)*(.*)*x$"}, "not a valid adapter config"),
        ({"exclude_modules": "(a+)+$"}, "not a valid adapter config"),
        ({"rank_pattern": {"(a+)+$": 4}}, "not a valid adapter config"),
        ({"layers_pattern": ["(a+)+$"], "layers_to_transform": [0]}, "not a valid adapter config"),
        ({"peft_type": "../../x"}, "not a valid adapter config"),
        ({"r": 10**12}, "not a valid adapter config"),
        ({"r": [1]}, "not a valid adapter config"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "is not compatible with launcher/tiny"),
    ],
)
def test_hostile_adapter_config_is_refused_before_peft_reads_it(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
) -> None:
    paths = copy_run(trained, tmp_path)
    file = paths.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert export_here(paths) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "package"), [("export", "export"), pytest.param("ask", "inference", marks=pytest.mark.slow)]
)
def test_missing_package_is_named(trained: Trained, verb: str, package: str) -> None:  # noqa: F811
    script = (
        f"import sys; sys.modules['peft'] = None; from launcher.training.{package}.{verb} import main; "
        f"sys.exit(main(['--run={trained.paths.root}', *sys.argv[1:]]))"
    )
    more = ["--question=x"] if verb == "ask" else ["--out=nowhere"]
    result = run_python(["-c", script, *more], trained)
    assert result.returncode == 2, result.stderr
    assert f"{verb} needs packages that are not installed: peft" in result.stderr
    assert "expert-launcher[train]" in result.stderr


def logits(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(20, 300, generator=generator) for _ in range(2)]


def plus(*parts: list[Tensor]) -> list[Tensor]:
    return [torch.stack(tensors).sum(0) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize("copies", [0, 2])
def test_lost_small_change_is_detected_below_rounding(copies: int) -> None:
    """The change is a tenth of the tolerance for bf16 rounding."""
    base, change, noise = logits(1), logits(2, 0.002), logits(3, 0.01)
    expected = plus(base, change)
    right = compare_logits(plus(expected, noise), expected, base)
    check_agreement(right, "bf16")
    assert right.merged_share == pytest.approx(1, abs=0.2)
    wrong = compare_logits(plus(base, *[change] * copies, noise), expected, base)
    assert wrong.difference < 0.05
    message = "rounding the merged weights to bf16 loses" if copies == 0 else "differs from base and adapter"
    with pytest.raises(RunFailedError, match=message):
        check_agreement(wrong, "bf16")


def test_computing_in_fp32_upcasts_and_restores_weights(trained: Trained) -> None:  # noqa: F811
    model: Any = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.bfloat16).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [torch.arange(50)]
    (widened,) = compute_logits(model, rows, CPU)
    after = model.state_dict()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], before[name]) for name in before)
    with torch.inference_mode():
        narrow = model(rows[0][None]).logits[0].float()
        exact = model.float()(rows[0][None]).logits[0]
    # ARM has more than one kernel for the same product.
    assert float((widened - exact).norm() / exact.norm()) < 1e-5
    assert float((narrow - exact).norm() / exact.norm()) > 1e-3


def test_computing_in_fp32_restores_weights_after_an_error(trained: Trained) -> None:  # noqa: F811
    model: Any = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.bfloat16)
    with pytest.raises(IndexError), computing_in_fp32(model):
        model(torch.tensor([[10**6]]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_base_whose_rows_have_another_prompt_is_exported(tmp_path: Path) -> None:
    """DeepSeek R1 begins thoughts in the prompt, but does not write them before an answer."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_base(tmp_path, template=source, settings=settings)
    data = SimpleNamespace(prompt_template="tokenizer", end_token=None, chat_template=None, chat_template_file=None)
    run: Any = SimpleNamespace(plan=SimpleNamespace(data=data), trusts_code=False)
    merge._check_tokenizer(tmp_path, BaseTokenizer(folder=tmp_path), run)


def test_exported_tokenizer_gives_the_tokens_of_the_training(tmp_path: Path) -> None:
    """transformers 5 puts a space before a text for LlamaTokenizer, whatever tokenizer.json says; Yi has that class."""
    tokenizer = write_family(tmp_path / "base", FAMILIES["gemma"], tokenizer_class="LlamaTokenizer")
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer.folder)
    expected = tokenizer.backend.encode(PROMPT, add_special_tokens=False).ids
    assert loaded(PROMPT, add_special_tokens=False).input_ids != expected
    data = SimpleNamespace(prompt_template="tokenizer", end_token=None, chat_template=None, chat_template_file=None)
    run: Any = SimpleNamespace(plan=SimpleNamespace(data=data), trusts_code=False)
    (tmp_path / "out").mkdir()
    merge._write_tokenizer(tmp_path / "out", run, tokenizer)
    exported: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported(PROMPT, add_special_tokens=False).input_ids == expected
    assert exported.eos_token == tokenizer.end_of_text
    merge._check_tokenizer(tmp_path / "out", tokenizer, run)


@pytest.mark.parametrize("is_own", [False, True])
def test_exported_base_that_can_think_gets_the_prompt_of_the_training(tmp_path: Path, is_own: bool) -> None:
    """Without the option of their template, servers would ask it to think first."""
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_base(tmp_path / "base", template=THINKING, settings=settings)
    tokenizer = BaseTokenizer(folder=tmp_path / "base")
    own = THINKING if is_own else None
    data = SimpleNamespace(
        prompt_template="tokenizer", end_token=None, chat_template=own, chat_template_file="own.jinja" if own else None
    )
    run: Any = SimpleNamespace(plan=SimpleNamespace(data=data), trusts_code=False)
    (tmp_path / "out").mkdir()
    tokenizer.write_files(tmp_path / "out")
    merge._write_template(tmp_path / "out", run, tokenizer)
    merge._check_tokenizer(tmp_path / "out", tokenizer, run)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Is it?"}]
    prompts = [
        loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **options)
        for options in ({}, {"enable_thinking": True})
    ]
    assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts] == [True, False]
    tokenizer.write_files(tmp_path / "out")
    (tmp_path / "out" / "chat_template.jinja").unlink()
    with pytest.raises(RunFailedError, match="chat template gives a different prompt"):
        merge._check_tokenizer(tmp_path / "out", tokenizer, run)
