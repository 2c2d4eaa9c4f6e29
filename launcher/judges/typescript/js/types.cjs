// Compares the types that an answer and a reference declare, by structure.
"use strict";

const MAX_DEPTH = 24;

// Names and quoted text; names that a type itself declares.
const TOKEN = /"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[A-Za-z_$][\w$]*/g;
const BOUND = /\[([A-Za-z_$][\w$]*) in |\binfer ([A-Za-z_$][\w$]*)/g;

class TooDeep extends Error {}

// Returns the description of each interface and type alias of a reference by name; null if there is none, and
// undefined if one of them is nested too deeply.
function describeTypes(source) {
  const { ts, file, start } = source;
  const isType = (node) => ts.isInterfaceDeclaration(node) || ts.isTypeAliasDeclaration(node);
  const nodes = file.statements.filter((node) => isType(node) && node.end > start);
  try {
    return nodes.length > 0 ? nodes.map((node) => [node.name.text, describeDeclaration(source, node)]) : null;
  } catch (error) {
    if (!(error instanceof TooDeep)) throw error;
    return undefined;
  }
}

// Returns the first difference of an answer's types, or empty.
function compareTypes(source, expected) {
  const { ts, file } = source;
  const isType = (node) => ts.isInterfaceDeclaration(node) || ts.isTypeAliasDeclaration(node) || ts.isClassDeclaration(node);
  for (const [name, description] of expected) {
    const node = file.statements.find((one) => isType(one) && one.name?.text === name);
    if (!node) return `does not declare ${name}`;
    try {
      if (describeDeclaration(source, node) !== description) return `${name} is a different type`;
    } catch (error) {
      if (!(error instanceof TooDeep)) throw error;
      return `${name} is a different type`;
    }
  }
  return "";
}

function describeDeclaration({ ts, checker }, node) {
  const parameters = (node.typeParameters ?? []).map((one) => checker.getTypeAtLocation(one));
  const describer = new Describer(ts, checker, parameters);
  const inner = (type) => (type ? describer.describe(type, []) : null);
  const constraints = (node.typeParameters ?? []).map((one, index) => [
    inner(parameters[index].getConstraint()),
    inner(parameters[index].getDefault()),
    (one.modifiers ?? []).map((modifier) => modifier.getText()),
  ]);
  return JSON.stringify([constraints, inner(checker.getTypeAtLocation(node.name))]);
}

// Every name is a string of its own in a nested list, so that no name can look like a part of the structure.
class Describer {
  constructor(ts, checker, parameters) {
    Object.assign(this, { ts, checker, parameters });
  }

  describe(type, above) {
    const { ts, checker } = this;
    const { TypeFlags } = ts;
    if (this.parameters.includes(type)) return ["parameter", this.parameters.indexOf(type)];
    if (above.includes(type)) return ["above", above.indexOf(type)];
    if (above.length > MAX_DEPTH) throw new TooDeep();
    const inner = (part) => this.describe(part, [...above, type]);
    if (type.isStringLiteral() || type.isNumberLiteral()) return ["literal", type.value];
    if (type.isUnion()) return ["union", ...[...new Set(type.types.map((one) => JSON.stringify(inner(one))))].sort()];
    if (checker.isTupleType(type)) {
      const { elementFlags, readonly } = type.target;
      return ["tuple", readonly, checker.getTypeArguments(type).map((one, index) => [elementFlags[index], inner(one)])];
    }
    if (type.flags & TypeFlags.Object && type.objectFlags & ts.ObjectFlags.Mapped) {
      const text = this.render(type); // its keys are not known: the properties say nothing
      if (text.isGeneric) return ["mapped", text.value];
    }
    const isOfLibrary = type.symbol?.declarations?.[0]?.getSourceFile().hasNoDefaultLib;
    if (isOfLibrary && type.flags & TypeFlags.Object && !(type.objectFlags & ts.ObjectFlags.Mapped)) {
      return ["library", type.symbol.name, checker.getTypeArguments(type).map(inner)];
    }
    if (!(type.flags & (TypeFlags.Object | TypeFlags.Intersection))) {
      return ["text", this.render(type).value];
    }
    return ["object", this.describeProperties(type, inner), this.describeIndices(type, inner), this.describeCalls(type, inner)];
  }

  // Returns the text of a type, in which type parameters have numbers for names.
  render(type) {
    const { NoTruncation, InTypeAlias, UseFullyQualifiedType } = this.ts.TypeFormatFlags;
    const text = this.checker.typeToString(type, undefined, NoTruncation | InTypeAlias | UseFullyQualifiedType);
    const names = new Map(this.parameters.map((one, index) => [one.symbol.name, `#${index}`]));
    const isGeneric = [...text.matchAll(TOKEN)].some(([token]) => names.has(token));
    for (const [, mapped, inferred] of text.matchAll(BOUND)) names.set(mapped ?? inferred, `##${names.size}`);
    return { value: text.replace(TOKEN, (token) => names.get(token) ?? token), isGeneric };
  }

  describeProperties(type, inner) {
    const { ts, checker } = this;
    const properties = checker.getPropertiesOfType(type).map((property) => {
      const flags = ts.getDeclarationModifierFlagsFromSymbol(property);
      const { GetAccessor, SetAccessor } = ts.SymbolFlags;
      const isGetter = Boolean(property.flags & GetAccessor) && !(property.flags & SetAccessor);
      const isReadonly = Boolean(isGetter || flags & ts.ModifierFlags.Readonly || ts.getCheckFlags(property) & 8);
      const isHidden = Boolean(flags & (ts.ModifierFlags.Private | ts.ModifierFlags.Protected));
      const isOptional = Boolean(property.flags & ts.SymbolFlags.Optional);
      return JSON.stringify([property.name.replace(/^(__@\w+)@\d+$/, "$1"), isReadonly, isOptional, isHidden, inner(checker.getTypeOfSymbol(property))]);
    });
    return properties.sort();
  }

  describeIndices(type, inner) {
    const infos = this.checker.getIndexInfosOfType(type);
    return infos.map((info) => JSON.stringify([info.isReadonly, inner(info.keyType), inner(info.type)])).sort();
  }

  describeCalls(type, inner) {
    const { ts, checker } = this;
    const outer = this.parameters;
    const isConst = (one) => Boolean(one.symbol.declarations?.some((node) => node.modifiers?.some((it) => it.kind === ts.SyntaxKind.ConstKeyword)));
    const describeCall = (signature, isNew) => {
      this.parameters = [...outer, ...(signature.typeParameters ?? [])];
      const own = (signature.typeParameters ?? []).map((one) => [isConst(one), one.getConstraint() ? inner(one.getConstraint()) : null]);
      const owner = signature.thisParameter ? inner(checker.getTypeOfSymbol(signature.thisParameter)) : null;
      const isAbstract = Boolean(signature.flags & ts.SignatureFlags.Abstract);
      const parameters = signature.getParameters().map((one) => {
        const node = one.valueDeclaration;
        const isOptional = Boolean(one.flags & ts.SymbolFlags.Optional || node?.questionToken || node?.initializer);
        return [isOptional, Boolean(node?.dotDotDotToken), inner(checker.getTypeOfSymbol(one))];
      });
      const predicate = checker.getTypePredicateOfSignature(signature);
      const judged = predicate ? [predicate.kind, predicate.parameterIndex ?? -1, predicate.type ? inner(predicate.type) : null] : null;
      const described = [isNew, isAbstract, own, owner, parameters, judged, inner(signature.getReturnType())];
      this.parameters = outer;
      return JSON.stringify(described);
    };
    const list = (kind, isNew) => checker.getSignaturesOfType(type, kind).map((one) => describeCall(one, isNew));
    return [...list(ts.SignatureKind.Call, false), ...list(ts.SignatureKind.Construct, true)];
  }
}

module.exports = { compareTypes, describeTypes };
