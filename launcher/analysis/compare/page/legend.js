// The runs with their line styles: one button shows or hides a run in all charts, another shows only that run.

function describeRun(run) {
  const total = run.num_steps === null ? "" : `/${run.num_steps.toLocaleString("en")}`;
  const progress = run.status === "done" || run.status === "not started" ? "" : ` ${run.steps_done.toLocaleString("en")}${total}`;
  const group = run.data_group && new Set(runs.map(({ data_group: group }) => group)).size > 1 ? ` · data ${run.data_group}` : "";
  const where = run.card ? ` · ${run.card.replace(/^GeForce /, "")}` : "";
  return `${run.status}${progress}${group}${where}`;
}

function makeLegend() {
  const list = byId("legend");
  if (runs.length <= 6) list.classList.add("few");
  runs.forEach((run, index) => {
    const button = make("button", { type: "button", class: "run", "aria-pressed": "true", "data-run": index, title: `${run.name}\n${run.place}` },
      makeSwatch(index, state.theme), make("bdi", { text: run.name }), make("small", { text: describeRun(run) }));
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      legendChanged();
    });
    const only = make("button", { type: "button", class: "only", text: "only" });
    only.setAttribute("aria-label", `show only ${run.name}`);
    only.addEventListener("click", () => {
      const isAlone = state.hidden.size === runs.length - 1 && !state.hidden.has(index);
      state.hidden = new Set(isAlone ? [] : runs.keys());
      state.hidden.delete(index);
      legendChanged();
    });
    const item = make("li", {}, button, runs.length > 1 ? only : null);
    item.addEventListener("pointerenter", () => pick(state.hidden.has(index) ? null : index));
    item.addEventListener("pointerleave", () => pick(null));
    item.addEventListener("focusin", () => pick(state.hidden.has(index) ? null : index));
    item.addEventListener("focusout", () => pick(null));
    list.append(item);
  });
  byId("legend-tools").hidden = runs.length < 2;
  byId("filter").hidden = runs.length < 8;
  byId("filter").addEventListener("input", (event) => {
    const text = event.target.value.toLowerCase();
    [...list.children].forEach((item, index) => { item.hidden = !runs[index].name.toLowerCase().includes(text); });
  });
  byId("show-all").addEventListener("click", () => showFiltered(true));
  byId("show-none").addEventListener("click", () => showFiltered(false));
}

// "All" and "None" apply to the runs that match the filter.
function showFiltered(isShown) {
  [...byId("legend").children].forEach((item, index) => {
    if (item.hidden) return;
    if (isShown) state.hidden.delete(index);
    else state.hidden.add(index);
  });
  legendChanged();
}

function legendChanged() {
  document.querySelectorAll("#legend .run").forEach((button, index) => {
    button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
  });
  document.querySelectorAll("tr[data-run], th[data-run], td[data-run], .share").forEach((row) => {
    row.hidden = state.hidden.has(Number(row.dataset.run)) && state.hidden.size < runs.length;
  });
  state.picked = null;
  changed();
}
