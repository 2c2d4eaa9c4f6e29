// Runs untrusted code in a new realm with a timeout, without any API except the language itself.
// Reads one JSON line, {code, names, plans, cases}, and writes {report} as text, or {failed}.
"use strict";

const fs = require("node:fs");
const vm = require("node:vm");

const MILLISECONDS = Number(process.argv[2]);
const MAX_TICKS = 20_000;
const MAX_CHARACTERS = 4_000_000;

const HARNESS = new vm.Script(require("./realm.cjs"));
const REPORT = new vm.Script("harness.getReport()");
const TICK = new vm.Script("harness.tick()");

function run({ code, names, plans, cases }) {
  const context = vm.createContext(Object.create(null), {
    codeGeneration: { strings: false, wasm: false },
    microtaskMode: "afterEvaluate", // the timeout covers promises, too
  });
  const end = Date.now() + MILLISECONDS;
  const evaluate = (script) => script.runInContext(context, { timeout: Math.max(1, end - Date.now()) });
  const declared = names.map((name) => `get ${name}() { return ${name}; }`);
  HARNESS.runInContext(context);
  const program = `{
    const { choose, order, note, own, spoil, vary } = harness.tools;
    const plans = ${plans};
    const cases = ${cases};
    const declared = (function () {
      "use strict";
      const harness = undefined;
      return (function () {
        const plans = undefined, cases = undefined, choose = undefined, order = undefined, note = undefined, own = undefined, spoil = undefined, vary = undefined;
        return (function () {
${code}
          return {${declared}};
        })();
      })();
    })();
    void harness.drive(declared, plans, cases);
  }`;
  evaluate(new vm.Script(program));
  for (let ticks = 0; ticks < MAX_TICKS; ticks += 1) {
    const report = evaluate(REPORT);
    if (typeof report === "string" && report.length > MAX_CHARACTERS) return { failed: "size" };
    if (typeof report === "string" && report !== "") return { report };
    if (evaluate(TICK) !== true) return { failed: "pending" };
  }
  return { failed: "pending" };
}

function* readLines() {
  const [chunk, parts] = [Buffer.alloc(2 ** 16), []];
  for (;;) {
    const size = fs.readSync(0, chunk, 0, chunk.length, null);
    if (size === 0) return;
    const at = chunk.subarray(0, size).indexOf(10);
    parts.push(Buffer.from(chunk.subarray(0, at < 0 ? size : at)));
    if (at >= 0) yield Buffer.concat(parts.splice(0)).toString("utf8");
  }
}

function write(line) {
  const bytes = Buffer.from(`${line}\n`);
  for (let done = 0; done < bytes.length; ) done += fs.writeSync(1, bytes, done);
}

// Nothing of these is needed once the modules are loaded; code that escapes from its realm finds none of them.
function reduce() {
  const kept = new Set(["nextTick", "emitWarning", "versions", "version", "arch", "platform", "release", "_tickCallback"]);
  for (const name of Reflect.ownKeys(process)) {
    if (kept.has(name)) continue;
    try {
      if (!Reflect.deleteProperty(process, name)) Object.defineProperty(process, name, { value: undefined });
    } catch {
      // It can be neither deleted nor replaced.
    }
  }
  Object.setPrototypeOf(process, null);
  const language = new Set(vm.runInNewContext("Reflect.ownKeys(globalThis)"));
  for (const name of Reflect.ownKeys(globalThis)) {
    if (!language.has(name) && !["Buffer", "globalThis"].includes(name)) Reflect.deleteProperty(globalThis, name);
  }
}

reduce();
write("ready");
for (const line of readLines()) {
  const start = Date.now();
  let reply;
  try {
    reply = run(JSON.parse(line));
  } catch {
    // The thrown value is not inspected: it could be anything.
    reply = { failed: Date.now() - start >= MILLISECONDS ? "time" : "load" };
  }
  write(JSON.stringify(reply));
}
