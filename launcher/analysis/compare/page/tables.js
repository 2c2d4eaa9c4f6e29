// Sortable tables, the bars of the time breakdown, and the settings.

// heads: {title, isNumber, note, better}; rows: {run, name, cells: [{text, sort, best, kind, range, tooltip}]}
function makeTable(caption, heads, rows, sortedBy = null) {
  const body = make("tbody");
  const all = [{ title: "run", isNumber: false }, ...heads];
  const headRow = make("tr");
  const order = { column: null, isDown: false };
  const columns = all.map((head, column) => {
    const arrow = make("span", { class: "arrow", "aria-hidden": "true" });
    const button = make("button", { type: "button", text: head.title, class: head.title.startsWith("eval/") ? "name" : "" });
    button.append(" ", arrow);
    if (head.note) button.title = head.note;
    const cell = make("th", { scope: "col", "aria-sort": "none", class: head.isNumber ? "number" : "" }, button);
    button.addEventListener("click", () => {
      const isDown = order.column === column ? !order.isDown : head.better === "higher";
      sortBy(column, isDown);
    });
    headRow.append(cell);
    return { cell, arrow };
  });
  const lines = rows.map((row, position) => {
    const line = make("tr", { "data-run": row.run },
      make("th", { scope: "row", title: row.name }, makeSwatch(row.run, state.theme), " ", make("bdi", { text: row.name })));
    row.cells.forEach((cell, at) => {
      const element = make("td", { class: [all[at + 1].isNumber ? "number" : "", cell.kind ?? ""].join(" ").trim(), text: cell.text });
      if (cell.best) element.append(make("span", { text: " ★", "aria-hidden": "true" }), make("span", { class: "unseen", text: ` best of ${cell.best} comparable runs` }));
      if (cell.range) element.append(make("small", { class: "range", text: cell.range }));
      element.title = [cell.best ? `best of ${cell.best} comparable runs` : "", cell.tooltip ?? ""].filter(Boolean).join("; ");
      line.append(element);
    });
    body.append(line);
    return { line, position, keys: [row.name, ...row.cells.map((cell) => cell.sort ?? null)] };
  });

  // Missing values are last in both directions.
  function sortBy(column, isDown) {
    Object.assign(order, { column, isDown });
    const sorted = [...lines].sort((a, b) => {
      const [one, other] = [a.keys[column], b.keys[column]];
      if (one === null || other === null) return (one === null) - (other === null) || a.position - b.position;
      const by = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
      return (isDown ? -by : by) || a.position - b.position;
    });
    body.append(...sorted.map(({ line }) => line));
    columns.forEach(({ cell, arrow }, at) => {
      cell.setAttribute("aria-sort", at === column ? (isDown ? "descending" : "ascending") : "none");
      arrow.textContent = at === column ? (isDown ? "▼" : "▲") : "";
    });
  }

  if (sortedBy) sortBy(...sortedBy);
  return make("table", {}, make("caption", { class: "unseen", text: caption }), make("thead", {}, headRow), body);
}

function makeFigures() {
  const hasGroups = new Set(runs.map((run) => run.data_group)).size > 1;
  const heads = [{ title: "status" }, ...(hasGroups ? [{ title: "data", note: "losses are comparable within a data group" }] : [])];
  for (const { title, note, better } of comparison.figures) {
    const direction = better ? `${better} is better` : "";
    heads.push({ title, isNumber: true, better, note: [note, direction].filter(Boolean).join("; ") });
  }
  const rows = runs.map((run, index) => {
    const cells = [{ text: run.status, sort: run.status }];
    if (hasGroups) cells.push({ text: run.data_group ?? "unknown", sort: run.data_group, kind: run.data_group ? "" : "void" });
    for (const figure of comparison.figures) {
      const value = figure.values[index];
      const best = figure.best[index];
      const interval = figure.intervals[index] ?? null;
      const tooltip = interval && `${interval.num_rows.toLocaleString("en")} answers graded; 95 %: ${formatInterval(interval)}`;
      cells.push({ text: formatFigure(figure, value), sort: value, best, kind: best ? "best" : value === null ? "void" : "", range: interval && `(${formatInterval(interval)})`, tooltip });
    }
    return { run: index, name: run.name, cells };
  });
  byId("figures-table").append(makeTable("Results", heads, rows));
  byId("figures-note").textContent = comparison.about_best;
}

// The same number of digits in all rows of a column.
function formatFigure(figure, value) {
  if (value === null) return DASH;
  if (figure.key === "cost") return value.toFixed(2);
  if (figure.unit === "share") return `${figure.key === "prediction_error" && value > 0 ? "+" : ""}${(100 * value).toFixed(1)} %`;
  if (figure.unit.startsWith("tokens")) return formatCount(value, (text) => text);
  if (figure.key.includes("loss")) return value.toPrecision(4);
  return formatValue(value, figure.unit);
}

function formatInterval({ low, high }) {
  return `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)}`;
}

function makeShares() {
  const parts = ["training", "data wait", "evaluation", "checkpoints", "compiling", "start", "restarts", "skipped steps", "other"];
  const recorded = runs.map((run, index) => ({ run, index })).filter(({ run }) => run.shares.length);
  if (!recorded.length) return;
  const present = parts.filter((part) => recorded.some(({ run }) => run.shares.some((share) => share.part === part)));
  for (const part of present) byId("share-keys").append(make("li", {}, make("i", { class: `part-${parts.indexOf(part)}` }), part));
  for (const { run, index } of recorded) {
    const total = run.shares.reduce((sum, share) => sum + share.seconds, 0);
    const bar = make("div", { class: "bar", role: "img" });
    const words = [];
    for (const { part, seconds } of run.shares) {
      const percent = (100 * seconds) / total;
      words.push(`${part} ${trim(percent.toPrecision(3))} %`);
      const piece = make("span", { class: `part-${parts.indexOf(part)}`, title: `${part}: ${formatSeconds(seconds)}, ${trim(percent.toPrecision(3))} %` });
      if (percent >= 7) piece.textContent = `${Math.round(percent)} %`;
      piece.style.flex = `${percent} 0 0`;
      bar.append(piece);
    }
    bar.setAttribute("aria-label", `${run.name}: ${words.join(", ")}`);
    byId("share-bars").append(make("div", { class: "share", "data-run": index },
      make("bdi", { text: run.name, title: run.name }), bar, make("span", { class: "quiet", text: formatSeconds(total) })));
  }
  const heads = [...present.map((title) => ({ title, isNumber: true })), { title: "total", isNumber: true }];
  const rows = recorded.map(({ run, index }) => {
    const seconds = present.map((part) => run.shares.find((share) => share.part === part)?.seconds ?? null);
    const all = [...seconds, run.shares.reduce((sum, share) => sum + share.seconds, 0)];
    return { run: index, name: run.name, cells: all.map((value) => ({ sort: value, text: formatValue(value, "s"), kind: value === null ? "void" : "" })) };
  });
  byId("shares-table").append(makeTable("Seconds of each run by activity", heads, rows));
  const estimated = recorded.filter(({ run }) => !run.shares_are_recorded).map(({ run }) => run.name);
  if (estimated.length) {
    const who = estimated.length > 4 ? `${estimated.slice(0, 4).join(", ")} and ${estimated.length - 4} more` : estimated.join(", ");
    byId("shares-note").textContent = `${who}: summed from steps and evaluations, because the run did not record its time breakdown; "other" is the remaining wall-clock time.`;
  }
  byId("shares").hidden = false;
}

function makeSettings() {
  const { settings, num_equal_settings: numEqual } = comparison;
  const equal = `${numEqual.toLocaleString("en")} settings are equal in all runs and not shown.`;
  byId("settings-note").textContent = runs.length === 1 ? "There is only one run." : settings.length
    ? `${equal} Bold: differs from most runs.` : `${equal} No setting differs.`;
  if (!settings.length) return;
  const head = make("tr", {}, make("th", { scope: "col", text: "setting" }),
    ...runs.map((run) => make("th", { scope: "col", title: run.name }, make("bdi", { text: run.name }))));
  const body = make("tbody");
  let section = "";
  for (const setting of settings) {
    if (setting.section !== section) {
      section = setting.section;
      body.append(make("tr", { class: "part" }, make("th", { colspan: runs.length + 1, scope: "colgroup", text: capitalise(section) })));
    }
    const counts = new Map();
    setting.values.forEach((value) => counts.set(value, (counts.get(value) ?? 0) + 1));
    const most = Math.max(...counts.values());
    const hasMajority = most * 2 > setting.values.length;
    body.append(make("tr", {}, make("th", { scope: "row", text: setting.key }), ...setting.values.map((value) =>
      make("td", { class: value === null ? "void" : hasMajority && counts.get(value) < most ? "odd" : "", text: value ?? DASH }))));
  }
  byId("settings-table").append(make("table", {}, make("caption", { class: "unseen", text: "Settings that differ" }), make("thead", {}, head), body));
}
