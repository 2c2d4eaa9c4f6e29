"""What `behaves` observes: functions, iterators, methods, errors, output, kinds of values, and what it cannot."""

from __future__ import annotations

import pytest

from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.typescript.judge import TypescriptJudge
from tests.unit.judges.typescript.typescript_rows import WRONG_ANSWERS, needs_compiler

pytest.importorskip("tree_sitter_typescript")
pytestmark = [pytest.mark.process, needs_compiler]

# Reference, a right answer in other words, wrong answers.
COMPARED: dict[str, tuple[str, str, list[str]]] = {
    "returned function": (
        "const adder = (a: number) => (b: number): number => a + b;",
        "function adder(a: number) { return function (b: number): number { return b + a; }; }",
        [
            "const adder = (a: number) => (b: number): number => a - b * 7;",
            "const adder = (a: number) => (b: number): number => { throw new Error('no'); };",
            "const adder = (a: number) => a as any;",
        ],
    ),
    "memoize": (
        "function memoize(f: (x: number) => number): (x: number) => number {\n"
        "  const seen = new Map<number, number>();\n"
        "  return (x) => { if (!seen.has(x)) { seen.set(x, f(x)); } return seen.get(x)!; };\n}",
        "const memoize = (f: (x: number) => number) => { const seen: Record<number, number> = {}; "
        "return (x: number): number => x in seen ? seen[x]! : (seen[x] = f(x)); };",
        ["const memoize = (f: (x: number) => number) => (x: number): number => { throw new Error('x'); };"],
    ),
    "curried": (
        "const three = (a: number) => (b: number) => (c: number): number[] => [a, b, c];",
        "const three = (a: number) => function (b: number) { return (c: number): number[] => [a].concat(b, c); };",
        ["const three = (a: number) => (b: number) => (c: number): number[] => [a, c, b];"],
    ),
    "functions in a tuple": (
        "function state(start: number): [() => number, (next: number) => void] {\n"
        "  let value = start;\n  return [() => value, (next) => { value = next; }];\n}",
        "function state(start: number): [() => number, (next: number) => void] {\n"
        "  const box = { v: start };\n  return [() => box.v, (next) => void (box.v = next)];\n}",
        [
            "function state(start: number): [() => number, (next: number) => void] { "
            "return [() => start + 1, () => undefined]; }"
        ],
    ),
    "generator": (
        "function* upTo(n: number): Generator<number> { for (let i = 0; i < n; i++) { yield i; } }",
        "function* upTo(n: number): Generator<number> { let i = 0; while (i < n) { yield i++; } }",
        [
            "function* upTo(n: number): Generator<number> { yield -1; }",
            "function* upTo(n: number): Generator<number> { for (let i = 0; i <= n; i++) { yield i; } }",
            "function upTo(n: number): number[] { return []; }",
            "function upTo(n: number): number[] { return n > 0 ? [...Array(Math.ceil(n)).keys()] : []; }",
        ],
    ),
    "endless generator": (
        "function* naturals(start: number): Generator<number> { for (let i = start; ; i++) { yield i; } }",
        "function* naturals(start: number): Generator<number> { let i = start; while (true) { yield i; i += 1; } }",
        ["function* naturals(start: number): Generator<number> { yield start; }"],
    ),
    "iterable": (
        "function evens(xs: number[]): Iterable<number> { return xs.filter((x) => x % 2 === 0); }",
        "function* evens(xs: number[]): Iterable<number> { for (const x of xs) { if (x % 2 === 0) yield x; } }",
        [
            "function evens(xs: number[]): Iterable<number> { return [][Symbol.iterator](); }",
            "function evens(xs: number[]): Iterable<number> { return new Set(xs); }",
        ],
    ),
    "async generator": (
        "async function* slow(xs: string[]): AsyncGenerator<string> { for (const x of xs) { yield x + '!'; } }",
        "async function* slow(xs: string[]): AsyncGenerator<string> { yield* xs.map((x) => `${x}!`); }",
        ["async function* slow(xs: string[]): AsyncGenerator<string> { for (const x of xs) { yield x; } }"],
    ),
    "methods": (
        "function counter(start: number): { inc(): number } { let n = start; return { inc() { n += 1; return n; } }; }",
        "function counter(start: number): { inc(): number } { return { inc: () => ++start }; }",
        [
            "function counter(start: number): { inc(): number } { return { inc: () => 42 }; }",
            "function counter(start: number): { inc(): number } { return { inc: () => start + 1 }; }",
        ],
    ),
    "promised methods": (
        "async function open(n: number): Promise<{ read(): Promise<number> }> { return { read: async () => n }; }",
        "async function open(n: number) { return { read(): Promise<number> { return Promise.resolve(n); } }; }",
        ["async function open(n: number) { return { read(): Promise<number> { return Promise.resolve(n + 1); } }; }"],
    ),
    "a value with methods": (
        "const api = { add(a: number, b: number): number { return a + b; }, name: 'api' };",
        "const api = { name: 'api', add: (a: number, b: number): number => b + a };",
        [
            "const api = { add(a: number, b: number): number { return a - b; }, name: 'api' };",
            "const api = { add(a: number, b: number): number { return a + b; }, name: 'ipa' };",
        ],
    ),
    "namespace": (
        "namespace Maths { export function twice(x: number): number { return x * 2; } }",
        "namespace Maths { export const twice = (x: number): number => x + x; }",
        ["namespace Maths { export function twice(x: number): number { return x; } }"],
    ),
    "static method": (
        "class Maths { static twice(x: number): number { return x * 2; } }",
        "class Maths { static twice = (x: number): number => x + x; }",
        ["class Maths { static twice(x: number): number { return x * 3; } }", "class Maths { }"],
    ),
    "accessor": (
        "class Box { #w = 1; get width(): number { return this.#w; } set width(w: number) { this.#w = Math.abs(w); } }",
        "class Box { private w = 1; get width(): number { return this.w; } "
        "set width(w: number) { this.w = w < 0 ? -w : w; } }",
        ["class Box { width: number = 1; }"],
    ),
    "instance": (
        "class Point { constructor(public x: number, public y: number) {} plus(o: { x: number; y: number }): Point { "
        "return new Point(this.x + o.x, this.y + o.y); } }",
        "class Point { x: number; y: number; constructor(x: number, y: number) { this.x = x; this.y = y; } "
        "plus({ x, y }: { x: number; y: number }): Point { return new Point(x + this.x, y + this.y); } }",
        [
            "class Point { constructor(public x: number, public y: number) {} plus(o: Point): Point { "
            "return { x: this.x + o.x, y: this.y + o.y } as Point; } }",
            "class Point { constructor(public x: number, public y: number) {} plus(o: Point): Point { "
            "return new Point(this.x, this.y); } }",
        ],
    ),
    "linked list": (
        "class Cell { next: Cell | null = null; constructor(public value: number) {} }\n"
        "function chain(xs: number[]): Cell | null { let head: Cell | null = null; "
        "for (const x of [...xs].reverse()) { const c = new Cell(x); c.next = head; head = c; } return head; }",
        "class Cell { value: number; next: Cell | null = null; constructor(v: number) { this.value = v; } }\n"
        "function chain(xs: number[]): Cell | null { return xs.reduceRight<Cell | null>((next, x) => "
        "Object.assign(new Cell(x), { next }), null); }",
        [
            "class Cell { next: Cell | null = null; constructor(public value: number) {} }\n"
            "function chain(xs: number[]): Cell | null { let head: Cell | null = null; "
            "for (const x of xs) { const c = new Cell(x); c.next = head; head = c; } return head; }"
        ],
    ),
    "printed": (
        "function log(xs: string[]): void { for (const x of xs) { console.log(x); } }",
        "function log(xs: string[]): void { xs.forEach((x) => console.info(`${x}`)); }",
        [
            "function log(xs: string[]): void { }",
            "function log(xs: string[]): void { for (const x of xs) { console.error(x); } }",
            "function log(xs: string[]): void { for (const x of xs) { console.log(x + ' '); } }",
            "function log(xs: string[]): void { console.log(xs); }",
        ],
    ),
    "printed on load": (
        "const names = ['a', 'b'];\nconsole.log(names.join());",
        "const names = ['a', 'b'];\nfor (const one of ['a,b']) { console.log(one); }",
        ["const names = ['a', 'b'];", "const names = ['a', 'b'];\nconsole.log('b,a');"],
    ),
    "only printed": ("console.log(1 + 1);", "console.log(2);", ["console.log(3);", "console.warn(2);"]),
    "returned error": (
        "function fail(m: string): Error { return new Error(m); }",
        "const fail = (m: string): Error => Error(m);",
        [
            "function fail(m: string): Error { return new TypeError(m); }",
            "function fail(m: string): Error { return new Error('other'); }",
        ],
    ),
    "thrown error": (
        "function check(n: number): number { if (n < 3) { throw new RangeError(`small: ${n}`); } return n; }",
        "function check(n: number): number { if (n >= 3) return n; throw new RangeError('small: ' + n); }",
        [
            "function check(n: number): number { if (n < 3) { throw 'small'; } return n; }",
            "function check(n: number): number { if (n < 3) { throw new Error(`small: ${n}`); } return n; }",
            "function check(n: number): number { if (n < 3) { throw new RangeError('large'); } return n; }",
            "function check(n: number): number { if (n < 3) { return n.toFixed(-1) as any; } return n; }",
        ],
    ),
    "always thrown": (
        "function refuse(why: string): never { throw new TypeError(why); }",
        "const refuse = (why: string): never => { throw TypeError(why); };",
        ["function refuse(why: string): never { throw new TypeError(); }"],
    ),
    "own error class": (
        "class Missing extends Error { "
        "constructor(public key: string) { super(`no ${key}`); this.name = 'Missing'; } }\n"
        "function need(all: Record<string, number>, key: string): number { "
        "if (!(key in all)) { throw new Missing(key); } return all[key]!; }",
        "class Missing extends Error { override name = 'Missing'; key: string; "
        "constructor(key: string) { super('no ' + key); this.key = key; } }\n"
        "function need(all: Record<string, number>, key: string): number { "
        "if (key in all) return all[key]!; throw new Missing(key); }",
        [
            "class Missing extends Error { constructor(public key: string) { super(`no ${key}`); } }\n"
            "function need(all: Record<string, number>, key: string): number { "
            "if (!(key in all)) { throw new Missing(key); } return all[key]!; }"
        ],
    ),
    "rejected": (
        "async function get(n: number): Promise<number> { if (n < 2) { throw new Error('low'); } return n; }",
        "function get(n: number): Promise<number> { "
        "return n < 2 ? Promise.reject(new Error('low')) : Promise.resolve(n); }",
        [
            "function get(n: number): Promise<number> { "
            "if (n < 2) { throw new Error('low'); } return Promise.resolve(n); }",
            "async function get(n: number): Promise<number> { if (n < 2) { throw new Error('high'); } return n; }",
            "function get(n: number): number { if (n < 2) { throw new Error('low'); } return n; }",
        ],
    ),
    "negative zero": (
        "function negate(x: number): number { return -x; }",
        "const negate = (x: number): number => x * -1;",
        ["const negate = (x: number): number => 0 - x;", "const negate = (x: number): number => -x || NaN;"],
    ),
    "undefined and missing": (
        "function pick(a?: string): { a?: string } { return a === undefined ? {} : { a }; }",
        "const pick = (a?: string): { a?: string } => ({ ...(a === undefined ? null : { a }) });",
        ["function pick(a?: string): { a?: string } { return { a }; }"],
    ),
    "kinds of values": (
        "function all(s: string): unknown[] { return [new Map([[s, 1]]), new Set([s]), new Date(0), /a/g, "
        "new Uint8Array([1]), 1n]; }",
        "const all = (s: string): unknown[] => [new Map<string, number>().set(s, 1), new Set<string>().add(s), "
        "new Date('1970-01-01'), new RegExp('a', 'g'), Uint8Array.of(1), BigInt(1)];",
        [
            "function all(s: string): unknown[] { return [new Map([[s, 2]]), new Set([s]), new Date(0), /a/g, "
            "new Uint8Array([1]), 1n]; }",
            "function all(s: string): unknown[] { return [new Map([[s, 1]]), [s], new Date(0), /a/g, "
            "new Uint8Array([1]), 1n]; }",
            "function all(s: string): unknown[] { return [new Map([[s, 1]]), new Set([s]), new Date(1), /a/g, "
            "new Uint8Array([1]), 1n]; }",
            "function all(s: string): unknown[] { return [new Map([[s, 1]]), new Set([s]), new Date(0), /a/, "
            "new Uint8Array([1]), 1n]; }",
            "function all(s: string): unknown[] { return [new Map([[s, 1]]), new Set([s]), new Date(0), /a/g, "
            "new Int8Array([1]), 1n]; }",
            "function all(s: string): unknown[] { return [new Map([[s, 1]]), new Set([s]), new Date(0), /a/g, "
            "new Uint8Array([1]), 1]; }",
        ],
    ),
    "frozen": (
        "function seal(x: { a: number }): Readonly<{ a: number }> { return Object.freeze({ ...x }); }",
        "const seal = (x: { a: number }): Readonly<{ a: number }> => Object.freeze(Object.assign({}, x));",
        ["function seal(x: { a: number }): Readonly<{ a: number }> { return { ...x }; }"],
    ),
    "changed argument": (
        "function clear(xs: number[]): void { xs.length = 0; }",
        "function clear(xs: number[]): void { xs.splice(0); }",
        ["function clear(xs: number[]): void { }", "function clear(xs: number[]): void { xs.pop(); }"],
    ),
    "called callback": (
        "function each(xs: number[], run: (x: number) => void): void { for (const x of xs) { run(x); } }",
        "const each = (xs: number[], run: (x: number) => void): void => xs.forEach((x) => run(x));",
        ["function each(xs: number[], run: (x: number) => void): void { }"],
    ),
    "timers": (
        "function later(run: (x: string) => void, ms: number): (x: string) => void { let id = 0; "
        "return (x) => { clearTimeout(id); id = setTimeout(() => run(x), ms); }; }",
        "function later(run: (x: string) => void, ms: number): (x: string) => void { let id: number | undefined; "
        "return function (x) { if (id !== undefined) clearTimeout(id); id = setTimeout(run, ms, x); }; }",
        ["function later(run: (x: string) => void, ms: number): (x: string) => void { return run; }"],
    ),
    "property names": (
        "interface P { a: string; b: number }",
        "type P = { b: number; a: string };",
        ['interface P { "a:string;b": number }', "interface P { a: string; b?: number }", "interface P extends Q {}"],
    ),
    "optional property": (
        "interface P { a?: string }",
        "type P = Partial<{ a: string }>;",
        [
            'interface P { "a?": string | undefined }',
            'interface P { "readonly a"?: string }',
            "interface P { a: string | undefined }",
        ],
    ),
    "type of a function": (
        "type F = (a: string, b?: number) => a is 'x';",
        "interface F { (first: string, second?: number): first is 'x' }",
        [
            "type F = (a: string, b: number | undefined) => a is 'x';",
            "type F = (a: string, b?: number) => boolean;",
            "type F = (a: string, ...b: number[]) => a is 'x';",
        ],
    ),
    "tuple": (
        "type T = readonly [string, number?];",
        "type T = Readonly<[string, number?]>;",
        ["type T = [string, number?];", "type T = readonly [string, number | undefined];"],
    ),
    "generic type": (
        "type Box<T extends object> = { value: T; all: T[] };",
        "interface Box<U extends object> { all: U[]; value: U }",
        ["type Box<T> = { value: T; all: T[] };", "type Box<T extends object> = { value: T; all: object[] };"],
    ),
    "wrapped function called again": (
        "function memoize(f: (a: number, b: number) => number): (a: number, b: number) => number {\n"
        "  const seen = new Map<string, number>();\n  return (a, b) => { const key = `${a},${b}`; "
        "if (!seen.has(key)) { seen.set(key, f(a, b)); } return seen.get(key)!; };\n}",
        "const memoize = (f: (a: number, b: number) => number) => { const seen: Record<string, number> = {}; "
        "return (a: number, b: number): number => (seen[JSON.stringify([a, b])] ??= f(a, b)); };",
        [
            "const memoize = (f: (a: number, b: number) => number) => (a: number, b: number): number => f(a, b);",
            "const memoize = (f: (a: number, b: number) => number) => { const seen: Record<number, number> = {}; "
            "return (a: number, b: number): number => (seen[a] ??= f(a, b)); };",
        ],
    ),
    "function called once": (
        "function once(f: () => number): () => number { let [done, v] = [false, 0]; "
        "return () => { if (!done) { v = f(); done = true; } return v; }; }",
        "const once = (f: () => number) => { let seen: { v: number } | undefined; "
        "return (): number => (seen ??= { v: f() }).v; };",
        ["const once = (f: () => number) => (): number => f();"],
    ),
    "function that fails at first": (
        "async function retry(f: () => Promise<number>, n: number): Promise<number> { "
        "for (let i = 0; ; i++) { try { return await f(); } catch (e) { if (i >= n) throw e; } } }",
        "async function retry(f: () => Promise<number>, n: number): Promise<number> { "
        "try { return await f(); } catch (e) { if (n <= 0) throw e; return retry(f, n - 1); } }",
        ["async function retry(f: () => Promise<number>, n: number): Promise<number> { return await f(); }"],
    ),
    "arguments that a callback ignores": (
        "const part = <T>(p: (x: T) => boolean) => (xs: T[]): T[][] => [xs.filter(p), xs.filter((x) => !p(x))];",
        "const part = <T>(p: (x: T) => boolean) => (xs: T[]): T[][] => "
        "{ const [a, b]: T[][] = [[], []]; for (const x of xs) { (p(x) ? a : b)!.push(x); } return [a!, b!]; };",
        ["const part = <T>(p: (x: T) => boolean) => (xs: T[]): T[][] => [xs.filter(p), xs.filter(p)];"],
    ),
    "every overload": (
        "function f(x: string): string;\nfunction f(x: number): number;\n"
        "function f(x: any): any { return typeof x === 'string' ? x + '!' : x + 1; }",
        "function f(x: string): string;\nfunction f(x: number): number;\n"
        "function f(x: any): any { return typeof x === 'number' ? 1 + x : `${x}!`; }",
        [
            "function f(x: string): string;\nfunction f(x: number): number;\n"
            "function f(x: any): any { return typeof x === 'string' ? x : x + 1; }"
        ],
    ),
    "wait": (
        "const sleep = (ms: number): Promise<void> => new Promise((done) => setTimeout(done, ms));",
        "async function sleep(ms: number): Promise<void> { "
        "await new Promise<void>((go) => { setTimeout(() => go(), ms); }); }",
        [
            "const sleep = async (ms: number): Promise<void> => {};",
            "const sleep = (s: number): Promise<void> => new Promise((done) => setTimeout(done, s * 1000));",
        ],
    ),
    "recency": (
        "class Cache { private m = new Map<string, number>(); constructor(private n: number) {}\n"
        "  get(key: string) { const v = this.m.get(key); "
        "if (v !== undefined) { this.m.delete(key); this.m.set(key, v); } return v; }\n"
        "  set(key: string, v: number) { this.m.delete(key); this.m.set(key, v); "
        "if (this.m.size > this.n) this.m.delete(this.m.keys().next().value!); } }",
        "class Cache { private m = new Map<string, number>(); private n: number; "
        "constructor(size: number) { this.n = size; }\n"
        "  get(k: string): number | undefined { if (!this.m.has(k)) { return undefined; } const v = this.m.get(k)!; "
        "this.m.delete(k); this.m.set(k, v); return v; }\n"
        "  set(k: string, v: number): void { this.m.delete(k); this.m.set(k, v); "
        "if (this.m.size > this.n) { const [first] = this.m.keys(); this.m.delete(first!); } } }",
        [
            "class Cache { private m = new Map<string, number>(); constructor(private n: number) {}\n"
            "  get(key: string) { return this.m.get(key); }\n"
            "  set(key: string, v: number) { this.m.delete(key); this.m.set(key, v); "
            "if (this.m.size > this.n) this.m.delete(this.m.keys().next().value!); } }"
        ],
    ),
    "squares of primes": (
        "function isPrime(n: number): boolean { if (n < 2) return false; "
        "for (let i = 2; i * i <= n; i++) { if (n % i === 0) return false; } return true; }",
        "const isPrime = (n: number): boolean => { if (n < 2) { return false; } let i = 2; "
        "while (i <= Math.sqrt(n)) { if (n % i++ === 0) { return false; } } return true; };",
        [
            "function isPrime(n: number): boolean { if (n < 2) return false; "
            "for (let i = 2; i * i < n; i++) { if (n % i === 0) return false; } return true; }"
        ],
    ),
    "case and order of letters": (
        "const same = (a: string, b: string): boolean => a.toLowerCase() === b.toLowerCase();\n"
        "const anagrams = (a: string, b: string): boolean => [...a].sort().join() === [...b].sort().join();",
        "function same(a: string, b: string) { return a.toUpperCase() === b.toUpperCase(); }\n"
        "function anagrams(a: string, b: string) { return [...b].sort().join('-') === [...a].sort().join('-'); }",
        [
            "const same = (a: string, b: string): boolean => a === b;\n"
            "const anagrams = (a: string, b: string): boolean => [...a].sort().join() === [...b].sort().join();",
            "const same = (a: string, b: string): boolean => a.toLowerCase() === b.toLowerCase();\n"
            "const anagrams = (a: string, b: string): boolean => a === b;",
        ],
    ),
    "words and punctuation": (
        "const words = (s: string): string[] => s.trim().split(/\\s+/);\n"
        "function mirrored(s: string): boolean { const t = s.toLowerCase().replace(/[^a-z0-9]/g, ''); "
        "return t === [...t].reverse().join(''); }",
        "const words = (s: string): string[] => s.trim().split(/ +/);\n"
        "function mirrored(s: string) { const t = s.toLowerCase().match(/[a-z0-9]/g) ?? []; "
        "return t.join('') === t.reverse().join(''); }",
        [
            "const words = (s: string): string[] => s.trim().split(' ');\n"
            "function mirrored(s: string): boolean { const t = s.toLowerCase().replace(/[^a-z0-9]/g, ''); "
            "return t === [...t].reverse().join(''); }",
            "const words = (s: string): string[] => s.trim().split(/\\s+/);\n"
            "function mirrored(s: string): boolean { return s === [...s].reverse().join(''); }",
        ],
    ),
    "guard of two properties": (
        "interface U { id: number; name: string }\nfunction isU(x: unknown): x is U "
        "{ return typeof x === 'object' && x !== null && 'id' in x && 'name' in x; }",
        "interface U { id: number; name: string }\nfunction isU(x: unknown): x is U "
        "{ return x instanceof Object && ['id', 'name'].every((key) => key in x); }",
        [
            "interface U { id: number; name: string }\nfunction isU(x: unknown): x is U "
            "{ return typeof x === 'object' && x !== null && 'id' in x; }"
        ],
    ),
    "symbol keys and several errors": (
        "const tagged = (n: number): object => ({ [Symbol.for('t')]: n });\n"
        "const failed = (n: number): Error => new AggregateError([new Error(`e${n}`)], 'all');",
        "function tagged(n: number): object { const o: Record<symbol, number> = {}; "
        "o[Symbol.for('t')] = n; return o; }\n"
        "function failed(n: number): Error { return new AggregateError([Error('e' + n)], 'all'); }",
        [
            "const tagged = (n: number): object => ({ [Symbol.for('t')]: -1 });\n"
            "const failed = (n: number): Error => new AggregateError([new Error(`e${n}`)], 'all');",
            "const tagged = (n: number): object => ({ [Symbol.for('t')]: n });\n"
            "const failed = (n: number): Error => new AggregateError([], 'all');",
        ],
    ),
    "mapped type": (
        "type M<T> = { readonly [K in keyof T]?: T[K] };",
        "type M<Row> = { readonly [Key in keyof Row]?: Row[Key] };",
        ["type M<T> = { [K in keyof T]?: T[K] };", "type M<T> = { readonly [K in keyof T]: T[K] };"],
    ),
    "mapped type of the library": (
        "interface I<T> { a: Partial<T> }",
        "type I<X> = { a: { [K in keyof X]?: X[K] } };",
        ["interface I<T> { a: Required<T> }", "interface I<T> { a: T }"],
    ),
    "recursive mapped type": (
        "type Deep<T> = { [K in keyof T]?: T[K] extends object ? Deep<T[K]> : T[K] };",
        "type Deep<X> = { [P in keyof X]?: X[P] extends object ? Deep<X[P]> : X[P] };",
        ["type Deep<T> = { [K in keyof T]?: T[K] };"],
    ),
    "conditional type": (
        "type Inner<T> = T extends Promise<infer U> ? U : 'T';",
        "type Inner<X> = X extends Promise<infer V> ? V : 'T';",
        ["type Inner<T> = T extends Promise<infer U> ? T : 1;", "type Inner<T> = T extends Promise<infer U> ? U : 1;"],
    ),
    "parts of a signature": (
        "type F = { make: abstract new () => object; on: (this: Date) => void; id: <const T>(x: T) => T };",
        "type F = { make: abstract new () => object; on: (this: Date) => void; id: <const U>(x: U) => U };",
        [
            "type F = { make: new () => object; on: (this: Date) => void; id: <const T>(x: T) => T };",
            "type F = { make: abstract new () => object; on: (this: string) => void; id: <const T>(x: T) => T };",
            "type F = { make: abstract new () => object; on: (this: Date) => void; id: <T>(x: T) => T };",
        ],
    ),
    "getter of a type": (
        "interface G { get x(): number }", "interface G { readonly x: number }", ["interface G { x: number }"]
    ),
}  # fmt: skip
# Rows that cannot be compared, whatever the answer.
NOT_JUDGED: dict[str, str] = {
    "input": "interface U { a: string }\nfunction f(m: WeakMap<object, string>): string { return ''; }",
    "result": "function f(): WeakSet<object> { return new WeakSet(); }",
    "untyped function": "function f(x: number): unknown { return () => x; }",
    "class": "function f(x: number): new () => object { return class { x = x; }; }",
    "unnamed export": "export default (x: number): number => x;",
    "nothing": "if (1 + 1 > 3) { throw new Error('no'); }",
    "always fails": "function f(x: number): number { return (x as any).a.b; }",
    "never settles": "function f(x: number): Promise<number> { return new Promise(() => undefined); }",
    "changes a prototype": "declare global { interface String { a(): string } }\n"
    "String.prototype.a = function () { return 'a'; };\nexport function f(s: string): string { return s.a(); }",
}


def ask(judge: TypescriptJudge, reference: str, answers: list[str]) -> list[Verdict]:
    row = ReferenceRow(instruction="Write it.", context="", reference=reference)
    return judge.judge([row] * len(answers), answers)


@pytest.fixture(scope="module")
def compared(judge: TypescriptJudge) -> dict[str, list[Verdict]]:
    """Verdicts on all answers of `COMPARED`, in few batches: the compiler loads its library once per batch."""
    answers = {name: [reference, right, *wrong] for name, (reference, right, wrong) in COMPARED.items()}
    rows = [
        ReferenceRow(instruction="Write it.", context="", reference=COMPARED[name][0])
        for name, given in answers.items()
        for _ in given
    ]
    verdicts = iter(judge.judge(rows, [answer for given in answers.values() for answer in given]))
    return {name: [next(verdicts) for _ in given] for name, given in answers.items()}


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_observed(compared: dict[str, list[Verdict]], name: str) -> None:
    wrong = COMPARED[name][2]
    first, second, *others = compared[name]
    assert (first.checks["behaves"], second.checks["behaves"]) == (True, True), (first.reason, second.reason)
    passed = [answer for answer, one in zip(wrong, others, strict=True) if one.checks["behaves"] is not False]
    assert passed == []


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_cannot_be_compared_is_not_judged_for_any_answer(judge: TypescriptJudge, name: str) -> None:
    reference = NOT_JUDGED[name]
    verdicts = ask(judge, reference, [reference, *WRONG_ANSWERS])
    assert [one.checks["behaves"] for one in verdicts] == [None] * len(verdicts)


MAP = "function lengths(xs: string[]): number[] {\n  return xs.map((x) => x.length);\n}"
WRONG_MAP = "export function lengths(xs: string[]): number[] { return []; }"
OUTSIDE = {
    "global": "declare global { interface Array<T> { map(f: (x: T) => unknown): string } }",
    "escaped": "decl\\u0061re global { interface Array<T> { map(f: (x: T) => unknown): string } }",
    "module": 'declare module "./reference0" { export function lengths(): string }',
    "library": '/// <reference lib="es2020" />',
    "types": '/// <reference types="node" />',
    "prototype": "Array.prototype.map = function () { return [] as any; };",
    "quiet prototype": "try { Array.prototype.map = function () { return [] as any; }; } catch { }",
    "reflection": "Reflect.set(Array.prototype, 'map', () => []);",
    "definition": "Object.defineProperty(Array.prototype, 'map', { value: () => [] });",
    "new property": "(Object.prototype as any).extra = 1;",
    "exported": "export = lengths;",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_answer_cannot_leave_the_count(judge: TypescriptJudge, name: str) -> None:
    """Neither a wrong answer nor a right one that reaches outside of its module is right or not judged."""
    answers = [f"{OUTSIDE[name]}\n{body}" for body in (WRONG_MAP, f"export {MAP}")]
    verdicts = ask(judge, MAP, [*answers, MAP])
    assert [one.checks["behaves"] for one in verdicts] == [False, False, True]


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_order(judge: TypescriptJudge) -> None:
    pairs = [(one[0], answer) for one in list(COMPARED.values())[:8] for answer in (one[1], *one[2])]
    pairs += [(MAP, f"{OUTSIDE[name]}\n{MAP}") for name in ("global", "prototype")]
    rows = [ReferenceRow(instruction="", context="", reference=reference) for reference, _ in pairs]
    forward = judge.judge(rows, [answer for _, answer in pairs])
    backward = judge.judge(rows[::-1], [answer for _, answer in pairs[::-1]])
    alone = [judge.judge([row], [answer])[0] for row, (_, answer) in zip(rows, pairs, strict=True)]
    assert forward == backward[::-1] == alone
