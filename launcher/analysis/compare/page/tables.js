// Sortable tables, the bars of the time breakdown, and the settings.

// heads: {title, isNumber}; rows: {run, name, cells: [{text, sort, kind}]}
function makeTable(caption, heads, rows) {
  const body = make("tbody");
  const all = [{ title: "run", isNumber: false }, ...heads];
  const headRow = make("tr");
  const order = { column: null, isDown: false };
  const columns = all.map((head, column) => {
    const arrow = make("span", { class: "arrow", "aria-hidden": "true" });
    const button = make("button", { type: "button", text: head.title });
    button.append(" ", arrow);
    const cell = make("th", { scope: "col", "aria-sort": "none", class: head.isNumber ? "number" : "" }, button);
    button.addEventListener("click", () => {
      sortBy(column, order.column === column && !order.isDown);
    });
    headRow.append(cell);
    return { cell, arrow };
  });
  const lines = rows.map((row, position) => {
    const line = make("tr", { "data-run": row.run },
      make("th", { scope: "row", title: row.name }, makeSwatch(row.run, state.theme), " ", make("bdi", { text: row.name })));
    row.cells.forEach((cell, at) => {
      line.append(make("td", { class: [all[at + 1].isNumber ? "number" : "", cell.kind ?? ""].join(" ").trim(), text: cell.text }));
    });
    body.append(line);
    return { line, position, keys: [row.name, ...row.cells.map((cell) => cell.sort ?? null)] };
  });

  function sortBy(column, isDown) {
    Object.assign(order, { column, isDown });
    const sorted = [...lines].sort((a, b) => compareKeys(a.keys[column], b.keys[column], isDown) || a.position - b.position);
    body.append(...sorted.map(({ line }) => line));
    columns.forEach(({ cell, arrow }, at) => {
      cell.setAttribute("aria-sort", at === column ? (isDown ? "descending" : "ascending") : "none");
      arrow.textContent = at === column ? (isDown ? "▼" : "▲") : "";
    });
  }

  return make("table", {}, make("caption", { class: "unseen", text: caption }), make("thead", {}, headRow), body);
}

// Runs are columns; the button of a row sorts them by that result, the first cell restores their order. Two or three
// runs have two tables side by side.
function makeFigures() {
  const makeHead = () => ({
    line: make("tr", {}, make("th", { scope: "col" }, make("button", { type: "button", text: "result", title: "restore the order of the runs" })),
      ...runs.map((run, index) => make("th", { scope: "col", "data-run": index, title: run.name }, makeSwatch(index, state.theme), make("bdi", { text: run.name })))),
    keys: [...runs.keys()], better: null,
  });
  const lines = [];
  const addRow = (title, note, better, keys, cellOf) => {
    const arrow = make("span", { class: "arrow", "aria-hidden": "true" });
    const button = make("button", { type: "button", text: title, class: title.startsWith("eval/") ? "name" : "", title: note });
    button.append(" ", arrow);
    const line = make("tr", {}, make("th", { scope: "row", "aria-sort": "none" }, button), ...runs.map((_, index) => cellOf(index)));
    lines.push({ line, keys, better, arrow });
  };
  addRow("status", "", null, runs.map(({ status }) => status), (index) => make("td", { class: "number", "data-run": index, text: runs[index].status }));
  if (new Set(runs.map((run) => run.data_group)).size > 1) {
    addRow("data", "losses are comparable within a data group", null, runs.map((run) => run.data_group),
      (index) => make("td", { class: runs[index].data_group ? "number" : "number void", "data-run": index, text: runs[index].data_group ?? "unknown" }));
  }
  for (const figure of comparison.figures) {
    const note = [figure.note, figure.better ? `${figure.better} is better` : ""].filter(Boolean).join("; ");
    addRow(figure.title, note, figure.better, figure.values, (index) => makeFigureCell(figure, index));
  }
  const half = runs.length <= 3 ? Math.ceil(lines.length / 2) : lines.length;
  const parts = [lines.slice(0, half), lines.slice(half)].filter((part) => part.length);
  const heads = parts.map(makeHead);
  lines.push(...heads);
  const order = { line: null, isDown: false };
  lines.forEach(({ line, keys, better, arrow: isResult }) => {
    line.querySelector("button").addEventListener("click", () => {
      Object.assign(order, { isDown: order.line === line && isResult ? !order.isDown : better === "higher", line });
      const sorted = [...runs.keys()].sort((one, other) => compareKeys(keys[one], keys[other], order.isDown) || one - other);
      for (const { line: cells, arrow } of lines) {
        cells.append(...sorted.map((index) => cells.querySelector(`:scope > [data-run="${index}"]`)));
        if (!arrow) continue;
        const isSorted = cells === line;
        cells.firstChild.setAttribute("aria-sort", isSorted ? (order.isDown ? "descending" : "ascending") : "none");
        arrow.textContent = isSorted ? (order.isDown ? "▶" : "◀") : "";
      }
    });
  });
  const box = byId("figures-table");
  box.style.setProperty("--runs", runs.length);
  if (runs.length > 8) box.classList.add("many");
  box.append(...parts.map((part, at) => make("table", {}, make("caption", { class: "unseen", text: "Results" }),
    make("thead", {}, heads[at].line), make("tbody", {}, ...part.map(({ line }) => line)))));
  byId("figures-note").textContent = comparison.about_best;
}

function makeFigureCell(figure, index) {
  const value = figure.values[index];
  const best = figure.best[index];
  const interval = figure.intervals[index] ?? null;
  const cell = make("td", { class: `number ${best ? "best" : value === null ? "void" : ""}`.trim(), "data-run": index, text: formatResult(figure, value) });
  const words = best ? `best of ${best} comparable runs` : "";
  if (best) cell.append(make("span", { text: " ★", "aria-hidden": "true" }), make("span", { class: "unseen", text: ` ${words}` }));
  if (figure.ties.includes(index)) cell.append(make("span", { class: "tie", text: " tie" }));
  if (interval) cell.append(make("small", { class: "range", text: `(${formatInterval(interval)})` }));
  cell.title = [words, interval && `${interval.num_rows.toLocaleString("en")} answers judged; 95 %: ${formatInterval(interval)}`].filter(Boolean).join("; ");
  return cell;
}

// Missing values are last in both directions.
function compareKeys(one, other, isDown) {
  if (one === null || other === null) return (one === null) - (other === null);
  const by = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
  return isDown ? -by : by;
}

// The same number of digits for all runs.
function formatResult({ key, unit, metric }, value) {
  if (value === null) return DASH;
  if (key === "cost") return `${value.toFixed(2)} ${unit}`.trim();
  if (unit === "share") return `${key === "prediction_error" && value > 0 ? "+" : ""}${(100 * value).toFixed(1)} %`;
  if (unit.startsWith("tokens")) return formatCount(value, (text) => text);
  if ((key ?? metric).includes("loss")) return value.toPrecision(4);
  return formatValue(value, unit);
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
      const label = percent >= 14 ? `${part} ` : "";
      if (percent >= 6) piece.textContent = `${label}${Math.round(percent)} %`;
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
    ? equal + (runs.length > 2 ? " Bold: differs from most runs." : "") : `${equal} No setting differs.`;
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
