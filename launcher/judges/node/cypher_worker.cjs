// Reads one query per line (a JSON string) and writes the analyser's first error; empty if there is none.
// Argument: the path of the analyser, which runs in a context without require, process and timers.
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
    failed = true; // its state is not trusted: the next query gets a new process
    fault = "the analyser gave up: " + String(error && error.name);
  }
  process.stdout.write(JSON.stringify(fault) + "\n", () => failed && process.exit(1));
});
