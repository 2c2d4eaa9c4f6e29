// Compares the types that an answer and a reference declare, by structure.
"use strict";

const MAX_DEPTH = 12;

// Returns the first difference, empty if there is none, null if the reference declares no type.
function compareTypes({ ts, checker, mine, theirs, starts }) {
  const isType = (node) => ts.isInterfaceDeclaration(node) || ts.isTypeAliasDeclaration(node);
  const expected = theirs.statements.filter((node) => isType(node) && node.end > starts.theirs);
  if (expected.length === 0) return null;
  for (const node of expected) {
    const name = node.name.text;
    const other = mine.statements.find((one) => (isType(one) || ts.isClassDeclaration(one)) && one.name?.text === name);
    if (!other) return `does not declare ${name}`;
    const [ours, right] = [other, node].map((one) => describeDeclaration(ts, checker, one));
    if (ours !== right) return `${name} is a different type`;
  }
  return "";
}

function describeDeclaration(ts, checker, node) {
  const type = checker.getTypeAtLocation(node.name);
  return `<${(node.typeParameters ?? []).map((one) => one.getText()).join()}>${describe(ts, checker, type, [])}`;
}

function describe(ts, checker, type, above) {
  const { TypeFlags } = ts;
  const inner = (part) => describe(ts, checker, part, [...above, type]);
  if (above.includes(type)) return `^${above.indexOf(type)}`;
  if (above.length > MAX_DEPTH) return "...";
  if (type.isStringLiteral() || type.isNumberLiteral()) return JSON.stringify(type.value);
  if (type.isUnion()) return `(${[...new Set(type.types.map(inner))].sort().join("|")})`;
  if (checker.isTupleType(type)) return `[${checker.getTypeArguments(type).map(inner).join()}]`;
  const isOfLibrary = type.symbol?.declarations?.[0]?.getSourceFile().hasNoDefaultLib;
  if (isOfLibrary && type.flags & TypeFlags.Object && !(type.objectFlags & ts.ObjectFlags.Mapped)) {
    return `${type.symbol.name}<${checker.getTypeArguments(type).map(inner).join()}>`;
  }
  if (!(type.flags & (TypeFlags.Object | TypeFlags.Intersection))) return checker.typeToString(type);
  const parts = checker.getPropertiesOfType(type).map((property) => {
    const isReadonly =
      ts.getDeclarationModifierFlagsFromSymbol(property) & ts.ModifierFlags.Readonly || ts.getCheckFlags(property) & 8;
    const marks = (isReadonly ? "readonly " : "") + property.name + (property.flags & ts.SymbolFlags.Optional ? "?" : "");
    return `${marks}:${inner(checker.getTypeOfSymbol(property))}`;
  });
  for (const info of checker.getIndexInfosOfType(type)) {
    parts.push(`${info.isReadonly ? "readonly " : ""}[${inner(info.keyType)}]:${inner(info.type)}`);
  }
  for (const [kind, word] of [[ts.SignatureKind.Call, ""], [ts.SignatureKind.Construct, "new "]]) {
    for (const signature of checker.getSignaturesOfType(type, kind)) {
      const parameters = signature.getParameters().map((one) => inner(checker.getTypeOfSymbol(one)));
      parts.push(`${word}(${parameters.join()})=>${inner(signature.getReturnType())}`);
    }
  }
  return `{${parts.sort().join(";")}}`;
}

module.exports = { compareTypes };
