// What to run: the functions, classes and values that a reference declares, and inputs made from their types.
// Inputs are drawn near the literals that stand in the code, since that is where two programs differ.
"use strict";

const { Maker, Unsupported, collectLiterals } = require("./typescript_inputs.cjs");

const CASES_OF_A_FUNCTION = 40;
const CASES_OF_A_CLASS = 12;
const STEPS_OF_A_CLASS = 14;

// names: what to look for in a program. cases: JavaScript, an array of cases as the runner takes them.
function makeCases(row) {
  const { ts, checker, mine, theirs, starts } = row;
  const literals = [collectLiterals(ts, theirs, starts.theirs), collectLiterals(ts, mine, starts.mine)];
  const maker = new Maker(ts, checker, ...literals);
  const [names, cases] = [[], []];
  for (const node of theirs.statements.filter((one) => one.end > starts.theirs)) {
    for (const name of namesOf(ts, node)) {
      names.push(name.text);
      cases.push(...casesOf(ts, checker, maker, node, name));
    }
  }
  return { names, cases: `[${cases.join(",\n")}]`, count: cases.length };
}

function namesOf(ts, node) {
  if (ts.isFunctionDeclaration(node) || ts.isClassDeclaration(node) || ts.isEnumDeclaration(node)) {
    return node.name ? [node.name] : [];
  }
  if (!ts.isVariableStatement(node)) return [];
  return node.declarationList.declarations.map((one) => one.name).filter(ts.isIdentifier);
}

function casesOf(ts, checker, maker, node, name) {
  try {
    if (ts.isClassDeclaration(node)) return casesOfClass(ts, checker, maker, node);
    const type = checker.getTypeAtLocation(name);
    const signature = ts.isEnumDeclaration(node) ? undefined : type.getCallSignatures().at(-1);
    const quoted = JSON.stringify(name.text);
    if (!signature) return [`{kind:"value",name:${quoted}}`];
    const made = [];
    for (let turn = 0; turn < CASES_OF_A_FUNCTION; turn += 1) {
      made.push(`{kind:"call",name:${quoted},make:()=>[${maker.makeArguments(signature, turn)}]}`);
    }
    return made;
  } catch (error) {
    if (error instanceof Unsupported) return [];
    throw error;
  }
}

// Calls in a random order, on one object: what a method stores another one finds.
function casesOfClass(ts, checker, maker, node) {
  const type = checker.getTypeAtLocation(node.name);
  const hidden = ts.ModifierFlags.Private | ts.ModifierFlags.Protected;
  const isPublic = (symbol) =>
    !(ts.getDeclarationModifierFlagsFromSymbol(symbol) & hidden) && /^[\w$]+$/.test(symbol.name);
  const members = checker.getPropertiesOfType(type).filter(isPublic);
  const methods = members
    .map((symbol) => [symbol.name, checker.getTypeOfSymbol(symbol).getCallSignatures().at(-1)])
    .filter(([, signature]) => signature);
  const constructor = checker.getTypeOfSymbol(type.symbol).getConstructSignatures().at(-1);
  const made = [];
  for (let turn = 0; turn < CASES_OF_A_CLASS; turn += 1) {
    const steps = [];
    for (let step = 0; step < STEPS_OF_A_CLASS && methods.length > 0; step += 1) {
      const [name, signature] = maker.pick(methods);
      steps.push(`[${JSON.stringify(name)},()=>[${maker.makeArguments(signature, turn)}]]`);
    }
    const made_of = constructor ? maker.makeArguments(constructor, turn) : "";
    made.push(
      `{kind:"class",name:${JSON.stringify(node.name.text)},make:()=>[${made_of}],steps:[${steps.join(",")}],` +
        `shown:${JSON.stringify(members.map((symbol) => symbol.name))}}`,
    );
  }
  return made;
}

module.exports = { makeCases };
