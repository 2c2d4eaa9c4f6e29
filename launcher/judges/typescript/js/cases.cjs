// Test cases: the functions, classes and values that a reference declares, with inputs generated from their types.
// Inputs are near the literals of the code, because programs differ there.
"use strict";

const { InputGenerator, Unsupported, collectLiterals } = require("./inputs.cjs");

const CASES_PER_FUNCTION = 40;
const CASES_PER_CLASS = 12;
const CALLS_PER_CLASS = 14;

// Returns names: what to test in a program; cases: JavaScript source of an array of cases for the runner.
function makeCases(row) {
  const { ts, checker, mine, theirs, starts } = row;
  const literals = [collectLiterals(ts, theirs, starts.theirs), collectLiterals(ts, mine, starts.mine)];
  const generator = new InputGenerator(ts, checker, ...literals);
  const [names, cases] = [[], []];
  for (const node of theirs.statements.filter((one) => one.end > starts.theirs)) {
    for (const name of getNames(ts, node)) {
      names.push(name.text);
      cases.push(...makeCasesOf(ts, checker, generator, node, name));
    }
  }
  return { names, cases: `[${cases.join(",\n")}]`, count: cases.length };
}

function getNames(ts, node) {
  if (ts.isFunctionDeclaration(node) || ts.isClassDeclaration(node) || ts.isEnumDeclaration(node)) {
    return node.name ? [node.name] : [];
  }
  if (!ts.isVariableStatement(node)) return [];
  return node.declarationList.declarations.map((one) => one.name).filter(ts.isIdentifier);
}

function makeCasesOf(ts, checker, generator, node, name) {
  try {
    if (ts.isClassDeclaration(node)) return makeClassCases(ts, checker, generator, node);
    const type = checker.getTypeAtLocation(name);
    const signature = ts.isEnumDeclaration(node) ? undefined : type.getCallSignatures().at(-1);
    const quoted = JSON.stringify(name.text);
    if (!signature) return [`{kind:"value",name:${quoted}}`];
    const generated = [];
    for (let turn = 0; turn < CASES_PER_FUNCTION; turn += 1) {
      generated.push(`{kind:"call",name:${quoted},make:()=>[${generator.makeArguments(signature, turn)}]}`);
    }
    return generated;
  } catch (error) {
    if (error instanceof Unsupported) return [];
    throw error;
  }
}

// Calls methods of one object in random order, so that one method sees what another has stored.
function makeClassCases(ts, checker, generator, node) {
  const type = checker.getTypeAtLocation(node.name);
  const hidden = ts.ModifierFlags.Private | ts.ModifierFlags.Protected;
  const isPublic = (symbol) =>
    !(ts.getDeclarationModifierFlagsFromSymbol(symbol) & hidden) && /^[\w$]+$/.test(symbol.name);
  const members = checker.getPropertiesOfType(type).filter(isPublic);
  const methods = members
    .map((symbol) => [symbol.name, checker.getTypeOfSymbol(symbol).getCallSignatures().at(-1)])
    .filter(([, signature]) => signature);
  const constructor = checker.getTypeOfSymbol(type.symbol).getConstructSignatures().at(-1);
  const generated = [];
  for (let turn = 0; turn < CASES_PER_CLASS; turn += 1) {
    const steps = [];
    for (let step = 0; step < CALLS_PER_CLASS && methods.length > 0; step += 1) {
      const [name, signature] = generator.pick(methods);
      steps.push(`[${JSON.stringify(name)},()=>[${generator.makeArguments(signature, turn)}]]`);
    }
    const constructorArguments = constructor ? generator.makeArguments(constructor, turn) : "";
    generated.push(
      `{kind:"class",name:${JSON.stringify(node.name.text)},make:()=>[${constructorArguments}],steps:[${steps.join(",")}],` +
        `shown:${JSON.stringify(members.map((symbol) => symbol.name))}}`,
    );
  }
  return generated;
}

module.exports = { makeCases };
