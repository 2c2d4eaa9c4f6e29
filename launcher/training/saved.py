"""What was trained, as files: an adapter in PEFT's format, or the whole model under full fine-tuning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from peft import PeftModel

from launcher.paths import write_text_atomically
from launcher.training.loading import DTYPES
from launcher.training.run import Run


def save_trained(run: Run, folder: Path) -> None:
    """Safetensors. Written beside, then renamed: a folder that exists is whole."""
    scratch = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.mkdir(parents=True)
    model = run.engine.module.model
    if isinstance(model, PeftModel):
        model.save_pretrained(str(scratch))
        _name_base(scratch / "adapter_config.json", run)
    else:
        dtype = DTYPES[run.plan.precision.compute_dtype]
        state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        model.save_pretrained(str(scratch), state_dict=state)
    scratch.rename(folder)


def _name_base(config: Path, run: Run) -> None:
    """PEFT writes where the base lay on this machine; its name means something on others too."""
    values = json.loads(config.read_text(encoding="utf-8"))
    values["base_model_name_or_path"] = run.plan.base.name
    values["revision"] = run.plan.base_revision
    write_text_atomically(config, json.dumps(values, indent=2, sort_keys=True) + "\n")
