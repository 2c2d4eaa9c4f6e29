"""Targets of fuzzing besides run directories: manifests, rows, judges and checkpoints."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
import traceback
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.core.errors import LauncherError
from launcher.corpus.conversations import make_row_reader
from launcher.corpus.rows import Row
from launcher.corpus.sources import make_file_source
from launcher.judges.base import Judge, ReferenceRow
from launcher.judges.external_command import CommandJudge
from launcher.judges.registry import open_judge_by_name
from launcher.manifest.dataset import FieldMapping
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, expert_manifests
from tests.fuzz.mutate import ABSURD, mutate_text, replace_file
from tests.fuzz.run_directory import time_limit


class ManifestFuzzer:
    """Damaged manifests are planned, or refused with a message."""

    name = "manifest"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts = [file.read_text() for file in expert_manifests()]

    def run_case(self, rng: random.Random) -> str:
        """Return what is wrong, empty if nothing is."""
        folder = self._folder / "mine"
        folder.mkdir(exist_ok=True)
        file = folder / "manifest.json"
        if rng.random() < 0.1:
            replace_file(file, rng)
        else:
            file.unlink(missing_ok=True) if not file.is_dir() else file.rmdir()
            file.write_bytes(mutate_text(rng.choice(self._texts), rng))
        gpu = rng.choice((None, "rtx4090", "h100"))
        request = Request(expert=str(file), gpu=gpu, gpus_per_node=rng.choice((1, 8)) if gpu else None)
        return _find_problem(lambda: plan_request(request))


class RowsFuzzer:
    """Damaged data files are read row by row, or refused with a message."""

    name = "rows"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        samples = [file.parent / "sample/train.jsonl" for file in expert_manifests()]
        lines = [sample.read_text().splitlines()[:6] for sample in samples]
        self._rows = [[json.loads(line) for line in part] for part in lines]
        chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
        self._rows.append(chat)

    def run_case(self, rng: random.Random) -> str:
        """Return what is wrong, empty if nothing is."""
        suffix = rng.choice(("jsonl", "jsonl", "json", "csv", "parquet"))
        file = self._folder / f"rows.{suffix}"
        rows = rng.choice(self._rows)
        data = self._write(rows, suffix, rng)
        file.unlink(missing_ok=True) if not file.is_dir() else file.rmdir()
        if rng.random() < 0.05:
            replace_file(file, rng, has_limit=False)
        else:
            file.write_bytes(data)
        return _find_problem(lambda: self._read(file))

    def _write(self, rows: list[dict[str, Any]], suffix: str, rng: random.Random) -> bytes:
        if suffix == "jsonl":
            return mutate_text("".join(json.dumps(row) + "\n" for row in rows), rng)
        if suffix == "json":
            return mutate_text(json.dumps(rows), rng)
        if suffix == "csv":
            text = ",".join(rows[0]) + "\n" + "".join(",".join(map(json.dumps, row.values())) + "\n" for row in rows)
            return _damage_bytes(text.encode(), rng)
        return _damage_bytes(self._parquet, rng)

    @cached_property
    def _parquet(self) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        file = self._folder / "clean.parquet"
        parquet.write_table(pa.table({"text": ["a", "b"], "object": ["{}", "{}"], "when": [1, 2]}), str(file))
        return file.read_bytes()

    def _read(self, file: Path) -> None:
        rows = [row for row in make_file_source(file, None).read() if isinstance(row, Row)]
        fields = list(dict.fromkeys(name for row in rows for name in row.fields))
        reader = make_row_reader(FieldMapping(), fields)
        for row in rows:
            reader.read(row)


class JudgesFuzzer:
    """Damaged answers and references never raise; a broken command of the user's is an error with a message."""

    name = "judges"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._judges: dict[str, Judge] = {name: open_judge_by_name(name) for name in ("json", "sql", "cypher")}
        experts = {"json": "json", "sql": "sql", "cypher": "neo4j"}
        self._rows = {name: list(self._load(expert)) for name, expert in experts.items()}

    def _load(self, expert: str) -> list[ReferenceRow]:
        lines = (ROOT / "experts" / expert / "sample/test.jsonl").read_text().splitlines()[:30]
        rows = []
        for line in lines:
            question, context, answer = [str(value) for value in json.loads(line).values()][:3]
            rows.append(ReferenceRow(instruction=question, context=context, reference=answer))
        return rows

    def run_case(self, rng: random.Random) -> str:
        """Return what is wrong, empty if nothing is."""
        if rng.random() < 0.1:
            return self._run_command(rng)
        name = rng.choice(sorted(self._judges))
        row = rng.choice(self._rows[name])
        answer = _damage_text(row.reference, rng)
        if rng.random() < 0.2:
            row = ReferenceRow(
                instruction=row.instruction,
                context=_damage_text(row.context, rng),
                reference=_damage_text(row.reference, rng),
            )
        return _find_problem(lambda: self._judges[name].judge([row], [answer]), may_refuse=False)

    def _run_command(self, rng: random.Random) -> str:
        reply = mutate_text('{"right": true, "reason": "a"}\n', rng)
        (self._folder / "reply").write_bytes(reply)
        program = f"import sys; sys.stdout.buffer.write(open({str(self._folder / 'reply')!r}, 'rb').read())"
        commands = [[sys.executable, "-c", program], [str(self._folder / "reply")], ["/"], ["\0"], ["nowhere"]]
        judge = CommandJudge(rng.choices(commands, (8, 1, 1, 1, 1))[0])
        row = ReferenceRow(instruction="a", context="", reference="b")
        return _find_problem(lambda: judge.judge([row], ["c"]))

    def close(self) -> None:
        for judge in self._judges.values():
            judge.close()


class CheckpointFuzzer:
    """Damaged checkpoints, with the hashes of their files put right, are skipped or refused by a resume."""

    name = "checkpoints"

    def __init__(self, folder: Path) -> None:
        from launcher.training.checkpoint.resume import ResumeOptions, resume_run
        from launcher.training.observers.best_checkpoint import BestCheckpoint
        from launcher.training.observers.checkpointer import Checkpointer
        from tests.training.builders import build, make_plan, make_uneven_packs, vary, write_base, write_store

        plan = vary(make_plan(write_base(folder / "base")), {"schedule.max_steps": 2, "schedule.save_every_steps": 1})
        self._run = build(plan, write_store(folder / "store", make_uneven_packs()), folder / "run")
        from launcher.training.loop import train

        train(self._run, Checkpointer(BestCheckpoint(plan.schedule)))
        self._clean = folder / "clean"
        shutil.copytree(self._run.paths.checkpoints, self._clean)
        self._resume = lambda: resume_run(self._run, ResumeOptions(allow_changed_inputs=True))

    def run_case(self, rng: random.Random) -> str:
        """Return what is wrong, empty if nothing is."""
        from launcher.runs.checkpoints import hash_file

        folder = self._run.paths.checkpoints
        shutil.rmtree(folder)
        shutil.copytree(self._clean, folder)
        newest = folder / "step-000002"
        manifest = newest / "checkpoint.json"
        if rng.random() < 0.5:
            manifest.write_bytes(mutate_text(manifest.read_text(), rng))
        else:
            file = rng.choice(sorted(newest.glob("*.safetensors")))
            if rng.random() < 0.2:
                replace_file(file, rng)
            else:
                file.write_bytes(_damage_safetensors(file.read_bytes(), rng))
                tree = json.loads(manifest.read_text())
                tree["files"][file.name] = hash_file(file).model_dump()
                manifest.write_text(json.dumps(tree))
        return _find_problem(self._resume)


def _damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a safetensors file, or any byte."""
    if rng.random() < 0.3:
        return _damage_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = mutate_text(data[8 : 8 + size].decode(), rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _damage_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(len(changed))]) if rng.random() < 0.3 else bytes(changed)


def _damage_text(text: str, rng: random.Random) -> str:
    """Insert, delete or repeat parts of a text."""
    extra = (
        "(",
        ")",
        "[" * 500,
        "(" * 3000,
        "'",
        '"',
        "`",
        "\0",
        "\ud800",
        "\u2028",
        "\x85",
        "\n",
        ";",
        "--",
        "/*",
        "*",
    )
    for _ in range(rng.choice((1, 1, 2, 6))):
        at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + rng.choice(extra) + text[at:]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            text = text[:at] + text[at:end] * rng.choice((2, 50)) + text[end:]
        elif kind == 3:
            text = text[:at] + str(rng.choice(ABSURD)) + text[at:]
        else:
            words = text.split(" ")
            rng.shuffle(words)
            text = " ".join(words)
        text = text[:20_000]
    return text


def _find_problem(action: Any, *, may_refuse: bool = True) -> str:
    try:
        with time_limit(), contextlib.suppress(*((LauncherError,) if may_refuse else ())):
            action()
    except Exception:
        return traceback.format_exc()[-2500:]
    return ""
