"""The parts of a manifest that describe a published expert. Training reads none; a slip in them is still told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from launcher.manifest.base import CommonNames, Open, Scalar, Strict

Fraction = Annotated[float, Field(ge=0, le=1)]
Counter = Annotated[int, Field(ge=0, le=10**12)]

Counts = dict[str, Scalar]


class Repository(Strict):
    type: Literal["git"]
    url: str


class RopeScaling(Strict):
    type: Literal["ntk-by-parts", "yarn", "dynamic", "linear"]
    factor: Annotated[float, Field(ge=1)]
    max_position_embeddings: Annotated[int, Field(ge=1)]
    original_max_position_embeddings: Annotated[int, Field(ge=1)]
    fine_grained: bool


class SoftPrompt(Strict):
    name: str
    path: str
    tokens: Annotated[int, Field(ge=1, le=512)]
    init_method: Literal["random", "text", "vocab_sample"] | None = None
    init_text: str | None = None
    purpose: str | None = None


class Limitation(Strict):
    pattern: str
    description: str
    example: str | None = None
    workaround: str | None = None


class Routing(Strict):
    keywords: tuple[str, ...]
    exclude_keywords: tuple[str, ...] = ()
    router_hint: str | None = None
    priority: Fraction | None = None


class Constraints(Strict):
    max_chain: Annotated[int, Field(ge=1)] | None = None
    load_order: Counter
    incompatible_with: tuple[str, ...]
    requires: tuple[str, ...]


class Performance(Strict):
    latency_ms_overhead: float
    vram_mb_overhead: float
    supported_batch_sizes: tuple[int, ...]


class Runtime(Strict):
    candle_compatible: bool | None = None
    requires_kv_cache_persistence: bool | None = None
    attention_kernel: Literal["sdpa", "flash-v1", "flash-v2", "xformers", "vanilla"] | None = None


class QualityMetrics(Open):
    benchmark_score: float | None = None
    base_model_score: float | None = None
    improvement_percent: float | None = None
    win_rate_vs_base: float | None = None
    test_queries: Counter | None = None
    training_steps: Counter | None = None
    checkpoint: str | None = None
    test_date: str | None = None
    success_rate: float | None = None
    sql_valid: str | None = None


MOST_TASK_ROWS = 2000  # of the validation split: a training shall not wait until millions are read


class Evaluation(Strict):
    test_cases: str | None = None
    suite: str | tuple[str, ...] | None = None
    metrics: Counts | tuple[str, ...] | None = None
    judge: str | None = None
    """Of the answers: json, sql, cypher, typescript, or package.module:Class; absent: by grammar_type, else by name."""
    judge_command: tuple[str, ...] = ()
    """A program instead of a judge of ours."""
    task_rows: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Held-out rows that are answered at each evaluation of a training; 0: none; absent: up to 64."""
    task_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Of a training's time that answering may take."""


class Integrity(Strict):
    timestamp: str
    public_key: str
    signature: str


class Decoding(Strict):
    """How the published expert generates text."""

    use_grammar: bool | None = None
    """Not used: grammars are not applied."""
    grammar_type: str | None = None
    """Names the judge where evaluation.judge is absent; grammars are not applied."""
    grammar_file: str | None = None
    """Not used: grammars are not applied."""
    validation: Literal["parser", "parser-strict", "tsc", "explain", "none"] | None = None
    """Not used: judges check answers."""
    validation_cmd: str | None = None
    """Not used: nothing in a manifest is run but judge_command."""
    stop_sequences: tuple[str, ...] = ()
    """Where an answer ends."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: greedy, and so without any of these."""
    top_p: Fraction | None = None
    """Sampling; given alone it means a temperature of 1."""
    top_k: Counter | None = None
    """Sampling; given alone it means a temperature of 1."""
    min_p: Fraction | None = None
    """Sampling; given alone it means a temperature of 1."""


class CheckpointSummary(Open):
    path: str | None = None
    step: Counter | None = None
    score: float | None = None
    win_rate: float | None = None
    best_for: tuple[str, ...] = ()


class Scenario(Open):
    total: Counter | None = None
    passed: Counter | None = None
    success_rate: float | None = None
    average_score: float | None = None
    metrics: (
        Annotated[Counts, CommonNames(("sql_valid", "keyword_coverage", "baseline_sql_valid", "baseline_keyword"))]
        | None
    ) = None
    categories: (
        Annotated[
            Counts,
            CommonNames(("ecommerce", "crm", "analytics", "filters", "reports", "joins", "aggregations", "practical")),
        ]
        | None
    ) = None
    strengths: tuple[str, ...] = ()
    weaknesses: tuple[str, ...] = ()
    notes: str | None = None


Scenarios = Annotated[
    dict[str, Scenario], CommonNames(("real_world_queries", "complex_scenarios", "sql_consistency_suite"))
]
Checkpoints = Annotated[
    dict[str, CheckpointSummary],
    CommonNames(("checkpoint-250", "checkpoint-500", "checkpoint-592", "checkpoint-638", "checkpoint-1250", "final")),
]
