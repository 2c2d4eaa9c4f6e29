// Converts Neo4j's analyser to a plain script, which runs in an empty Node.js context or in mini-racer.
// The package's file is a module that exports two functions under other names.

function makeScript(source) {
  const exported = /export\s*\{([^}]*)\}\s*;?\s*$/.exec(source);
  const analyse = exported && /([\w$]+)\s+as\s+analyzeQuery/.exec(exported[1]);
  if (!analyse) throw new Error("no analyzeQuery is exported");
  return (
    // inside a function, because globals of a context are slow
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
