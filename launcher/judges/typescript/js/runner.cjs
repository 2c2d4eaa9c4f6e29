// Runs untrusted code in a separate realm with a timeout, without any API except the language itself.
// Reads one JSON line, {code, names, cases}, and writes {results} as text, or {failed}.
"use strict";

const readline = require("node:readline");
const vm = require("node:vm");

const MILLISECONDS = Number(process.argv[2]);
const MAX_TICKS = 200;
const MAX_CHARACTERS = 4_000_000;

// Converted to source text and evaluated in the realm of the code, with that realm's Map, Promise and Error.
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

  // Serializes a value as JSON with its kind. Undefined properties are ignored.
  const serialize = (value, above = []) => {
    if (value === null || typeof value === "boolean") return value;
    if (typeof value === "string") return ["s", value];
    if (typeof value === "number") return ["n", Number.isFinite(value) ? value + 0 : String(value)];
    if (typeof value === "undefined") return ["u"];
    if (typeof value !== "object") return [typeof value, typeof value === "function" ? "" : String(value)];
    if (above.includes(value) || above.length > 30) return ["above"];
    const inner = (part) => serialize(part, [...above, value]);
    if (Array.isArray(value)) return ["a", value.map(inner)];
    if (value instanceof Map) return ["map", [...value].map(([key, part]) => [inner(key), inner(part)])];
    if (value instanceof Set) return ["set", [...value].map(inner)];
    if (value instanceof Day) return ["date", String(value.getTime())];
    if (value instanceof Error) return ["error"];
    if (value instanceof RegExp) return ["regexp", String(value)];
    const parts = Object.entries(value).filter(([, part]) => part !== undefined);
    return ["o", parts.map(([key, part]) => [key, inner(part)])];
  };

  // Helpers of generated inputs.
  const hash = (value) => {
    let sum = 7;
    for (const char of JSON.stringify(serialize(value))) sum = (sum * 31 + char.charCodeAt(0)) % 1000003;
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

  const settle = async (run) => {
    try {
      const value = run();
      const isPromise = value instanceof Promise;
      return [isPromise ? "later" : "now", serialize(await value)];
    } catch {
      return ["threw"];
    }
  };
  const runs = {
    value: async (one, declared) => serialize(declared),
    call: async (one, declared) => {
      const given = one.make();
      const before = JSON.stringify(serialize(given));
      const end = await settle(() => declared(...given));
      return [end, before === JSON.stringify(serialize(given)) ? null : serialize(given)];
    },
    class: async (one, Declared) => {
      const object = new Declared(...one.make());
      const outcomes = [];
      for (const [name, make] of one.steps) outcomes.push(await settle(() => object[name](...make())));
      return [outcomes, one.shown.map((name) => serialize(object[name]))];
    },
  };
  const state = { results: [], isDone: false };
  const drive = async (declared, cases) => {
    for (const one of cases) {
      try {
        state.results.push(await runs[one.kind](one, declared[one.name]));
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
  const getResults = () => (state.isDone ? JSON.stringify(state.results) : "");
  return { drive, tick, getResults, tools: { choose, order, spoil } };
}
/* eslint-enable no-undef */

const HARNESS = new vm.Script(`const harness = (${realm})();`);

function run({ code, names, cases }) {
  const context = vm.createContext(Object.create(null), {
    codeGeneration: { strings: false, wasm: false },
    microtaskMode: "afterEvaluate", // the timeout covers promises, too
  });
  const evaluate = (text) => vm.runInContext(text, context, { timeout: MILLISECONDS });
  const declared = names.map((name) => `get ${name}() { return ${name}; }`);
  HARNESS.runInContext(context);
  evaluate(`{
    const { choose, order, spoil } = harness.tools;
    const cases = ${cases};
    const declared = (function () {
      "use strict";
      const harness = undefined;
      return (function () {
${code}
        return {${declared}};
      })();
    })();
    void harness.drive(declared, cases);
  }`);
  for (let ticks = 0; ticks < MAX_TICKS; ticks += 1) {
    const results = evaluate("harness.getResults()");
    if (typeof results === "string" && results.length > MAX_CHARACTERS) return { failed: "returns too much data" };
    if (typeof results === "string" && results !== "") return { results };
    evaluate("harness.tick()");
  }
  return { failed: "does not finish" };
}

// Removed, in case code escapes from its realm.
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
    // The thrown value is not inspected: it could be anything.
    reply = { failed: Date.now() - start >= MILLISECONDS ? "timed out" : "fails before the first call" };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
});
