// Runs code that nobody trusts: a realm of its own for each, with the language and nothing else, for a bounded time.
// A line of JSON in: {code, names, cases}. A line out: {results} as text, or {failed}.
"use strict";

const readline = require("node:readline");
const vm = require("node:vm");

const MILLISECONDS = Number(process.argv[2]);
const MAX_TICKS = 200;
const MAX_CHARACTERS = 4_000_000;

// Becomes text: it lives in the realm of the code it runs, with its own Map, Promise and Error.
/* eslint-disable no-undef */
function realm() {
  const timers = [];
  let ids = 0;
  const later = (run, ms, ...a) => timers.push([Number(ms) || 0, (ids += 1), () => run(...a)]) && ids;
  const drop = (id) => timers.splice(0, timers.length, ...timers.filter((one) => one[1] !== id));
  const quiet = () => undefined;
  const console = { log: quiet, info: quiet, warn: quiet, error: quiet, debug: quiet };
  const clone = (value) => {
    if (typeof value !== "object" || value === null) return value;
    if (value instanceof Date) return new Date(value.getTime());
    if (value instanceof Map) return new Map([...value].map(clone));
    if (value instanceof Set) return new Set([...value].map(clone));
    if (Array.isArray(value)) return value.map(clone);
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, clone(part)]));
  };
  let seed = 1;
  Math.random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const Day = Date;
  const now = 1_700_000_000_000;
  const FixedDate = class Date extends Day {
    constructor(...a) {
      super(...(a.length > 0 ? a : [now]));
    }
    static now() {
      return now;
    }
  };
  Object.assign(globalThis, { console, setTimeout: later, setInterval: later, clearTimeout: drop, clearInterval: drop });
  Object.assign(globalThis, { queueMicrotask: (run) => void Promise.resolve().then(run), structuredClone: clone });
  globalThis.Date = FixedDate;
  for (const name of ["WebAssembly", "Atomics", "SharedArrayBuffer", "FinalizationRegistry"]) delete globalThis[name];

  // A value as JSON: what kind it is, and what it holds. A property that is undefined is as good as none.
  const show = (value, above = []) => {
    if (value === null || typeof value === "boolean") return value;
    if (typeof value === "string") return ["s", value];
    if (typeof value === "number") return ["n", Number.isFinite(value) ? value + 0 : String(value)];
    if (typeof value === "undefined") return ["u"];
    if (typeof value !== "object") return [typeof value, typeof value === "function" ? "" : String(value)];
    if (above.includes(value) || above.length > 30) return ["above"];
    const inner = (part) => show(part, [...above, value]);
    if (Array.isArray(value)) return ["a", value.map(inner)];
    if (value instanceof Map) return ["map", [...value].map(([key, part]) => [inner(key), inner(part)])];
    if (value instanceof Set) return ["set", [...value].map(inner)];
    if (value instanceof Day) return ["date", String(value.getTime())];
    if (value instanceof Error) return ["error"];
    if (value instanceof RegExp) return ["regexp", String(value)];
    const parts = Object.entries(value).filter(([, part]) => part !== undefined);
    return ["o", parts.map(([key, part]) => [key, inner(part)])];
  };

  // What inputs are made with.
  const hash = (value) => {
    let sum = 7;
    for (const char of JSON.stringify(show(value))) sum = (sum * 31 + char.charCodeAt(0)) % 1000003;
    return sum;
  };
  const choose = (given, made) => made[hash(given) % made.length]();
  const order = (one, other) => hash(one) - hash(other);
  const spoil = (value, dice) => {
    if (typeof value !== "object" || value === null) return dice % 2 ? [value] : String(value) + "!";
    const keys = Object.keys(value);
    const key = keys[dice % keys.length];
    if (dice % 4 === 0) delete value[key];
    else value[key] = [null, typeof value[key] === "string" ? 7 : "7", { a: 1 }][dice % 3];
    return value;
  };

  const ends = async (run) => {
    try {
      const value = run();
      const isPromise = value instanceof Promise;
      return [isPromise ? "later" : "now", show(await value)];
    } catch {
      return ["threw"];
    }
  };
  const runs = {
    value: async (one, found) => show(found),
    call: async (one, found) => {
      const given = one.make();
      const before = JSON.stringify(show(given));
      const end = await ends(() => found(...given));
      return [end, before === JSON.stringify(show(given)) ? null : show(given)];
    },
    class: async (one, Found) => {
      const object = new Found(...one.make());
      const told = [];
      for (const [name, make] of one.steps) told.push(await ends(() => object[name](...make())));
      return [told, one.shown.map((name) => show(object[name]))];
    },
  };
  const state = { results: [], isDone: false };
  const drive = async (found, cases) => {
    for (const one of cases) {
      try {
        state.results.push(await runs[one.kind](one, found[one.name]));
      } catch {
        state.results.push(["threw"]);
      }
    }
    state.isDone = true;
  };
  const tick = () => {
    timers.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
    timers.shift()?.[2]();
  };
  const tell = () => (state.isDone ? JSON.stringify(state.results) : "");
  return { drive, tick, tell, tools: { choose, order, spoil } };
}
/* eslint-enable no-undef */

const HARNESS = new vm.Script(`const harness = (${realm})();`);

function run({ code, names, cases }) {
  const context = vm.createContext(Object.create(null), {
    codeGeneration: { strings: false, wasm: false },
    microtaskMode: "afterEvaluate", // promises, too, are kept within the time
  });
  const evaluate = (text) => vm.runInContext(text, context, { timeout: MILLISECONDS });
  const found = names.map((name) => `get ${name}() { return ${name}; }`);
  HARNESS.runInContext(context);
  evaluate(`{
    const { choose, order, spoil } = harness.tools;
    const cases = ${cases};
    const found = (function () {
      "use strict";
      const harness = undefined;
      return (function () {
${code}
        return {${found}};
      })();
    })();
    void harness.drive(found, cases);
  }`);
  for (let ticks = 0; ticks < MAX_TICKS; ticks += 1) {
    const results = evaluate("harness.tell()");
    if (typeof results === "string" && results.length > MAX_CHARACTERS) return { failed: "makes too much" };
    if (typeof results === "string" && results !== "") return { results };
    evaluate("harness.tick()");
  }
  return { failed: "never ends" };
}

// Whoever got out of a realm would find these.
for (const name of ["binding", "_linkedBinding", "dlopen", "mainModule", "kill", "getBuiltinModule", "chdir", "report"]) {
  delete process[name];
}
for (const name of ["fetch", "WebSocket", "Worker", "EventSource", "require"]) delete globalThis[name];

process.stdout.write("ready\n");
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const start = Date.now();
  let reply;
  try {
    reply = run(JSON.parse(line));
  } catch {
    // What was thrown is not looked at: it could be anything.
    reply = { failed: Date.now() - start >= MILLISECONDS ? "takes too long" : "fails before anything is called" };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
});
