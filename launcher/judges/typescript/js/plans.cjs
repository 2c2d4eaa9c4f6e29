// Plans how results of a type are observed: which functions and methods are called with which arguments, what is
// iterated, which properties are shown. The realm applies them; see `inspect` in realm.cjs.
"use strict";

const { Unsupported } = require("./inputs.cjs");

const CALLS_PER_FUNCTION = 4; // and as many whose first argument is that of the call before
const STEPS = { class: 96, object: 24 };
const STEPS_PER_VALUE = { class: 20, object: 8 };
const SYNC = ["Iterable", "Iterator", "IterableIterator", "Generator", "ArrayIterator", "MapIterator", "SetIterator", "IteratorObject"];
const ASYNC = ["AsyncIterable", "AsyncIterator", "AsyncIterableIterator", "AsyncGenerator", "AsyncIteratorObject"];
const PROMISES = ["Promise", "PromiseLike"];

class PlanTable {
  // `start` is the index of the first plan, after those of another table.
  constructor(ts, checker, generator, start) {
    Object.assign(this, { ts, checker, generator, start, indices: new Map(), needed: new Map(), plans: [] });
  }

  put(plan) {
    return this.start + this.plans.push(plan) - 1;
  }

  // Returns the index of the plan of a type; -1 if its values are data only.
  add(type) {
    const resolved = this.resolve(type);
    if (!this.needsPlan(resolved)) return -1;
    if (!this.indices.has(resolved)) {
      const index = this.put({});
      this.indices.set(resolved, index); // before its parts: types are recursive
      this.plans[index - this.start] = this.make(resolved);
    }
    return this.indices.get(resolved);
  }

  render() {
    return `[${this.plans.map(renderPlan).join(",\n")}]`;
  }

  resolve(type) {
    const { TypeFlags } = this.ts;
    const isOpen = type.flags & (TypeFlags.TypeParameter | TypeFlags.IndexedAccess | TypeFlags.Conditional);
    return (isOpen && this.checker.getBaseConstraintOfType(type)) || type;
  }

  isOfLibrary(type) {
    const isMapped = type.objectFlags & this.ts.ObjectFlags.Mapped;
    return !isMapped && Boolean(type.symbol?.declarations?.some((one) => one.getSourceFile().hasNoDefaultLib));
  }

  iterates(type) {
    const isSymbol = (name) => this.checker.getPropertiesOfType(type).some((one) => one.escapedName.startsWith(`__@${name}@`));
    return isSymbol("asyncIterator") ? "async" : isSymbol("iterator") ? "sync" : undefined;
  }

  needsPlan(type) {
    const { TypeFlags } = this.ts;
    const parts = (types) => types.some((one) => this.needsPlan(this.resolve(one)));
    if (this.needed.has(type)) return this.needed.get(type);
    this.needed.set(type, false); // of a type within itself
    const decide = () => {
      if (type.isUnion()) return parts(type.types);
      if (!(type.flags & (TypeFlags.Object | TypeFlags.Intersection))) return false;
      const isDirect = type.getCallSignatures().length > 0 || type.getConstructSignatures().length > 0;
      if (isDirect || type.symbol?.flags & this.ts.SymbolFlags.Class) return true;
      if (this.checker.isArrayType(type) || this.checker.isTupleType(type)) return parts(this.checker.getTypeArguments(type));
      if (this.isOfLibrary(type)) {
        const isActive = [...SYNC, ...ASYNC, ...PROMISES].includes(type.symbol.name);
        return isActive || parts(this.checker.getTypeArguments(type));
      }
      if (this.iterates(type)) return true;
      const values = this.checker.getIndexInfosOfType(type).map((info) => info.type);
      return parts([...this.checker.getPropertiesOfType(type).map((one) => this.checker.getTypeOfSymbol(one)), ...values]);
    };
    const isNeeded = decide();
    this.needed.set(type, isNeeded);
    return isNeeded;
  }

  make(type) {
    try {
      return type.isUnion() ? this.makeUnion(type) : this.makeObject(type);
    } catch (error) {
      if (!(error instanceof Unsupported)) throw error;
      return { opaque: `a value that needs ${error.message}` };
    }
  }

  makeUnion(type) {
    const merged = {};
    for (const part of type.types.map((one) => this.resolve(one))) {
      if (!this.needsPlan(part)) continue;
      for (const [key, value] of Object.entries(this.make(part))) {
        if (key === "props" && merged.props) Object.assign(merged.props, value);
        else if (merged[key] !== undefined && JSON.stringify(merged[key]) !== JSON.stringify(value)) return { opaque: "one of several types" };
        else merged[key] = value;
      }
    }
    return merged;
  }

  makeObject(type) {
    const { checker } = this;
    const inside = () => checker.getTypeArguments(type).map((one) => this.add(one));
    if (checker.isTupleType(type)) return { tuple: inside() };
    if (checker.isArrayType(type)) return { items: inside()[0] };
    if (this.isOfLibrary(type) && type.getCallSignatures().length === 0) return this.makeOfLibrary(type, inside());
    const call = type.getCallSignatures().at(-1);
    const isClass = type.symbol?.flags & this.ts.SymbolFlags.Class;
    const members = this.getMembers(type);
    const hasMethods = members.some((one) => this.getCall(one) || one.flags & this.ts.SymbolFlags.Accessor);
    const plan = {};
    if (call) plan.call = this.makeCall(call);
    if (call ? members.length > 0 : isClass || hasMethods) plan.view = this.makeView(type, members, isClass ? "class" : "object");
    if (this.iterates(type)) Object.assign(plan, { iterates: this.iterates(type), items: this.add(this.getItem(type)) });
    if (call || plan.view || plan.iterates) return plan;
    const values = checker.getIndexInfosOfType(type)[0];
    const props = members.map((one) => [one.name, this.add(checker.getTypeOfSymbol(one))]);
    return { props: Object.fromEntries(props), ...(values ? { values: this.add(values.type) } : {}) };
  }

  makeOfLibrary(type, inside) {
    const { name } = type.symbol;
    if (PROMISES.includes(name)) return { promised: inside[0] };
    if (name === "Map" || name === "ReadonlyMap") return { items: inside[0], values: inside[1] };
    if (name === "Set" || name === "ReadonlySet") return { items: inside[0], values: inside[0] };
    if (![...SYNC, ...ASYNC].includes(name)) return { opaque: name };
    const next = this.checker.getTypeArguments(type)[2];
    const { TypeFlags } = this.ts;
    if (next && !(next.flags & (TypeFlags.Any | TypeFlags.Unknown | TypeFlags.Undefined | TypeFlags.Void | TypeFlags.Never))) {
      return { opaque: "a generator that is given values" };
    }
    return { iterates: ASYNC.includes(name) ? "async" : "sync", items: inside[0], isIterator: !name.endsWith("Iterable") };
  }

  getItem(type) {
    const signature = this.checker.getPropertiesOfType(type).find((one) => /^__@(async)?[iI]terator@/.test(one.escapedName));
    const iterator = this.checker.getTypeOfSymbol(signature).getCallSignatures().at(-1)?.getReturnType();
    return (iterator && this.checker.getTypeArguments(iterator)[0]) ?? this.checker.getAnyType();
  }

  // Returns the public members that the code itself declares, not those of built-in classes that it extends.
  getMembers(type) {
    const hidden = this.ts.ModifierFlags.Private | this.ts.ModifierFlags.Protected;
    return this.checker.getPropertiesOfType(type).filter((symbol) => {
      const isHidden = this.ts.getDeclarationModifierFlagsFromSymbol(symbol) & hidden;
      const isOwn = !symbol.declarations?.some((one) => one.getSourceFile().hasNoDefaultLib);
      return !isHidden && isOwn && symbol.name !== "prototype" && !/^(__@|__#|#)/.test(symbol.name);
    });
  }

  getCall(symbol) {
    return this.getCalls(symbol).at(-1);
  }

  getCalls(symbol) {
    return this.checker.getNonNullableType(this.checker.getTypeOfSymbol(symbol)).getCallSignatures();
  }

  makeCall(signature) {
    const lists = [];
    for (let turn = 0; turn < CALLS_PER_FUNCTION; turn += 1) lists.push(this.generator.makeArgumentList(signature, turn + 2));
    const makes = lists.flatMap((list, index) => {
      const next = lists[(index + 1) % lists.length];
      return [list, list.length > 1 && next.length > 1 ? [list[0], ...next.slice(1)] : list];
    });
    return { makes: makes.map((list) => list.join(",")), result: this.add(signature.getReturnType()) };
  }

  // Methods are called in random order, so that one method sees what another has stored.
  makeView(type, members, kind) {
    const steps = [];
    const { Accessor, SetAccessor } = this.ts.SymbolFlags;
    const callable = members.filter((one) => this.getCall(one));
    const settable = members.filter((one) => one.flags & SetAccessor);
    for (let step = 0; step < STEPS[kind] && callable.length + settable.length > 0; step += 1) {
      const member = this.generator.pick([...callable, ...settable]);
      const calls = this.getCalls(member);
      const call = calls.length > 1 ? this.generator.pick(calls) : calls[0];
      const make = call
        ? this.generator.makeArguments(call, step)
        : this.generator.make(this.checker.getTypeOfSymbol(member), 1, member.name);
      steps.push([member.name, make, call ? this.add(call.getReturnType()) : -1, !call]);
    }
    const shown = members
      .filter((one) => !callable.includes(one) || one.flags & Accessor)
      .map((one) => [one.name, this.add(this.checker.getTypeOfSymbol(one))]);
    return { name: kind === "class" ? type.symbol.name : null, shown, steps, length: STEPS_PER_VALUE[kind] };
  }
}

function renderPlan(plan) {
  const parts = Object.entries(plan).map(([key, value]) => {
    if (key === "call") return `call:{makes:[${value.makes.map((one) => `()=>[${one}]`)}],result:${value.result}}`;
    if (key !== "view") return `${key}:${JSON.stringify(value)}`;
    const steps = value.steps.map(([name, make, result, isSet]) => `[${JSON.stringify(name)},()=>[${make}],${result},${isSet}]`);
    return `view:{...${JSON.stringify({ ...value, steps: [] })},steps:[${steps}]}`;
  });
  return `{${parts.join(",")}}`;
}

module.exports = { PlanTable };
