// Neo4j's own analyser, made ready to be evaluated as a plain script: in a bare context of Node, or in mini-racer.
// The file of the package is a module that exports two functions under other names than its own.

function makeScript(source) {
  const exported = /export\s*\{([^}]*)\}\s*;?\s*$/.exec(source);
  const analyse = exported && /([\w$]+)\s+as\s+analyzeQuery/.exec(exported[1]);
  if (!analyse) throw new Error("no analyzeQuery is exported");
  return (
    // inside a function: a context's own globals are slow to reach
    "(() => {" +
    source.slice(0, exported.index) +
    `
;globalThis.firstFault = (query) => {
  const errors = ${analyse[1]}(query, "CYPHER 5").errors;
  return errors.length ? String(errors[0].message).slice(0, 300) : "";
};
})();`
  );
}
