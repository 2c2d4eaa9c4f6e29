// Compiles answers and references with TypeScript: syntax, types, test cases and JavaScript code.
// Reads one JSON line, [{given, answerGiven, answer, reference}, ...], and writes the report on each, or {broken}.
// Files exist in memory only; nothing is imported.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const readline = require("node:readline");

const ts = require(process.argv[2]);
const { makeCases } = require("./cases.cjs");
const { compareTypes } = require("./types.cjs");

const LIBRARY = path.dirname(process.argv[2]);
const LIBRARY_NAMES = /^lib\.(es5|es20(1[5-9]|2[0-2])(\.[a-z]+)*|decorators(\.legacy)?)\.d\.ts$/;
// Globals of every runtime that are not part of the language. No DOM: its globals (name, event, Text) hide mistakes.
const AMBIENT = `
declare var console: { log(...a: any[]): void; info(...a: any[]): void; warn(...a: any[]): void;
  error(...a: any[]): void; debug(...a: any[]): void; };
declare function setTimeout(run: (...a: any[]) => void, ms?: number, ...a: any[]): number;
declare function clearTimeout(id?: number): void;
declare function setInterval(run: (...a: any[]) => void, ms?: number, ...a: any[]): number;
declare function clearInterval(id?: number): void;
declare function queueMicrotask(run: () => void): void;
declare function structuredClone<T>(value: T): T;
`;
const OPTIONS = {
  strict: true,
  preserveConstEnums: true,
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleDetection: ts.ModuleDetectionKind.Force,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  lib: ["lib.es2022.d.ts"],
  types: [],
  noResolve: true,
  skipLibCheck: true,
};
const fixed = new Map([["/ambient.d.ts", parse("/ambient.d.ts", AMBIENT)]]);
let previous; // the last program, reused for unchanged files

function parse(name, text, setExternalModuleIndicator) {
  const how = { languageVersion: OPTIONS.target, setExternalModuleIndicator };
  const file = ts.createSourceFile(name, text, how, true);
  file.checkJsDirective = undefined; // ignore @ts-nocheck and @ts-ignore
  file.commentDirectives = undefined;
  return file;
}

function readLibrary(name) {
  const base = path.basename(name);
  if (path.dirname(name) !== LIBRARY || !LIBRARY_NAMES.test(base)) return undefined;
  if (!fixed.has(name)) fixed.set(name, parse(name, fs.readFileSync(path.join(LIBRARY, base), "utf8")));
  return fixed.get(name);
}

function makeProgram(files) {
  const host = {
    getSourceFile: (name) => files.get(name) ?? fixed.get(name) ?? readLibrary(name),
    getDefaultLibFileName: () => path.join(LIBRARY, "lib.es2022.d.ts"),
    getDefaultLibLocation: () => LIBRARY,
    getCurrentDirectory: () => "/",
    getCanonicalFileName: (name) => name,
    useCaseSensitiveFileNames: () => true,
    getNewLine: () => "\n",
    fileExists: (name) => files.has(name),
    readFile: () => undefined,
    directoryExists: () => false,
    writeFile: () => undefined,
  };
  const rootNames = [...fixed.keys()].slice(0, 1).concat([...files.keys()]);
  previous = ts.createProgram({ rootNames, options: OPTIONS, host, oldProgram: previous });
  return previous;
}

const formatMessage = (diagnostic) => ts.flattenDiagnosticMessageText(diagnostic.messageText, " ").slice(0, 200);
const firstOf = (diagnostics) =>
  formatMessage(diagnostics.find((one) => one.category === ts.DiagnosticCategory.Error) ?? { messageText: "" });

// Emits JavaScript without exports, because it runs inside a function.
function emit(program, file) {
  const { factory, visitEachChild } = ts;
  const isExport = (one) => [ts.SyntaxKind.ExportKeyword, ts.SyntaxKind.DefaultKeyword].includes(one.kind);
  const removeExport = (node) => {
    if (ts.isExportDeclaration(node) || ts.isExportAssignment(node)) return factory.createEmptyStatement();
    const modifiers = node.modifiers?.filter((one) => !isExport(one));
    if (!modifiers || modifiers.length === node.modifiers.length) return node;
    if (!node.name && !ts.isVariableStatement(node)) return factory.createEmptyStatement(); // it has no name to call
    const { name, typeParameters, parameters, type, body, members, heritageClauses, asteriskToken } = node;
    if (ts.isFunctionDeclaration(node)) {
      return factory.updateFunctionDeclaration(node, modifiers, asteriskToken, name, typeParameters, parameters, type, body);
    }
    if (ts.isClassDeclaration(node)) {
      return factory.updateClassDeclaration(node, modifiers, name, typeParameters, heritageClauses, members);
    }
    if (ts.isVariableStatement(node)) return factory.updateVariableStatement(node, modifiers, node.declarationList);
    return ts.isEnumDeclaration(node) ? factory.updateEnumDeclaration(node, modifiers, name, members) : node;
  };
  const before = [(context) => (root) => visitEachChild(root, removeExport, context)];
  let code = "";
  program.emit(file, (_, text) => void (code = text), undefined, false, { before });
  return code.replace(/^export \{\};$/gm, "");
}

const asModule = (file) => void (file.externalModuleIndicator = true); // rows are separate modules

// Rejects `import("fs")`, whose type error an answer could hide by a cast.
function findImport(node) {
  if (ts.isCallExpression(node) && node.expression.kind === ts.SyntaxKind.ImportKeyword) return "It imports a module.";
  return ts.forEachChild(node, (child) => findImport(child) || undefined) ?? "";
}

// Returns syntax, types, referenceTypes: the first error or empty; same: the first difference of declared types, null if
// the reference declares none; plan: the test cases, see cases.cjs.
function compileRow(program, { mine, theirs, starts }) {
  const check = (file) =>
    firstOf([...program.getSyntacticDiagnostics(file), ...program.getSemanticDiagnostics(file)]) || findImport(file);
  const report = { syntax: "", types: check(mine), referenceTypes: check(theirs), same: null, plan: null };
  if (report.types || report.referenceTypes) return report;
  const row = { ts, checker: program.getTypeChecker(), mine, theirs, starts };
  report.same = compareTypes(row);
  report.plan = makeCases(row);
  report.answerCode = emit(program, mine);
  report.referenceCode = emit(program, theirs);
  return report;
}

function compileAll(requests) {
  const files = new Map();
  const put = (name, text) => files.set(name, parse(name, text, asModule)).get(name);
  const rows = requests.map(({ given, answerGiven, answer, reference }, index) => {
    const { parseDiagnostics, statements } = parse("/answer.ts", answer, asModule);
    if (parseDiagnostics.length > 0) return { syntax: firstOf(parseDiagnostics) };
    if (statements.length === 0) return { syntax: "It contains no statement." };
    const mine = put(`/answer${index}.ts`, `${answerGiven}\n${answer}`);
    const theirs = put(`/reference${index}.ts`, `${given}\n${reference}`);
    return { mine, theirs, starts: { mine: answerGiven.length, theirs: given.length } };
  });
  const program = makeProgram(files);
  return rows.map((row) => (row.syntax ? row : compileRow(program, row)));
}

makeProgram(new Map()).getTypeChecker(); // load the library before the first answer
process.stdout.write("ready\n");
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  let reply;
  try {
    reply = compileAll(JSON.parse(line));
  } catch (error) {
    reply = { broken: String(error?.message).slice(0, 200) }; // e.g. a stack overflow of the compiler
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
});
