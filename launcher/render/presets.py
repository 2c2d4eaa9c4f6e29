"""Presets for use without the launcher: accelerate_configs/*.yaml and ds_configs/*.json.

A preset belongs to no manifest, so batch and clipping are "auto": train.py fills them in for the processes it finds.

    python -m launcher.render.presets            write them, below the current directory
    python -m launcher.render.presets --check    list stale ones, and exit 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.core.choices import Offload, Strategy
from launcher.render.accelerate import render_accelerate
from launcher.render.deepspeed import render_deepspeed
from launcher.render.spec import LaunchSpec

ACCELERATE_FOLDER = "accelerate_configs"
DEEPSPEED_FOLDER = "ds_configs"
EXAMPLE = "launcher/train.py --manifest experts/neo4j/manifest.json"

TITLES: dict[Strategy, str] = {
    "single": "One process",
    "ddp": "DDP: every rank holds the whole model",
    "fsdp2": "FSDP2: parameters, gradients and optimizer state are sharded",
    "hsdp": "HSDP: sharded over the GPUs of a node as with FSDP2, replicated between nodes",
    "zero1": "DeepSpeed ZeRO-1: optimizer state is sharded",
    "zero2": "DeepSpeed ZeRO-2: optimizer state and gradients are sharded",
    "zero3": "DeepSpeed ZeRO-3: optimizer state, gradients and parameters are sharded",
}
OFFLOAD_TITLES: dict[Offload, str] = {
    "none": "",
    "optimizer": "; optimizer state lives in CPU memory",
    "optimizer_and_parameters": "; optimizer state and parameters live in CPU memory",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """An accelerate config file to generate; `deepspeed` names its file in ds_configs/, for any number of GPUs."""

    name: str
    strategy: Strategy
    gpus: int  # per node; 0: the CPU
    nodes: int = 1
    offload: Offload = "none"
    deepspeed: str | None = None

    @property
    def deepspeed_file(self) -> str | None:
        return None if self.deepspeed is None else f"{DEEPSPEED_FOLDER}/{self.deepspeed}.json"

    @property
    def spec(self) -> LaunchSpec:
        return LaunchSpec(
            strategy=self.strategy,
            offload=self.offload,
            mixed_precision="bf16" if self.gpus else "no",  # BF16 is emulated on most CPUs
            num_nodes=self.nodes,
            ranks_per_node=max(1, self.gpus),
            on_cpu=self.gpus == 0,
            layer_class=None,
            micro_batch_size="auto",
            gradient_accumulation_steps="auto",
            gradient_clipping="auto",
        )


def make_presets() -> tuple[Preset, ...]:
    """Return all presets: CPU, one GPU, and each strategy on 2, 4, 8 and 16 GPUs."""
    presets = [Preset(name="cpu", strategy="single", gpus=0), Preset(name="single_gpu", strategy="single", gpus=1)]
    plain: tuple[Strategy, ...] = ("ddp", "fsdp2")
    for strategy in plain:
        presets += [Preset(name=f"{strategy}_{gpus}gpu", strategy=strategy, gpus=gpus) for gpus in (2, 4, 8)]
        presets.append(Preset(name=f"{strategy}_2node_8gpu", strategy=strategy, gpus=8, nodes=2))
    presets.append(Preset(name="hsdp_2node_8gpu", strategy="hsdp", gpus=8, nodes=2))
    zero: tuple[tuple[str, Strategy, Offload], ...] = (
        ("zero1", "zero1", "none"),
        ("zero2", "zero2", "none"),
        ("zero2_offload", "zero2", "optimizer"),
        ("zero3", "zero3", "none"),
        ("zero3_offload", "zero3", "optimizer_and_parameters"),
    )
    for stem, strategy, offload in zero:
        for gpus in (2, 4, 8) if offload == "none" else (1, 2, 4, 8):
            name = f"{stem}_{gpus}gpu"
            presets.append(Preset(name=name, strategy=strategy, gpus=gpus, offload=offload, deepspeed=stem))
    presets.append(Preset(name="zero3_2node_8gpu", strategy="zero3", gpus=8, nodes=2, deepspeed="zero3"))
    return tuple(presets)


def render_presets() -> dict[str, str]:
    """Return the text of all presets by path relative to the project root."""
    texts: dict[str, str] = {}
    for preset in make_presets():
        texts[preset_path(preset)] = render_accelerate(
            preset.spec, deepspeed_config_file=preset.deepspeed_file, header=make_header(preset)
        )
        if preset.deepspeed_file is not None:
            texts[preset.deepspeed_file] = render_deepspeed(preset.spec)
    return dict(sorted(texts.items()))


def preset_path(preset: Preset) -> str:
    """Return the path of a preset relative to the project root."""
    return f"{ACCELERATE_FOLDER}/{preset.name}.yaml"


def make_header(preset: Preset) -> str:
    """Return the comment at the top of a preset."""
    where = f"{preset.gpus} GPU{'s' if preset.gpus > 1 else ''}" if preset.gpus else "the CPU"
    where += f" on each of {preset.nodes} nodes" if preset.nodes > 1 else ""
    precision = "BF16" if preset.gpus else "FP32"
    address = "--machine_rank RANK --main_process_ip HOST --main_process_port 29500 " if preset.nodes > 1 else ""
    lines = [
        f"{TITLES[preset.strategy]}{OFFLOAD_TITLES[preset.offload]}. {where[0].upper()}{where[1:]}, {precision}.",
        "Batch size, accumulation and clipping come from the manifest. In the project root"
        + (", on each node:" if preset.nodes > 1 else ":"),
        f"  accelerate launch --config_file {preset_path(preset)} {address}{EXAMPLE}",
        "Generated by `make configs`; changes made here are lost.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def find_stale(root: Path) -> tuple[str, ...]:
    """List files that differ from their preset, are missing, or belong to no preset."""
    texts = render_presets()
    files = (file for folder in (ACCELERATE_FOLDER, DEEPSPEED_FOLDER) for file in (root / folder).glob("*"))
    found = {str(file.relative_to(root)): file.read_bytes() for file in files if file.is_file()}
    expected = {path: text.encode() for path, text in texts.items()}
    return tuple(sorted(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the presets, or check them with --check."""
    parser = argparse.ArgumentParser(prog="python -m launcher.render.presets", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    options = parser.parse_args(arguments)
    root, known = Path.cwd(), render_presets()
    if not options.check:
        for path, text in known.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text.encode())
    stale = find_stale(root)
    for path in stale:
        print(f"{path}: stale; run `make configs`" if path in known else f"{path}: belongs to no preset; delete it")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
