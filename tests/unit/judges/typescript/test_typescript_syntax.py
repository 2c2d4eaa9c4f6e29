"""Syntax by tree-sitter: errors are found, unusual syntax passes, formatting is ignored."""

from __future__ import annotations

import random
import re
import time

import pytest

from launcher.judges.typescript.node_compiler import CompilerInput, TypescriptNode
from launcher.judges.typescript.syntax import SourceReader, are_equal, read_source
from tests.unit.judges.typescript.typescript_rows import needs_compiler, sample

pytestmark = pytest.mark.process

pytest.importorskip("tree_sitter_typescript")
VALID = [
    "const a = <T,>(x: T) => x;",
    "abstract class A<T extends object = {}> { static #n = 0; declare y: string; accessor z = 1; "
    "constructor(private readonly x: T, public w?: number) {} abstract f(): void; get g() { return 1 } set g(v) {} "
    "static { A.#n++; } protected override async *gen(): AsyncGenerator<number> { yield* []; } }",
    "type X<T> = T extends (infer U extends string)[] ? `${Capitalize<U>}!` : never;",
    "type M = { readonly [K in keyof A as `get${string & K}`]-?: () => void };",
    'enum E { A = 1 << 2, B = "x".length }\nconst enum C { A }',
    "namespace N.Inner { export const x = 1 }",
    'declare module "x" { export default function f(): void; }\ndeclare global { interface Window { a: 1 } }',
    "let u: unique symbol; let t: [a: string, b?: number, ...rest: boolean[]];",
    "function f(this: Window, ...a: readonly string[]): asserts this is Window {}",
    "function over(a: string): void; function over(a: number): void; function over(a: any) {}",
    'const o = { async *[Symbol.iterator]() {}, "quoted key": 1, 0x10: 2, ...{} } as const satisfies {};',
    "label: for (const [k, { v = 1, ...r }] of new Map<string, any>()) { if (k) continue label; else break label }",
    "x!.y?.[0]?.(1) ?? (a ||= b) ** -1; x ??= 1_000n; a = b ? c : d ? e : f; a && (b = c);",
    'export type { X } from "./x"; import type Y, { type Z } from "y"; export * as ns from "z";',
    'import data from "./d.json" with { type: "json" };',
    "@dec() class D { @prop x = 1; @m() f(@p q: string) {} }",
    "for (let i = 0, n = 1; i < n; i++, n--); do ; while (0) ; if (a) ; else ;",
    "const re = /[/\\]]+(?<y>\\d{4})/giu, tpl = tag`a${`b${1}`}c`;",
    'try { throw new Error("x", { cause: 1 }) } catch { } finally { }',
    'let v = <any>x; let g = f<string>; type G = typeof f<string>; let k: typeof import("x");',
    "type Fn = new (...args: any[]) => object; type Abs = abstract new () => void;",
    "var of = 2, async = 3, type = 4, get = 5, as = 6, from = 7, declare = 8; async(); type; of = as",
    "export default async function* () {}",
    "interface In<T> extends A<{}>, B { (x: T): void; new (x: T): In<T>; readonly [k: string]: any; m?(): this }",
    "const big = 0b1010n + 0o17n + 0xFFn, s = 'it\\'s \\u{1F600} \\\ncont';",
    "if (a < b && c > d) e<f>(g); const h = a < (b >> c);",
    "async () => { for await (const x of y) await x }",
    "switch (a) { case 1: case 2: { break } default: }",
    "function g2<const T extends readonly unknown[]>(x: T) {}",
    "const [, second, , fourth = 1] = [, 2,];",
]


@pytest.mark.parametrize("text", VALID, ids=lambda text: text[:20])
def test_unusual_syntax_is_no_mistake(text: str) -> None:
    assert read_source(text).fault == ""


@pytest.mark.parametrize(
    "text", ["a && b = c;", "a + b %= c;", "f(, a);", "({ , a });", "let a = ;", "if (a {}", "let a = 'x"]
)
def test_broken_syntax_is_found(text: str) -> None:
    assert "TypeScript at line 1" in (fault := read_source(text).fault) or "is missing at line 1" in fault


@needs_compiler
def test_the_compiler_takes_what_the_tree_takes(compiler: TypescriptNode) -> None:
    looks = compiler.compile_all([CompilerInput(answer=text, reference="let a = 1;") for text in VALID])
    assert [look.syntax for look in looks if look.syntax] == []


@needs_compiler
@pytest.mark.parametrize("num_rows", [150, pytest.param(400, marks=pytest.mark.slow)])
def test_planted_syntax_errors_are_found_by_the_tree_as_by_the_compiler(
    compiler: TypescriptNode, num_rows: int
) -> None:
    """A sign deleted, inserted or replaced, or the end cut off; the compiler tells which of them are errors."""
    rng, rows = random.Random(7), []
    for row in sample("train", num_rows):
        text, given = row.reference, row.instruction.partition("\n\n")[2]
        place = rng.choice([match.start() for match in re.finditer(r"[(){}\[\]<>;:=,.`\"]", text)])
        mutants = (
            text[:place] + text[place + 1 :],
            text[:place] + rng.choice("(){}[]<>,.:;=") + text[place:],
            text[: rng.randrange(len(text) // 3, len(text) - 1)],
            text[:place] + rng.choice("@#$%^&*") + text[place + 1 :],
        )
        rows.append(CompilerInput(answer_given=given, answer=rng.choice(mutants), reference="0"))
    looks = [look for start in range(0, len(rows), 50) for look in compiler.compile_all(rows[start : start + 50])]
    faults = [read_source(row.answer).fault for row in rows]
    found = [bool(fault) for fault, look in zip(faults, looks, strict=True) if look.syntax]
    assert len(found) > 0.8 * num_rows
    assert sum(found) / len(found) >= 0.99
    whole = [fault for fault, look in zip(faults, looks, strict=True) if not look.syntax and not look.types]
    assert len(whole) > 0.05 * num_rows
    assert [fault for fault in whole if fault] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("const a = 'x'", 'const a = "x";'),
        ("f( a,b, )", "f(a, b);"),
        ("x => x", "(x) => x;"),
        ("let a = [1,2,]", "let a = [1, 2];"),
        ("type A = | 'x' | 'y'", 'type A = "x" | "y";'),
        ("interface A { a: 1, b?: 2 }", "interface A {\n  a: 1;\n  b?: 2;\n}"),
        ("let o = {'a': 1, \"b-c\": 2}", 'let o = { a: 1, "b-c": 2 };'),
        ("a // c\n/* d */ + b", "a + b"),
        ("'it\\'s'", '"it\'s"'),
        ("enum E { A, }", "enum E { A }"),
        ("function f<T,>(a: T,) {}", "function f<T>(a: T) {}"),
        ("'say \"a\"'", '"say \\"a\\""'),
    ],
)
def test_formatting_does_not_count(one: str, other: str) -> None:
    assert are_equal(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("function f() { return\nx }", "function f() { return x }"),
        ("a + b", "a - b"),
        ("`a b`", "`a  b`"),
        ("'a b'", "'a  b'"),
        ("[1, , 2]", "[1, 2]"),
        ("a.b", "a?.b"),
        ("x as A", "x"),
        ("let a", "const a"),
        ("f(a)", "f(b)"),
        ("'a'", "a"),
        ("`a`", "'a'"),
        ("for (;;a) {}", "for (;a;) {}"),
        ("type A = 'x' | 'y'", "type A = 'y' | 'x'"),
        ("async () => 1", "() => 1"),
        ("/a/g", "/a/"),
        ("if (a) { b } c", "if (a) { b; c }"),
        ("interface A { a?: 1 }", "interface A { a: 1 }"),
        ("[1,,]", "[1,]"),
    ],
)
def test_everything_else_counts(one: str, other: str) -> None:
    assert not are_equal(one, other)


@pytest.mark.parametrize("text", ["a<b," * 20_000 + ")", "[" * 40_000, "`${" * 30_000, "\0" * 90_000])
def test_a_long_text_is_read_within_a_bound(text: str) -> None:
    reader = SourceReader(seconds=1.0)
    start = time.perf_counter()
    assert reader.read(text).fault != ""
    assert reader.is_equal(text, "let a = 1;") is False
    assert time.perf_counter() - start < 60
    assert reader.read("let a = 1;").fault == ""
    reader.close()
