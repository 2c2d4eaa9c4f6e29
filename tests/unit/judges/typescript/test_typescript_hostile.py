"""Hostile TypeScript reaches no file, process or socket, ends in time and affects no other row."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.judges.typescript.judge import TypescriptJudge
from tests.unit.judges.typescript.typescript_rows import WRONG_ANSWERS, ask_about_films, needs_compiler

pytest.importorskip("tree_sitter_typescript")
pytestmark = [pytest.mark.process, needs_compiler]
DOUBLE = "function double(x: number): number {\n  return x * 2;\n}"
SECONDS = 1.5
SLOW = ("long sum", "garbage", "slow type")  # the compiler is given up twice; one of them is in the batch below
HOSTILE = {
    "import": 'import fs from "fs";\nfs.writeFileSync(TARGET, "x");',
    "require": 'declare function require(name: string): any;\nrequire("fs").writeFileSync(TARGET, "x");',
    "dynamic import": '(import("fs" as any) as any).then((fs: any) => fs.writeFileSync(TARGET, "x"), () => 0);',
    "error of an import": '(import("x" as any) as any).catch((e: any) => e.constructor.constructor("return 1")());',
    "process": "declare const process: any;\nprocess.exit(0);",
    "constructor": 'const p: any = (globalThis as any).constructor.constructor("return process")();\np.exit(1);',
    "this": "(function (this: any) { return this.constructor.constructor; }).call(globalThis)('return 1')();",
    "network": 'declare const fetch: any;\nfetch("http://127.0.0.1:9");',
    "endless": "while (true) {}",
    "endless promises": "async function spin() { for (;;) await null; }\nvoid spin();",
    "memory": "const all: number[][] = [];\nfor (;;) all.push(new Array(1e6).fill(1));",
    "buffers": "const all: any[] = [];\nfor (let i = 0; i < 10000; i++) all.push(new Uint8Array(1e8).fill(1));",
    "string": 'let s = "x";\nfor (;;) s += s + s.length;',
    "pattern": 'if (/^(a+)+$/.test("a".repeat(60) + "!")) throw 1;',
    "thrown": "throw { get code() { while (true) {} }, get message() { while (true) {} } };",
    "assembly": "new (globalThis as any).WebAssembly.Memory({ initial: 60000 });",
    "a file": '/// <reference path="/etc/passwd" />\n/// <reference lib="dom" />\nconst d = document;',
    "types of node": '/// <reference types="node" />\nprocess.exit(1);',
    "endless type": "type L<T> = T extends 0 ? never : L<[T, T]>;\ntype X = L<1>;",
    "large union": "type D = 0|1|2|3|4|5|6|7|8|9; type S = `${D}${D}${D}${D}${D}${D}`; const s: S = '1' as any;",
    "slow type": "type B<N extends number, A extends unknown[] = []> = A['length'] extends N ? A : B<N, [...A, 1]>;\n"
    "type Y = [...B<999>, ...B<999>]; type Z<T extends unknown[]> = { [K in keyof T]: { [J in keyof T]: [K, J] } };\n"
    "const z: Z<Y> = null as any; const w: Z<Y>[0] = z as never;",
    "deep": f"const a = {'[' * 40_000}{']' * 40_000};",
    "long sum": f"const a = 1{'+1' * 40_000};",
    "garbage": "a<b," * 20_000 + ")",
}
FOOLING = {
    "loop": "function double(x: number): number { while (true) {} }",
    "never": "function double(x: number): number { return new Promise(() => {}) as any; }",
    "stack": "function double(x: number): number { return double(x + 1); }",
    "timer": "function double(x: number): number { setInterval(() => 0, 1); return 7; }",
    "eval": 'function double(x: number): number { return eval("x * 2"); }',
    "Function": 'function double(x: number): number { return new Function("x", "return x * 2")(x); }',
    "JSON": '(Object.prototype as any).toJSON = () => 1;\nJSON.stringify = () => "[]";\n'
    + DOUBLE.replace("x * 2", "7"),
    "arrays": "(Array.prototype as any).map = () => [];\n(Array.prototype as any).push = () => 0;\n"
    + DOUBLE.replace("x * 2", "7"),
    "promises": "(Promise.prototype as any).then = undefined;\n" + DOUBLE.replace("x * 2", "7"),
    "number": "function double(x: number): number { return { valueOf: () => x * 2, toJSON: () => x * 2 } as any; }",
    "proxy": "function double(x: number): number { return new Proxy({}, { ownKeys() { while (true) {} } }) as any; }",
    "exit": "declare const process: any;\nfunction double(x: number): number { process.exit(0); return x * 2; }",
    "harness": "declare const harness: any;\nharness.drive = () => 0;\nharness.getResults = () => '[]';\n" + DOUBLE,
    "stack trace": "(Error as any).prepareStackTrace = (_: any, s: any) => "
    "s.map((c: any) => c.getThis()?.process?.exit(1));\n"
    "void new Error().stack;\n" + DOUBLE.replace("x * 2", "7"),
    "large": 'function double(x: number): number { return "x".repeat(2 ** 27) as any; }',
    "waiting": "function double(x: number): number { const t = Date.now(); while (Date.now() === t) {} return x * 2; }",
}

# An error of the host's realm: Node formats the stack of an error at the end of the stack.
ESCAPE = """
const found: any[] = [];
const dive = (): void => {
  try { dive(); } catch { }
  if (found.length > 0) return;
  try { void (new Error("x") as any).stack; } catch (e) { if (!(e instanceof Error)) found.push(e); }
};
dive();
const host: any = found[0];
const up = (value: any): any => Object.getPrototypeOf(value);
"""
ESCAPES = {
    "reached": f"{ESCAPE}if (host) throw host;\n{DOUBLE}",
    "polluted": f"{ESCAPE}if (host) up(up(up(host))).toJSON = () => 'spoiled';\n{DOUBLE}",
    "written": f"{ESCAPE}if (host) for (const name of ['handle', 'results', 'report', 'failed']) {{\n"
    "  Object.defineProperty(up(up(up(host))), name, { set() { while (true) {} }, get: () => '[]' });\n}\n" + DOUBLE,
}


@pytest.fixture(scope="module")
def judge() -> Iterator[TypescriptJudge]:
    """A judge with less time than the one of other modules."""
    with TypescriptJudge(seconds=SECONDS) as made:
        yield made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in HOSTILE]
)
def test_hostile_answer_fails_in_time_without_side_effects(judge: TypescriptJudge, name: str, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    answer = f"{HOSTILE[name]}\n{DOUBLE}".replace("TARGET", repr(str(target)))
    start = time.perf_counter()
    verdict = judge.judge([ask_about_films(DOUBLE)], [answer])[0]
    assert time.perf_counter() - start < 8 * SECONDS + 60  # tried twice, and processes are restarted
    assert verdict.checks["behaves"] is False
    assert verdict.checks["equal"] is False
    assert verdict.reason
    assert not target.exists()


@pytest.mark.parametrize("name", FOOLING)
def test_hostile_answer_does_not_manipulate_the_comparison(judge: TypescriptJudge, name: str) -> None:
    verdict = judge.judge([ask_about_films(DOUBLE)], [FOOLING[name]])[0]
    assert verdict.checks["types"] is True
    assert verdict.checks["behaves"] is False


def test_a_reference_that_never_ends_is_not_judged_for_any_answer(judge: TypescriptJudge) -> None:
    reference = "function f(x: number): number { while (true) { x += 1; } }"
    answers = [reference, *WRONG_ANSWERS]
    verdicts = judge.judge([ask_about_films(reference)] * len(answers), answers)
    assert [one.checks["behaves"] for one in verdicts] == [None] * len(answers)


def test_a_hostile_answer_harms_no_other_of_its_batch(judge: TypescriptJudge) -> None:
    bad = [f"{HOSTILE[name]}\n{DOUBLE}" for name in ("endless", "slow type")]
    answers = [answer for one in bad for answer in (DOUBLE, one)] + [DOUBLE]
    verdicts = judge.judge([ask_about_films(DOUBLE)] * len(answers), answers)
    assert [one.checks["behaves"] for one in verdicts] == [True, False] * len(bad) + [True]


@pytest.mark.parametrize("name", ESCAPES)
def test_an_answer_does_not_reach_the_host(judge: TypescriptJudge, name: str) -> None:
    """It does what the reference does, unless it reaches the host's realm, and then the next answer suffers."""
    other = DOUBLE.replace("x * 2", "x + x")
    verdicts = judge.judge([ask_about_films(DOUBLE)] * 3, [other, ESCAPES[name], other])
    assert [one.checks["behaves"] for one in verdicts] == [True, True, True]


def test_every_answer_has_a_process_of_its_own_without_network_and_secrets(
    judge: TypescriptJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "MARKED")
    with TypescriptJudge() as other:
        assert other._node is not None
        process = other._node._answers._get_ready()
        proc = Path(f"/proc/{process.pid}")
        if proc.exists():
            assert "MARKED" not in (proc / "environ").read_text()
            assert "Seccomp:\t2" in (proc / "status").read_text()
        process.close()
    assert judge._node is not None
    pids = set()
    for text in ("x + x", "2 * x", "x * 3 - x"):
        judge.judge([ask_about_films(DOUBLE)], [DOUBLE.replace("x * 2", text)])
        following = judge._node._answers._next
        pids.add(following.pid if following else 0)
    assert len(pids - {0}) == 3


def test_memory_stayed_within_its_bound(judge: TypescriptJudge) -> None:
    """Of the largest child so far, which the tests above have filled."""
    judge.judge([ask_about_films(DOUBLE)], [f"{HOSTILE['buffers']}\n{DOUBLE}"])
    judge.close()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20
