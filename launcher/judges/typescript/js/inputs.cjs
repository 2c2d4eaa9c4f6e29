// Generates values of a type as JavaScript source, deterministically for the same code.
"use strict";

const MAX_NODES = 3000; // of one value
const MAX_DEPTH = 5;
const WORDS = ["Amber", "Birch", "Cedar", "Dune", "", "  "];
// Whole strings, not parts of a value: words in one string, palindromes, other scripts, one longer than usual limits.
const TEXTS = ["amber", "AMBER birch", " two  words here ", "A man, a plan, a canal: Panama", "level", "12", "a-b_c.d", "Éa😀b", "x".repeat(130)];
// The first and the last in order are there twice, so that the largest and the smallest item of a list are often not alone.
const NUMBERS = [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, -1, -4, -4, 2.5];
const BIG = ["0n", "1n", "2n", "3n", "5n", "8n", "12n", "20n", "-2n"];
const DATES = ["2001-02-03", "2012-12-31", "2013-01-01", "2024-02-29"];
const ANYTHING = ["null", "undefined", "0", "7", '""', '"x"', "true", "[]", "[1]", "{}", "own(() => 1)"];

class Unsupported extends Error {}

// Returns the literals of code, except those in types: `Film["city"]` names a property.
function collectLiterals(ts, file, start) {
  const literals = { numbers: new Set(), strings: new Set() };
  const visit = (node) => {
    if (ts.isLiteralTypeNode(node) || node.end <= start) return;
    const isNegative = ts.isPrefixUnaryExpression(node) && node.operator === ts.SyntaxKind.MinusToken;
    if (isNegative && ts.isNumericLiteral(node.operand)) return void literals.numbers.add(-Number(node.operand.text));
    if (ts.isNumericLiteral(node)) literals.numbers.add(Number(node.text));
    if (ts.isStringLiteralLike(node) && node.text.length < 100) literals.strings.add(node.text);
    ts.forEachChild(node, visit);
  };
  ts.forEachChild(file, visit);
  return { numbers: [...literals.numbers].slice(0, 40), strings: [...literals.strings].slice(0, 40) };
}

// Returns values equal to, above and below a number.
const around = (number) => [number, number, number + 1, number - 1, number + 0.01, number - 0.01];

// Returns strings that start with, end with, contain, precede and follow a string.
function near(text) {
  const date = /^(\d{4})-(?:(\d\d)-(\d\d))?$/.exec(text);
  if (!date) return [text, text, `${text}x`, `A${text}`, `A${text}x`, text.slice(0, -1), text.toUpperCase()];
  const [year, rest] = [Number(date[1]), text.slice(4)];
  if (!date[2]) return [`${year}-05-17`, `${year}-01-01`, `${year - 1}-12-31`, `${year + 1}-01-01`, `1-${year}-`];
  const last = (Number(date[3]) % 28) + 1;
  return [text, text, `${year - 1}${rest}`, `${year + 1}${rest}`, `${text.slice(0, 8)}${String(last).padStart(2, "0")}`];
}

const isText = (code) => typeof code === "string" && code.startsWith('"');

// Returns strings that are equal to another one, or would be if case, order or white space did not count.
function alike(text) {
  const reversed = [...text].reverse().join("");
  return [text, text.toUpperCase(), text.toLowerCase(), reversed, ` ${text} `, text.slice(1), text.slice(0, 2)];
}

class InputGenerator {
  constructor(ts, checker, theirs, mine) {
    Object.assign(this, { ts, checker, nodes: 0, count: 0, turn: 0, caller: null, state: 12345, decks: new Map() });
    this.numbers = [NUMBERS, theirs.numbers.flatMap(around), mine.numbers.flatMap(around)];
    this.strings = [WORDS, theirs.strings.flatMap(near), mine.strings.flatMap(near)];
    const counts = [...theirs.numbers, ...mine.numbers].filter((one) => Number.isInteger(one) && one > 0 && one <= 30);
    this.lengths = [0, 1, 2, 4, 7, ...counts.slice(0, 3).map((one) => one + 3), 12];
    this.literals = [[...mine.numbers, ...theirs.numbers].slice(0, 3), [...mine.strings, ...theirs.strings].slice(0, 4)];
    this.given = [[], []];
  }

  // Yields arguments in which the first two numbers and strings are near literals, in all combinations: conditions on
  // two values at once are rarely met by independent draws.
  *makeCombinations(signature) {
    const [numbers, strings] = [this.literals[0].flatMap((one) => [one + 1, one - 1]), this.literals[1]];
    for (let turn = 0; turn < Math.max(numbers.length, strings.length) ** 2; turn += 1) {
      const take = (list) => [list[turn % list.length], list[Math.floor(turn / list.length) % list.length]];
      this.given = [numbers, strings].map((list) => (list.length > 0 ? take(list) : []));
      const count = this.given.flat().length;
      const made = this.makeArguments(signature, turn);
      if (count - this.given.flat().length > 1) yield made;
    }
    this.given = [[], []];
  }

  below(limit) {
    this.state = (Math.imul(this.state, 1664525) + 1013904223) >>> 0;
    return Math.floor((this.state / 2 ** 32) * limit);
  }

  pick(list) {
    return list[this.below(list.length)];
  }

  // Takes each element once in random order, then again: independent draws would miss some.
  deal(list) {
    const deck = this.decks.get(list) ?? [];
    if (deck.length === 0) deck.push(...list);
    this.decks.set(list, deck);
    return deck.splice(this.below(deck.length), 1)[0];
  }

  // Draws mostly near literals of the code.
  draw([base, theirs, mine]) {
    const roll = this.below(100);
    if (roll < 40 && mine.length > 0) return this.deal(mine);
    return roll < (mine.length > 0 ? 75 : 50) && theirs.length > 0 ? this.deal(theirs) : this.deal(base);
  }

  makeArguments(signature, turn) {
    return this.makeArgumentList(signature, turn).join(",");
  }

  makeArgumentList(signature, turn) {
    Object.assign(this, { nodes: 0, turn, caller: signature });
    const judged = this.checker.getTypePredicateOfSignature(signature);
    const parameters = signature.getParameters();
    const made = parameters.map((one, index) => {
      const type = this.checker.getTypeOfSymbol(one);
      const isOpen = type.flags & (this.ts.TypeFlags.Unknown | this.ts.TypeFlags.Any);
      if (isOpen && judged?.type && judged.parameterIndex === index) return this.makeSuspect(judged.type);
      const isRest = one.valueDeclaration?.dotDotDotToken;
      return isRest ? `...${this.make(type, 0, one.name)}` : this.make(type, 0, one.name);
    });
    const isOptional = (one) => one?.valueDeclaration?.questionToken || one?.valueDeclaration?.initializer;
    while (made.length > 0 && isOptional(parameters[made.length - 1]) && this.below(3) === 0) made.pop();
    const [first, second] = made;
    if (isText(first) && isText(second) && this.below(3) === 0) made[1] = JSON.stringify(this.pick(alike(JSON.parse(first))));
    return made;
  }

  // Returns an input for a type guard: of that type, almost of it, or anything.
  makeSuspect(type) {
    const roll = this.below(10);
    if (roll < 3) return this.pick(ANYTHING);
    return roll < 5 ? this.make(type, 0, "") : `spoil(${this.make(type, 0, "")},${this.below(1000)})`;
  }

  make(type, depth, name) {
    const { TypeFlags: flags } = this.ts;
    this.nodes += 1;
    if (this.nodes > MAX_NODES) throw new Unsupported("too large");
    const has = (wanted) => (type.flags & wanted) !== 0;
    if (has(flags.Any | flags.Unknown)) return this.pick(ANYTHING);
    if (has(flags.StringLiteral | flags.NumberLiteral)) return JSON.stringify(type.value);
    if (has(flags.BooleanLiteral)) return this.checker.typeToString(type);
    if (has(flags.String)) return this.makeString(name, depth);
    if (has(flags.Number)) return this.makeNumber(name);
    if (has(flags.BigInt)) return this.pick(BIG);
    if (has(flags.Null)) return "null";
    if (has(flags.Undefined | flags.Void)) return "undefined";
    if (type.isUnion()) return this.make(this.pick(this.sortTypes(type.types)), depth, name);
    if (has(flags.TypeParameter)) return this.makeParameter(type, depth, name);
    if (has(flags.Object | flags.Intersection)) return this.makeObject(type, depth);
    throw new Unsupported(this.checker.typeToString(type));
  }

  // The compiler's own order depends on what it has seen before.
  sortTypes(types) {
    const keyed = types.map((one) => [this.checker.typeToString(one), one]);
    return keyed.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0)).map(([, one]) => one);
  }

  makeString(name, depth = 1) {
    if (/id$/i.test(name) || (/key$|^k$/i.test(name) && this.below(3) > 0)) return `"k${this.below(4)}"`;
    if (/(on|at|date|day|until|end)$/i.test(name) && this.below(2)) return JSON.stringify(this.pick(DATES));
    if (this.given[1].length > 0) return JSON.stringify(this.given[1].pop());
    return JSON.stringify(this.below(10) < (depth === 0 ? 3 : 1) ? this.deal(TEXTS) : this.draw(this.strings));
  }

  makeNumber(name) {
    return String(/id$/i.test(name) || (/key$/i.test(name) && this.below(3) > 0) ? this.below(4) : (this.given[0].pop() ?? this.draw(this.numbers)));
  }

  // An extra property distinguishes two otherwise equal values.
  makeParameter(type, depth, name) {
    const limit = this.checker.getBaseConstraintOfType(type);
    if (!limit || limit.flags & this.ts.TypeFlags.Unknown) return this.makeString(name, depth);
    const made = this.make(limit, depth, name);
    this.count += 1;
    return made.startsWith("{") ? `{extra:${this.count},${made.slice(1)}` : made;
  }

  makeObject(type, depth) {
    const { checker } = this;
    const inside = () => checker.getTypeArguments(type).map((part) => () => this.make(part, depth + 1, ""));
    if (depth > MAX_DEPTH) throw new Unsupported("too deep");
    if (checker.isTupleType(type)) return `[${inside().map((one) => one()).join(",")}]`;
    if (checker.isArrayType(type)) return `[${this.repeat(inside()[0], depth)}]`;
    const isOfLibrary = type.symbol?.declarations?.[0]?.getSourceFile().hasNoDefaultLib;
    if (isOfLibrary && !(type.objectFlags & this.ts.ObjectFlags.Mapped)) return this.makeOfLibrary(type, inside(), depth);
    const call = type.getCallSignatures()[0];
    if (call) return this.makeFunction(call, depth);
    if (type.getConstructSignatures().length > 0 || type.isClass()) throw new Unsupported("a class");
    return this.makeProperties(type, depth);
  }

  repeat(makeOne, depth) {
    const length = depth === 0 ? this.lengths[this.turn % this.lengths.length] : this.below(4);
    return Array.from({ length }, makeOne).join(",");
  }

  makeOfLibrary(type, inside, depth) {
    switch (type.symbol.name) {
      case "Date":
        return `new Date(${JSON.stringify(this.pick(DATES))})`;
      case "Promise":
        return `Promise.resolve(${inside[0]()})`;
      case "Map":
      case "ReadonlyMap":
        return `new Map([${this.repeat(() => `[${inside[0]()},${inside[1]()}]`, depth)}])`;
      case "Set":
      case "ReadonlySet":
        return `new Set([${this.repeat(inside[0], depth)}])`;
      case "Iterable":
        return `[${this.repeat(inside[0], depth)}]`;
      case "AsyncIterable":
        return `(async function* () { yield* [${this.repeat(inside[0], depth)}]; })()`;
      case "Error":
        return `new Error(${this.makeString("")})`;
      case "RegExp":
        return this.pick(["/a/", "/^[A-Z]/i", "/\\d+/g"]);
      case "Uint8Array":
        return `new Uint8Array([${this.repeat(() => this.below(256), depth)}])`;
      default:
        throw new Unsupported(type.symbol.name);
    }
  }

  makeProperties(type, depth) {
    const parts = [];
    for (const property of this.checker.getPropertiesOfType(type)) {
      if (property.flags & this.ts.SymbolFlags.Optional && this.below(3) === 0) continue;
      const made = this.make(this.checker.getTypeOfSymbol(property), depth + 1, property.name);
      parts.push(`${JSON.stringify(property.name)}:${made}`);
    }
    for (const info of this.checker.getIndexInfosOfType(type)) {
      for (const key of ["Amber", "Birch", "k1"].slice(0, this.below(4))) {
        parts.push(`${JSON.stringify(key)}:${this.make(info.type, depth + 1, "")}`);
      }
    }
    return `{${parts.join(",")}}`;
  }

  // The function returns the same result for the same arguments. Every fourth promise rejects. A function without a
  // result is called for its effect: its calls are recorded. A function without parameters returns something else at
  // each call, and may fail at first; one that is wrapped (`memoize`) does if it is called again with the same arguments.
  makeFunction(signature, depth) {
    const type = signature.getReturnType();
    const isPromise = type.symbol?.name === "Promise";
    this.count += 1;
    const { Void, Undefined } = this.ts.TypeFlags;
    if (type.flags & (Void | Undefined)) return `note(${this.count},()=>undefined)`;
    if (isPromise && this.checker.getTypeArguments(type)[0]?.flags & Void) return `note(${this.count},()=>Promise.resolve())`;
    if (isPromise && this.below(4) === 0) return 'own(() => Promise.reject(new Error("no")))';
    const isOrder = type.flags & this.ts.TypeFlags.Number && signature.getParameters().length === 2;
    if (isOrder && !this.isWrapped(signature)) return "order";
    const made = [0, 1, 2].map(() => `() => ${wrap(this.make(type, depth + 1, ""))}`);
    if (signature.getParameters().length === 0) {
      const failures = this.below(2) * this.below(4);
      const fail = isPromise ? '() => Promise.reject(new Error("not yet"))' : '() => { throw new Error("not yet"); }';
      return `vary([${[...Array(failures).fill(fail), ...made].join(",")}],0)`;
    }
    // It ignores arguments that its type does not have, such as the index that Array.map passes.
    const isRest = signature.getParameters().some((one) => one.valueDeclaration?.dotDotDotToken);
    const arity = isRest ? "Infinity" : signature.getParameters().length;
    return `${this.isWrapped(signature) ? "vary" : "choose"}([${made.join(",")}],${arity})`;
  }

  // Whether the function under test returns a function with the parameters of this one.
  isWrapped(signature) {
    const { checker } = this;
    const result = this.caller?.getReturnType();
    const returned = result && (checker.getBaseConstraintOfType(result) ?? result).getCallSignatures().at(-1);
    const show = (one) => one.getParameters().map((part) => checker.typeToString(checker.getTypeOfSymbol(part))).join();
    return Boolean(returned) && show(returned) === show(signature);
  }
}

const wrap = (code) => `(${code})`;

module.exports = { InputGenerator, Unsupported, collectLiterals };
