// The realm in which answers and references run: fixed clock and randomness, built-in objects that cannot be changed,
// and a harness that calls what is declared and describes all that can be observed.
// `realm` is converted to source text and evaluated in a new context, with that context's Map, Promise and Error.
"use strict";

/* eslint-disable no-undef */
function realm() {
  "use strict";
  const { Array, ArrayBuffer, Error, JSON, Map, Math, Number, Object, Promise, Proxy, Reflect, RegExp, Set, String } = globalThis;
  const { Symbol, TypeError, WeakMap, WeakSet, Date: Day } = globalThis;
  const [MAX_CALLS, MAX_ITEMS, MAX_DEPTH, MAX_TIMERS] = [80, 200, 200, 60]; // of one case; items of one iterator
  const state = { results: [], events: [], opaque: "", touched: false, calls: 0, made: 0, turn: 0, quiet: false, isDone: false };

  // A clock that only timers advance.
  let [now, ids, waiting] = [1_700_000_000_000, 0, undefined];
  let timers = [];
  const arm = (run, ms, every, a) => {
    const delay = Math.max(Number(ms) || 0, every ? 1 : 0);
    timers.push({ due: now + delay, id: (ids += 1), run: () => run(...a), every: every ? delay : 0 });
    return ids;
  };
  const drop = (id) => void (timers = timers.filter((one) => one.id !== id));
  const tick = () => {
    timers.sort((one, other) => one.due - other.due || one.id - other.id);
    const next = timers[0];
    if (next === undefined || waiting?.left === 0) {
      if (waiting === undefined) return false;
      timers = [];
      waiting.done();
      return true;
    }
    if (waiting !== undefined) waiting.left -= 1;
    now = Math.max(now, next.due);
    if (next.every > 0) next.due = now + next.every;
    else timers.shift();
    next.run();
    return true;
  };
  const runTimers = async () => {
    await new Promise((done) => (waiting = { done, left: MAX_TIMERS }));
    waiting = undefined;
  };

  let seed = 1;
  Math.random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const FixedDate = class Date extends Day {
    constructor(...a) {
      super(...(a.length > 0 ? a : [now]));
    }
    static now() {
      return now;
    }
  };
  globalThis.Date = FixedDate;
  Day.prototype.constructor = FixedDate;

  // Errors that the code makes are distinguished from those of the engine, whose texts are not compared.
  const made = new WeakSet();
  const mark = (error) => made.add(error) && error;
  for (const name of ["Error", "AggregateError", "EvalError", "RangeError", "ReferenceError", "SyntaxError", "TypeError", "URIError"]) {
    const native = globalThis[name];
    const wrapped = new Proxy(native, {
      apply: (target, _, a) => mark(Reflect.construct(target, a)),
      construct: (target, a, wanted) => mark(Reflect.construct(target, a, wanted === wrapped ? target : wanted)),
    });
    if (name !== "Error") Object.setPrototypeOf(native, globalThis.Error);
    Object.defineProperty(native.prototype, "constructor", { value: wrapped });
    globalThis[name] = wrapped;
  }
  // Without a limit no stack is recorded, and Node's formatter of stacks is never called.
  Object.defineProperty(Error, "stackTraceLimit", { value: undefined, writable: false, configurable: false });

  const show = (value) => (Object.is(value, -0) ? "-0" : typeof value === "bigint" ? `${value}n` : String(value));
  const isPlain = (value) => (typeof value !== "object" && typeof value !== "function" && typeof value !== "symbol") || value === null;
  const print = (stream) => (...a) => {
    const isText = a.every(isPlain) && !(typeof a[0] === "string" && a[0].includes("%"));
    state.events.push([stream, isText ? ["s", a.map(show).join(" ")] : data(a)]);
  };
  const console = {};
  for (const name of ["log", "info", "debug"]) console[name] = print("output");
  for (const name of ["warn", "error", "trace"]) console[name] = print("errors");
  for (const name of ["table", "dir", "group", "groupCollapsed", "groupEnd", "count", "time", "timeEnd"]) console[name] = print(name);
  console.assert = (holds, ...a) => void (holds || console.error(...a));
  const clone = (value) => {
    if (typeof value === "function" || typeof value === "symbol") throw new TypeError("could not be cloned");
    if (typeof value !== "object" || value === null) return value;
    if (value instanceof Day) return new FixedDate(value.getTime());
    if (value instanceof Map) return new Map([...value].map(clone));
    if (value instanceof Set) return new Set([...value].map(clone));
    if (value instanceof RegExp) return new RegExp(value);
    if (ArrayBuffer.isView(value)) return value.slice();
    if (Array.isArray(value)) return value.map(clone);
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, clone(part)]));
  };
  Object.assign(globalThis, {
    console,
    setTimeout: (run, ms, ...a) => arm(run, ms, false, a),
    setInterval: (run, ms, ...a) => arm(run, ms, true, a),
    clearTimeout: drop,
    clearInterval: drop,
    queueMicrotask: (run) => void Promise.resolve().then(run),
    structuredClone: clone,
  });
  for (const name of ["WebAssembly", "Atomics", "SharedArrayBuffer", "FinalizationRegistry"]) delete globalThis[name];

  const opaque = (what) => {
    if (!state.quiet && state.opaque === "") state.opaque = what;
    return ["opaque", what];
  };
  const given = new WeakMap(); // functions of generated inputs
  const own = (run) => given.set(run, (state.made += 1)) && run;
  const bound = (value) => (Object.isFrozen(value) ? "frozen" : Object.isSealed(value) ? "sealed" : Object.isExtensible(value) ? "" : "fixed");
  const nameOf = (value) => String(Object.getPrototypeOf(value)?.constructor?.name);
  const hasMethods = (value) => {
    for (let one = Object.getPrototypeOf(value); one !== null && one !== Object.prototype; one = Object.getPrototypeOf(one)) {
      const names = Reflect.ownKeys(one).filter((key) => key !== "constructor");
      if (names.some((key) => typeof (Object.getOwnPropertyDescriptor(one, key).value ?? (() => 0)) === "function")) return true;
    }
    return false;
  };

  const symbolsOf = (value) => Object.getOwnPropertySymbols(value).filter((key) => Object.prototype.propertyIsEnumerable.call(value, key));

  // Describes a value as JSON with its kind. What cannot be described is `opaque`.
  const data = (value, above = []) => {
    if (value === null || typeof value === "boolean") return value;
    if (typeof value === "string") return ["s", value];
    if (typeof value === "number") return ["n", Number.isFinite(value) && !Object.is(value, -0) ? value : show(value)];
    if (typeof value === "undefined") return ["u"];
    if (typeof value === "function") return given.has(value) ? ["given", given.get(value)] : opaque("a function");
    if (typeof value !== "object") return [typeof value, String(value)];
    if (above.includes(value)) return ["above", above.indexOf(value)];
    if (above.length > MAX_DEPTH) return opaque("a deep value");
    const inner = (part) => data(part, [...above, value]);
    const entries = (one) => [
      ...Object.entries(one).map(([key, part]) => [key, inner(part)]),
      ...symbolsOf(one).map((key) => [["symbol", String(key)], inner(one[key])]),
    ];
    const base = baseOf(value, inner);
    const proto = Object.getPrototypeOf(value);
    if (base !== null) return base[1] === nameOf(value) ? base : ["instance", nameOf(value), base, entries(value)];
    if (proto === Object.prototype) return ["o", entries(value), bound(value)];
    if (proto === null) return ["bare", entries(value), bound(value)];
    if (typeof value.next === "function" || typeof value[Symbol.iterator] === "function") return drainNow(value, inner);
    return hasMethods(value) ? opaque("an object with methods") : ["instance", nameOf(value), entries(value), bound(value)];
  };
  // Returns [kind, class, ...] of an instance of a built-in class; null for any other object.
  const baseOf = (value, inner) => {
    if (Array.isArray(value)) return ["a", "Array", Array.from(value, (part, at) => (at in value ? inner(part) : ["hole"])), bound(value)];
    if (value instanceof Map) return ["map", "Map", [...value].map(([key, part]) => [inner(key), inner(part)])];
    if (value instanceof Set) return ["set", "Set", [...value].map(inner)];
    if (value instanceof Day) return ["date", "Date", String(value.getTime())];
    if (value instanceof RegExp) return ["regexp", "RegExp", String(value), value.lastIndex];
    if (value instanceof Error) return describeError(value, inner);
    if (ArrayBuffer.isView(value) && Symbol.iterator in value) return ["typed", nameOf(value), Array.from(value, inner)];
    if (value instanceof ArrayBuffer) return ["buffer", "ArrayBuffer", [...new Uint8Array(value)]];
    if (value instanceof Number || value instanceof String || value instanceof Boolean) return ["boxed", nameOf(value), inner(value.valueOf())];
    return null;
  };
  const describeError = (error, inner) => {
    if (!made.has(error)) return ["error", nameOf(error), null];
    const parts = Object.entries(error).map(([key, part]) => [key, inner(part)]);
    parts.sort(([one], [other]) => (one < other ? -1 : 1));
    const cause = Object.hasOwn(error, "cause") ? inner(error.cause) : null;
    if (Array.isArray(error.errors) && !Object.keys(error).includes("errors")) parts.push(["errors", inner(error.errors)]);
    return ["error", nameOf(error), [String(error.name), String(error.message), cause, parts]];
  };
  const drainNow = (value, inner) => {
    if (state.quiet) return ["iterator"];
    const iterator = typeof value[Symbol.iterator] === "function" ? value[Symbol.iterator]() : value;
    const items = [];
    while (items.length < MAX_ITEMS) {
      const { done, value: item } = iterator.next();
      if (done) return ["items", items, inner(item)];
      items.push(inner(item));
    }
    iterator.return?.();
    return ["items", items, "more"];
  };
  const describeQuietly = (value) => {
    state.quiet = true;
    try {
      return data(value);
    } finally {
      state.quiet = false;
    }
  };
  const explain = (thrown) => {
    try {
      return data(thrown);
    } catch {
      return ["unreadable"];
    }
  };

  // Describes a value by the plan of its type: functions and methods are called, iterators drained.
  let plans = [];
  const inspect = async (value, at, above) => {
    const plan = plans[at];
    const isCallable = typeof value === "function";
    if (plan === undefined || isPlain(value) || typeof value === "symbol" || given.has(value)) return data(value, above);
    if (above.includes(value)) return ["above", above.indexOf(value)];
    if (plan.opaque) return opaque(plan.opaque);
    if (value instanceof Promise) return ["promise", await settle(() => value, at, above)];
    const inside = [...above, value];
    const inner = (part, index) => inspect(part, index ?? -1, inside);
    if (isCallable) {
      if (!plan.call && !plan.view) return opaque("a function");
      return ["function", plan.call ? await callOften(value, plan.call, inside) : null, plan.view ? await view(value, plan, inside) : null];
    }
    if (plan.view) return view(value, plan, inside);
    if (plan.iterates) return drain(value, plan, inner);
    if (Array.isArray(value)) {
      const items = [];
      for (let index = 0; index < value.length; index += 1) items.push(await inner(value[index], plan.tuple?.[index] ?? plan.items));
      return ["a", "Array", items, bound(value)];
    }
    if (value instanceof Set || value instanceof Map) {
      const parts = [];
      for (const [key, part] of value.entries()) parts.push([await inner(key, plan.items), await inner(part, plan.values)]);
      return ["map", nameOf(value), parts];
    }
    if (!plan.props) return data(value, above);
    const parts = [];
    for (const [key, part] of Object.entries(value)) parts.push([key, await inner(part, Object.hasOwn(plan.props, key) ? plan.props[key] : plan.values)]);
    return [Object.getPrototypeOf(value) === null ? "bare" : "o", parts, bound(value)];
  };
  const callOften = async (run, { makes, result }, above) => {
    const ends = [];
    for (const step of [0, 1, 2, 0]) {
      if ((state.calls += 1) > MAX_CALLS) return ["cut", ends];
      const a = makes[(state.turn + step) % makes.length]();
      const before = JSON.stringify(describeQuietly(a));
      const end = await settle(() => run(...a), result, above);
      const after = describeQuietly(a);
      ends.push(before === JSON.stringify(after) ? end : [end, after]);
    }
    return ends;
  };
  const view = async (object, plan, above) => {
    const { name, shown, steps, length } = plan.view;
    const ends = [];
    for (let step = 0; step < length && steps.length > 0; step += 1) {
      const [key, make, result, isSet] = steps[(state.turn * 7 + step) % steps.length];
      if ((state.calls += 1) > MAX_CALLS) break;
      const a = make();
      ends.push([key, await settle(() => (isSet ? ((object[key] = a[0]), object[key]) : object[key](...a)), result, above)]);
    }
    const seen = [];
    for (const [key, at] of shown) seen.push([key, key in object, await settle(() => object[key], at, above)]);
    const items = plan.iterates ? await drain(object, plan, (part, at) => inspect(part, at ?? -1, above)) : null;
    const base = typeof object === "function" ? null : baseOf(object, (part) => data(part, above));
    return ["view", name === null ? null : nameOf(object), ends, seen, items, base];
  };
  const drain = async (value, plan, inner) => {
    const isAsync = plan.iterates === "async";
    const start = value[isAsync ? Symbol.asyncIterator : Symbol.iterator];
    const items = [];
    try {
      const iterator = typeof start === "function" ? start.call(value) : value;
      while (items.length < MAX_ITEMS) {
        const next = isAsync ? await iterator.next() : iterator.next();
        if (next.done) return ["items", items, await inner(next.value), plan.isIterator ? typeof value.next : ""];
        items.push(await inner(next.value, plan.items));
      }
      await iterator.return?.();
    } catch (thrown) {
      return ["items", items, ["threw", explain(thrown)]];
    }
    return ["items", items, "more"];
  };
  const settle = async (run, at, above) => {
    const start = now;
    const waited = () => (now > start ? [now - start] : []); // on the clock of timers
    let value;
    try {
      value = run();
    } catch (thrown) {
      return ["threw", explain(thrown)];
    }
    if (!(value instanceof Promise)) return ["now", await inspect(value, at, above)];
    try {
      value = await value;
    } catch (thrown) {
      return ["rejected", explain(thrown), ...waited()];
    }
    const delay = waited();
    return ["later", await inspect(value, plans[at]?.promised ?? -1, above), ...delay];
  };

  // Helpers of generated inputs.
  const hash = (value) => {
    let sum = 7;
    for (const char of JSON.stringify(describeQuietly(value))) sum = (sum * 31 + char.charCodeAt(0)) % 1000003;
    return sum;
  };
  const choose = (options, arity) => own((...a) => options[hash(a.slice(0, arity)) % options.length]());
  const vary = (options, arity) => {
    const counts = new Map();
    return own((...all) => {
      const a = all.slice(0, arity);
      const [key, sum] = [JSON.stringify(describeQuietly(a)), a.length > 0 ? hash(a) : 0];
      const count = counts.get(key) ?? 0;
      counts.set(key, count + 1);
      return options[(sum + count) % options.length]();
    });
  };
  const order = own((one, other) => hash(one) - hash(other));
  const note = (id, result) => own((...a) => void state.events.push(["called", id, describeQuietly(a)]) ?? result());
  const spoil = (value, dice) => {
    if (typeof value !== "object" || value === null) return dice % 2 ? [value] : String(value) + "!";
    const keys = Object.keys(value);
    const key = keys[Math.floor(dice / 12) % keys.length];
    if (dice % 4 === 0) delete value[key];
    else value[key] = [null, typeof value[key] === "string" ? 7 : "7", { a: 1 }][dice % 3];
    return value;
  };

  const runs = {
    value: async (one, declared) => [await settle(() => declared[one.name], one.plan, []), null],
    call: async (one, declared) => {
      const a = one.make();
      const before = JSON.stringify(describeQuietly(a));
      const end = await settle(() => declared[one.name](...a), one.plan, []);
      await runTimers();
      const after = describeQuietly(a);
      return [end, before === JSON.stringify(after) ? null : after];
    },
    class: async (one, declared) => {
      const a = one.make();
      return [await settle(() => new declared[one.name](...a), one.plan, []), null];
    },
  };
  const drive = async (declared, table, cases) => {
    plans = table;
    await runTimers();
    state.results.push(["loaded", state.events.splice(0)]);
    for (const one of cases) {
      Object.assign(state, { calls: 0, made: 0, turn: state.results.length });
      let outcome;
      try {
        outcome = await runs[one.kind](one, declared);
      } catch (thrown) {
        outcome = [["broken", explain(thrown)], null];
      }
      await runTimers();
      state.results.push([...outcome, state.events.splice(0)]);
    }
    state.isDone = true;
  };
  const getReport = () => {
    if (!state.isDone) return "";
    return JSON.stringify({ results: state.results, opaque: state.opaque, touched: state.touched });
  };

  // Freezes every built-in object. Properties of prototypes become accessors, so that objects can still override them
  // by assignment (`this.name = "MyError"`), and so that an attempt to change a prototype is noticed.
  const PLAIN = ["constructor", "then", "exec", "next", "flags"]; // the engine is slow if they are accessors
  const freezeAll = () => {
    const refuse = () => {
      state.touched = true;
      throw new TypeError("a built-in object is changed");
    };
    const open = (one, key, value) =>
      Object.defineProperty(one, key, {
        get: () => value,
        set(next) {
          if (this === one || (typeof this !== "object" && typeof this !== "function")) refuse();
          Object.defineProperty(this, key, { value: next, writable: true, enumerable: true, configurable: true });
        },
      });
    const iterators = [[][Symbol.iterator](), new Map().keys(), new Set().keys(), ""[Symbol.iterator](), "".matchAll(/a/g)];
    const functions = [function* () {}, async function () {}, async function* () {}];
    const names = Reflect.ownKeys(globalThis).filter((name) => name !== "globalThis" && name !== "global");
    const stack = [...iterators, ...functions, ...functions.map((one) => one.prototype), ...names.map((name) => globalThis[name])];
    const seen = new Set([globalThis]);
    while (stack.length > 0) {
      const one = stack.pop();
      if (isPlain(one) || typeof one === "symbol" || seen.has(one)) continue;
      seen.add(one);
      const isRoot = one === Object.prototype || one instanceof Error || one === Error.prototype;
      stack.push(Object.getPrototypeOf(one));
      for (const key of Reflect.ownKeys(one)) {
        const slot = Object.getOwnPropertyDescriptor(one, key);
        stack.push(slot.value, slot.get, slot.set);
        const isOpened = typeof key === "string" && slot.writable && slot.configurable && Object.hasOwn(one, "constructor");
        if (isOpened && (isRoot || !PLAIN.includes(key))) open(one, key, slot.value);
      }
      Object.freeze(one);
    }
  };
  freezeAll();
  return { drive, tick, getReport, tools: { choose, order, note, own, spoil, vary } };
}
/* eslint-enable no-undef */

module.exports = `const harness = (${realm})();`;
