// Test cases: the functions, classes and values that a reference declares, with inputs generated from their types.
// Inputs are near the literals of the code, because programs differ there.
"use strict";

const { InputGenerator, Unsupported } = require("./inputs.cjs");
const { PlanTable } = require("./plans.cjs");

const CASES_PER_CLASS = 12;

// Returns names: what to test in a program; cases and plans: JavaScript source for the runner; opaque: why the
// reference cannot be compared, or empty.
function makeCases({ ts, checker, file, start }, literals, casesPerFunction, firstPlan) {
  const generator = new InputGenerator(ts, checker, ...literals);
  const table = new PlanTable(ts, checker, generator, firstPlan);
  const [names, cases] = [[], []];
  let opaque = "";
  for (const node of file.statements.filter((one) => one.end > start)) {
    const declared = getNames(ts, node);
    if (declared === null) opaque ||= "an export without a name";
    for (const name of declared ?? []) {
      try {
        const made = makeCasesOf(ts, checker, generator, table, node, name, casesPerFunction);
        if (!names.includes(name.text)) names.push(name.text);
        cases.push(...made);
      } catch (error) {
        if (!(error instanceof Unsupported)) throw error;
        opaque ||= `${name.text} needs ${error.message}`;
      }
    }
  }
  return { names, cases: `[${cases.join(",\n")}]`, plans: table.render(), num_plans: table.plans.length, count: cases.length, opaque };
}

// Returns the names that a statement declares; null if it exports something that has none.
function getNames(ts, node) {
  const hasName = ts.isFunctionDeclaration(node) || ts.isClassDeclaration(node) || ts.isEnumDeclaration(node);
  if (node.modifiers?.some((one) => one.kind === ts.SyntaxKind.DeclareKeyword)) return [];
  if (hasName) return node.name ? [node.name] : null;
  if (ts.isExportAssignment(node)) return ts.isIdentifier(node.expression) ? [] : null;
  if (ts.isModuleDeclaration(node)) return ts.isIdentifier(node.name) && ts.getModuleInstanceState(node) !== 0 ? [node.name] : [];
  if (!ts.isVariableStatement(node)) return [];
  const flatten = (name) => (ts.isIdentifier(name) ? [name] : name.elements.flatMap((one) => (one.name ? flatten(one.name) : [])));
  return node.declarationList.declarations.flatMap((one) => flatten(one.name));
}

function makeCasesOf(ts, checker, generator, table, node, name, casesPerFunction) {
  const quoted = JSON.stringify(name.text);
  if (ts.isFunctionDeclaration(node) && !node.body) return []; // an overload: the implementation follows
  if (ts.isClassDeclaration(node)) return makeClassCases(ts, checker, generator, table, node, quoted);
  const symbol = checker.getSymbolAtLocation(name);
  const type = ts.isModuleDeclaration(node) || ts.isEnumDeclaration(node) ? checker.getTypeOfSymbol(symbol) : checker.getTypeAtLocation(name);
  const signatures = ts.isEnumDeclaration(node) ? [] : type.getCallSignatures();
  if (signatures.length === 0) return [`{kind:"value",name:${quoted},plan:${ts.isEnumDeclaration(node) ? -1 : table.add(type)}}`];
  return signatures.flatMap((signature) => {
    const plan = table.add(signature.getReturnType());
    const inputs = [];
    const count = Math.ceil(casesPerFunction / signatures.length); // overloads share the cases
    for (let turn = 0; turn < count; turn += 1) inputs.push(generator.makeArguments(signature, turn));
    inputs.push(...generator.makeCombinations(signature));
    return inputs.map((made) => `{kind:"call",name:${quoted},plan:${plan},make:()=>[${made}]}`);
  });
}

function makeClassCases(ts, checker, generator, table, node, quoted) {
  const instance = checker.getTypeAtLocation(node.name);
  const type = checker.getTypeOfSymbol(instance.symbol);
  const generated = [];
  const statics = table.getMembers(type);
  if (statics.length > 0) {
    const view = table.makeView(type, statics, "object");
    const plan = table.put({ view: { ...view, length: view.steps.length } });
    generated.push(`{kind:"value",name:${quoted},plan:${plan}}`);
  }
  const constructor = type.getConstructSignatures().at(-1);
  const { Private, Protected, Abstract } = ts.ModifierFlags;
  const isMade = constructor?.declaration && ts.getCombinedModifierFlags(constructor.declaration) & (Private | Protected);
  if (isMade || ts.getCombinedModifierFlags(node) & Abstract) return generated;
  const plan = table.add(instance);
  for (let turn = 0; turn < CASES_PER_CLASS; turn += 1) {
    const made = constructor ? generator.makeArguments(constructor, turn) : "";
    generated.push(`{kind:"class",name:${quoted},plan:${plan},make:()=>[${made}]}`);
  }
  return generated;
}

module.exports = { makeCases };
