"""Compares the speed of `launcher prepare` with a usual preprocessing loop, and profiles it.

    python benchmarks/prepare.py                    # speed, profile, packing
    python benchmarks/prepare.py --memory 0.2 1.0   # peak memory for files of these sizes in GB; takes minutes

The loop tokenizes one row at a time with transformers' tokenizer, truncates it and builds its labels as lists.
`prepare` is measured completely: reading, templating, tokenizing, auditing, packing, writing, hashing and syncing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder

from launcher.corpus.bin_packing import pack_documents
from launcher.corpus.conversations import make_row_reader
from launcher.corpus.documents import DocumentBuilder, make_template
from launcher.corpus.pack_file import write_packs
from launcher.corpus.prepare import prepare
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import make_file_source
from launcher.corpus.spec import PreparationSpec, make_preparation_spec
from launcher.corpus.store import publish
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import tokenize_documents
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.manifest.dataset import FieldMapping
from launcher.request.request import Request, plan_request

TINY = ROOT / "launcher" / "base_models" / "tiny_base"
SHARED = ROOT.parent / "shared" / "data"
SHARED_FILES = {
    "json_instructions.jsonl": FieldMapping(text="text"),
    "text2cypher.jsonl": FieldMapping(instruction="question", input="schema", response="cypher"),
    "text2sql_questions.jsonl": FieldMapping(instruction="question", response="sql"),
}
GENERATED = FieldMapping(instruction="question", input="schema", response="cypher")
SEQUENCE_LENGTH = 2048
MEAN_TOKENS = 350
REPEATS = 3
_SAMPLE_SECONDS = 0.02

Result = TypeVar("Result")


class RowMaker:
    """Generator of text-to-code rows: questions, schemas and queries of random words with log-normal lengths."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        syllables = [a + b for a in "bcdfglmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "is", "on")]
        self._words = ["".join(self._dice.choices(syllables, k=self._dice.randint(1, 4))) for _ in range(5000)]
        # A few words are frequent, most are rare.
        self._weights = list(accumulate(1 / rank for rank in range(1, len(self._words) + 1)))

    def make(self, mean_words: float) -> dict[str, str]:
        count = max(12, round(self._dice.lognormvariate(math.log(mean_words) - 0.18, 0.6)))
        words = self._dice.choices(self._words, cum_weights=self._weights, k=count)
        asked, rest = words[: count // 8 + 4], words[count // 8 + 4 :]
        table, query = rest[: 3 * len(rest) // 4], rest[3 * len(rest) // 4 :]
        return {
            "question": f"Which {' '.join(asked)}?",
            "schema": "\n".join(f"(:{word.title()} {{{word}Id: INTEGER}})" for word in table),
            "cypher": " ".join(f"MATCH ({word[0]}:{word.title()}) WHERE {word[0]}.{word}Id > 7" for word in query),
        }


def write_rows(file: Path, maker: RowMaker, mean_words: float, *, rows: int | None = None, size: int = 0) -> None:
    written = count = 0
    with file.open("w") as lines:
        while count < rows if rows is not None else written < size:
            written += lines.write(json.dumps(maker.make(mean_words)) + "\n")
            count += 1


def find_mean_words(base: BaseTokenizer) -> float:
    """Return the words per row that give MEAN_TOKENS tokens with this tokenizer."""
    maker, words = RowMaker(0), 100.0
    texts = ["".join(maker.make(words).values()) for _ in range(500)]
    tokens = sum(len(encoding.ids) for encoding in base.backend.encode_batch(texts)) / len(texts)
    return words * MEAN_TOKENS / tokens


def write_manifest(folder: Path, file: Path, mapping: FieldMapping) -> Path:
    """Plan the neo4j expert on another file: packed sequences of 2,048 tokens, loss on the answers."""
    tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    mapped = mapping.model_dump(exclude_none=True)
    tree["training"]["dataset"] = {"path": str(file), "format": "jsonl", "field_mapping": mapped}
    tree["training"]["config"] |= {"evaluation_strategy": "no", "load_best_model_at_end": False}
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(tree))
    return manifest


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    file: Path
    mapping: FieldMapping
    base: BaseTokenizer

    def want(self, root: Path) -> PreparationSpec:
        manifest = write_manifest(root, self.file, self.mapping)
        planned = plan_request(Request(expert=str(manifest), base=str(self.base.folder), gpu="rtx4090"))
        return replace(make_preparation_spec(planned.plan, root, self.base), root=root)

    def maker(self, rows: Sequence[Row]) -> DocumentBuilder:
        reader = make_row_reader(self.mapping, list(rows[0].fields))
        return DocumentBuilder(reader=reader, template=make_template("chatml", self.base), trains_all=False)


def run_ours(case: Case, scratch: Path) -> tuple[int, int]:
    prepared = prepare(case.want(scratch), lambda _: None, lambda _: None)
    assert not prepared.was_cached
    return prepared.store.audit.num_rows, prepared.store.audit.num_tokens


def run_loop(case: Case, tokenizer: Any, *, masks_prompts: bool) -> tuple[int, int]:
    """Tokenize one row at a time; for a loss on answers only, the prompt is tokenized twice to know its length."""
    num_rows = num_tokens = 0
    maker: DocumentBuilder | None = None
    for row in make_file_source(case.file, "jsonl").read():
        assert isinstance(row, Row)
        maker = maker or case.maker([row])
        document = maker.make(row)
        num_rows += 1
        if isinstance(document, BadRow):
            continue
        text = "".join(segment.text for segment in document.segments)
        ids = tokenizer(text, truncation=True, max_length=SEQUENCE_LENGTH, add_special_tokens=False)["input_ids"]
        labels = list(ids)
        if masks_prompts:
            prompt = document.segments[0].text
            length = len(tokenizer(prompt, truncation=True, max_length=SEQUENCE_LENGTH)["input_ids"])
            labels = [-100] * length + ids[length:]
        num_tokens += len(labels)
    return num_rows, num_tokens


def timed(work: Callable[[], tuple[int, int]]) -> tuple[float, int, int]:
    started = time.perf_counter()
    num_rows, num_tokens = work()
    return time.perf_counter() - started, num_rows, num_tokens


def measure(case: Case, scratch: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(case.base.folder))
    ways: dict[str, Callable[[int], tuple[int, int]]] = {
        "ours": lambda turn: run_ours(case, scratch / f"{case.name}-{turn}"),
        "loop, labels on all": lambda _: run_loop(case, tokenizer, masks_prompts=False),
        "loop, labels on answers": lambda _: run_loop(case, tokenizer, masks_prompts=True),
    }
    results: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ways}
    for turn in range(REPEATS):  # interleaved, so that other load affects all alike
        for name, way in ways.items():
            results[name].append(timed(partial(way, turn)))
    ours = statistics.median(seconds for seconds, *_ in results["ours"])
    rows, tokens = results["ours"][0][1:]
    print(f"\n{case.name}: {rows:,} rows, {tokens / rows:.0f} tokens each (median of {REPEATS})")
    for name, runs in results.items():
        seconds = statistics.median(seconds for seconds, *_ in runs)
        rows, tokens = runs[0][1:]
        print(
            f"  {name:24} {seconds:7.2f} s {rows / seconds:10,.0f} rows/s {tokens / seconds:12,.0f} tokens/s"
            f"   ours is {seconds / ours:4.1f} times as fast"
        )


@dataclass
class Stages:
    """Wall and CPU seconds per stage; CPU seconds of all cores."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, work: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        before = self.seconds.get(name, (0.0, 0.0))
        self.seconds[name] = (before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu)
        return result


def profile(case: Case, scratch: Path) -> None:
    """Run the stages sequentially, without the overlap of `prepare`, which is limited by the longest."""
    scratch.mkdir()
    stages = Stages()
    rows = stages.add("reading", lambda: list(make_file_source(case.file, "jsonl").read()))
    good = [row for row in rows if isinstance(row, Row)]
    maker = case.maker(good)
    made = stages.add("templating", lambda: [maker.make(row) for row in good])
    documents = [document for document in made if not isinstance(document, BadRow)]
    texts = [segment.text for document in documents for segment in document.segments]
    backend, encoder = case.base.backend, TextEncoder(case.base, maker.template)
    stages.add(
        "tokenizing, all in Rust",
        lambda: [
            backend.encode_batch_fast(texts[start : start + 2048], add_special_tokens=False)
            for start in range(0, len(texts), 2048)
        ],
    )
    whole = stages.add("tokenizing by pieces", lambda: list(tokenize_documents(documents, encoder, SEQUENCE_LENGTH)))
    end = backend.token_to_id("<|im_end|>")
    assert end is not None
    with TokenSpool(scratch, "train", end) as spool:
        for batch in whole:
            stages.add("spooling and hashing", partial(spool.add, batch))
        packing = stages.add("packing", lambda: pack_documents(spool.lengths, SEQUENCE_LENGTH, 0))
        stages.add("writing", lambda: write_packs(scratch / "train.arrow", spool, packing))
    spool.remove()
    (scratch / "audit.json").write_text("{}")
    stages.add("hashing and syncing", lambda: publish(scratch, scratch.parent, "benchmark", {"part": scratch.name}))
    print(f"\nWhere the time goes ({case.name}), each stage alone:")
    for name, (wall, cpu) in stages.seconds.items():
        print(f"  {name:24} {wall:7.2f} s, of all cores {cpu:6.2f} s {1e6 * wall / len(documents):9.1f} us a row")


def measure_packing() -> None:
    generator = np.random.Generator(np.random.Philox(key=7))
    print("\nPacking 100,000 lengths into sequences of 2,048 (median of 3, one core):")
    shapes = {
        "log-normal, mean 350": np.clip(generator.lognormal(5.68, 0.6, 100_000), 8, 2048),
        "real mix, mean 140": np.clip(generator.lognormal(4.8, 0.5, 100_000), 8, 2048),
        "narrow, about 128": np.clip(generator.normal(128, 4, 100_000), 8, 2048),
        "uniform, 1 to 2,048": generator.integers(1, 2049, 100_000),
        "long, mean 1,400": np.clip(generator.normal(1400, 200, 100_000), 8, 2048),
    }
    for name, values in shapes.items():
        lengths = values.astype(np.int32)
        runs = []
        for _ in range(REPEATS):
            started = time.process_time()
            packing = pack_documents(lengths, SEQUENCE_LENGTH, 0)
            runs.append(time.process_time() - started)
        share = int(lengths.sum(dtype=np.int64)) / (packing.num_packs * SEQUENCE_LENGTH)
        print(f"  {name:24} {statistics.median(runs):6.2f} s   {100 * share:6.2f} % of positions used")


def measure_memory(gigabytes: float, base: BaseTokenizer, folder: Path) -> None:
    """Measure a separate process. Only anonymous memory counts; page cache can be dropped."""
    file = folder / "train.jsonl"
    write_rows(file, RowMaker(1), find_mean_words(base), size=round(gigabytes * 1e9))
    manifest = write_manifest(folder, file, GENERATED)
    command = [sys.executable, "-m", "launcher", "prepare", str(manifest), "--json"]
    command += ["--gpu", "rtx4090", "--base", str(base.folder)]
    environment = make_environment(LAUNCHER_DATA_DIR=str(folder))
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}
    while process.poll() is None:
        for name, kilobytes in _read_status(process.pid):
            peaks[name] = max(peaks.get(name, 0), kilobytes)
        time.sleep(_SAMPLE_SECONDS)
    stdout, stderr = process.communicate()
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(stderr)
    audit = json.loads(stdout)["audit"]["splits"]
    tokens = sum(split["num_tokens"] for split in audit.values())
    print(
        f"  {file.stat().st_size / 1e9:5.2f} GB of JSONL, {tokens:,} tokens in {seconds:.0f} s "
        f"({tokens / seconds:,.0f} tokens/s): {peaks['RssAnon'] / 1e6:.2f} GB of its own, "
        f"{peaks['VmRSS'] / 1e6:.2f} GB with mapped files"
    )
    shutil.rmtree(folder)


def _read_status(pid: int) -> Iterator[tuple[str, int]]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "VmRSS"):
            yield name, int(value.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="generated rows (default 20,000)")
    parser.add_argument("--base", type=Path, default=TINY, help="folder with tokenizer.json (default: the tiny base)")
    parser.add_argument(
        "--memory", type=float, nargs="+", metavar="GB", help="measure memory, for files of these sizes"
    )
    arguments = parser.parse_args()
    base = BaseTokenizer(folder=arguments.base)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; tokenizer of {base.backend.get_vocab_size():,} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        if arguments.memory:
            print("\nPeak memory while preparing:")
            for number, gigabytes in enumerate(arguments.memory):
                place = Path(folder, str(number))
                place.mkdir()
                measure_memory(gigabytes, base, place)
            return
        file = Path(folder, "generated.jsonl")
        write_rows(file, RowMaker(1), find_mean_words(base), rows=arguments.rows)
        generated = Case(name="generated", file=file, mapping=GENERATED, base=base)
        shared = [
            Case(name=name.removesuffix(".jsonl"), file=SHARED / name, mapping=mapping, base=base)
            for name, mapping in SHARED_FILES.items()
            if (SHARED / name).is_file()
        ]
        for case in (generated, *shared):
            measure(case, Path(folder))
        profile(generated, Path(folder, "profile"))
        measure_packing()


if __name__ == "__main__":
    main()
