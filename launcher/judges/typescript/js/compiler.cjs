// Compiles answers and references with TypeScript: syntax, types, test cases and JavaScript code.
// Reads one JSON line, [{given, answerGiven, answer, reference}, ...], and writes the report on each, or {broken}.
// Files exist in memory only; nothing is imported. References are compiled in a program without any answer.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const readline = require("node:readline");
const v8 = require("node:v8");

v8.setFlagsFromString("--no-opt"); // until it is ready: most of what is optimised while it starts is not used again
const ts = require(process.argv[2]);
const { makeCases } = require("./cases.cjs");
const { collectLiterals } = require("./inputs.cjs");
const { compareTypes, describeTypes } = require("./types.cjs");

const LIBRARY = path.dirname(process.argv[2]);
const LIBRARY_NAMES = /^lib\.(es5|es20(1[5-9]|2[0-2])(\.[a-z]+)*|decorators(\.legacy)?)\.d\.ts$/;
// Globals of every runtime that are not part of the language. No DOM: its globals (name, event, Text) hide mistakes.
const AMBIENT = `
declare var console: { log(...a: any[]): void; info(...a: any[]): void; warn(...a: any[]): void;
  error(...a: any[]): void; debug(...a: any[]): void; trace(...a: any[]): void; table(...a: any[]): void;
  dir(...a: any[]): void; group(...a: any[]): void; groupCollapsed(...a: any[]): void; groupEnd(): void;
  count(label?: string): void; time(label?: string): void; timeEnd(label?: string): void;
  assert(holds?: boolean, ...a: any[]): void; };
declare function setTimeout(run: (...a: any[]) => void, ms?: number, ...a: any[]): number;
declare function clearTimeout(id?: number): void;
declare function setInterval(run: (...a: any[]) => void, ms?: number, ...a: any[]): number;
declare function clearInterval(id?: number): void;
declare function queueMicrotask(run: () => void): void;
declare function structuredClone<T>(value: T): T;
`;
const CASES_PER_FUNCTION = 48;
const EXTRA_CASES_PER_FUNCTION = 20;
const NO_LITERALS = { numbers: [], strings: [] };
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
let library; // the program without answers and references, whose files are reused

function parse(name, text, setExternalModuleIndicator) {
  const jsDocParsingMode = ts.JSDocParsingMode?.ParseNone; // from TypeScript 5.3 on
  const how = { languageVersion: OPTIONS.target, setExternalModuleIndicator, jsDocParsingMode };
  const file = ts.createSourceFile(name, text, how);
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
  return ts.createProgram({ rootNames, options: OPTIONS, host, oldProgram: library });
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
    if (ts.isModuleDeclaration(node)) return factory.updateModuleDeclaration(node, modifiers, name, body);
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

// Returns what a file declares beyond itself; empty if it is a module like others.
function findGlobals(file) {
  const isOutside = (node) =>
    ts.isModuleDeclaration(node) && (node.flags & ts.NodeFlags.GlobalAugmentation || ts.isStringLiteral(node.name));
  if (file.statements.some(isOutside)) return "declares globals or modules";
  if (file.statements.some((node) => ts.isNamespaceExportDeclaration(node) || (ts.isExportAssignment(node) && node.isExportEquals))) {
    return "exports something else than a module does";
  }
  const references = [file.referencedFiles, file.typeReferenceDirectives, file.libReferenceDirectives, file.amdDependencies];
  return references.some((list) => list?.length > 0) ? "refers to other files" : "";
}

// Compiles files, each that declares globals in a program of its own. Returns {file, start, ts, checker, program,
// fault, globals} of each.
function compileFiles(sources) {
  const parsed = sources.map(({ name, given, text }) => {
    const file = parse(name, `${given}\n${text}`, asModule);
    return { ts, file, start: given.length, globals: findGlobals(file) };
  });
  const together = parsed.filter((one) => !one.globals);
  for (const group of [together, ...parsed.filter((one) => one.globals).map((one) => [one])]) {
    const program = makeProgram(new Map(group.map(({ file }) => [file.fileName, file])));
    for (const one of group) {
      const faults = [...program.getSyntacticDiagnostics(one.file), ...program.getSemanticDiagnostics(one.file)];
      Object.assign(one, { program, checker: program.getTypeChecker(), fault: firstOf(faults) || findImport(one.file) });
    }
  }
  return parsed;
}

// Returns what is known of a reference, whatever the answer: its type error, or its code and test cases.
function reportReference(source) {
  if (source.fault) return { reference_types: source.fault };
  const types = describeTypes(source);
  const literals = collectLiterals(ts, source.file, source.start);
  const cases = makeCases(source, [literals, NO_LITERALS], CASES_PER_FUNCTION, 0);
  if (types === undefined) cases.opaque ||= "a deeply nested type";
  return { reference_types: "", types, literals, cases, reference_code: emit(source.program, source.file) };
}

// Returns more test cases, near the literals of the answer that the reference does not have.
function makeExtraCases(reference, { literals, cases }, answer) {
  const mine = collectLiterals(ts, answer.file, answer.start);
  const numbers = mine.numbers.filter((one) => !literals.numbers.includes(one));
  const strings = mine.strings.filter((one) => !literals.strings.includes(one));
  if (numbers.length + strings.length === 0) return null;
  return makeCases(reference, [literals, { numbers, strings }], EXTRA_CASES_PER_FUNCTION, cases.num_plans);
}

function compileAll(requests) {
  const references = compileFiles(requests.map(({ given, reference }, index) => ({ name: `/reference${index}.ts`, given, text: reference })));
  const known = references.map(reportReference);
  const syntax = requests.map(({ answer }) => {
    const { parseDiagnostics, statements } = parse("/answer.ts", answer, asModule);
    return firstOf(parseDiagnostics) || (statements.length === 0 ? "It contains no statement." : "");
  });
  const indices = requests.map((_, index) => index).filter((index) => syntax[index] === "");
  const name = (index) => ({ name: `/answer${index}.ts`, given: requests[index].answer_given, text: requests[index].answer });
  const answers = new Map(compileFiles(indices.map(name)).map((one, at) => [indices[at], one]));
  return requests.map((_, index) => {
    const { reference_types, types, cases, reference_code } = known[index];
    const report = { syntax: syntax[index], types: "", globals: "", same: "", declares_types: Boolean(types), reference_types, cases, reference_code };
    const answer = answers.get(index);
    if (!answer) return report;
    report.types = answer.fault;
    if (answer.fault || reference_types) return report;
    report.globals = references[index].globals ? "" : answer.globals;
    report.same = compareTypes(answer, types ?? []);
    report.extra = makeExtraCases(references[index], known[index], answer);
    report.answer_code = emit(answer.program, answer.file);
    return report;
  });
}

library = makeProgram(new Map());
library.getTypeChecker(); // load the library before the first answer
v8.setFlagsFromString("--opt");
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
