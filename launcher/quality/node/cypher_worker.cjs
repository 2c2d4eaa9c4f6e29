// Says of each query, a JSON string a line, what the analyser finds first, as a JSON string a line; empty: nothing.
// argv: the analyser's file. It runs in a context that has no require, no process and no timer.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const readline = require("node:readline");
const vm = require("node:vm");

const outside = vm.createContext({});
vm.runInContext(fs.readFileSync(path.join(__dirname, "cypher_analyser.js"), "utf8"), outside);
outside.source = fs.readFileSync(process.argv[2], "utf8");
vm.runInContext(vm.runInContext("makeScript(source)", outside), outside);
delete outside.source;

process.stdout.write('"ready"\n');
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  let fault;
  let failed = false;
  try {
    fault = outside.firstFault(JSON.parse(line));
  } catch (error) {
    failed = true; // what it has left behind is not trusted: the next query finds a new process
    fault = "the analyser gave up: " + String(error && error.name);
  }
  process.stdout.write(JSON.stringify(fault) + "\n", () => failed && process.exit(1));
});
