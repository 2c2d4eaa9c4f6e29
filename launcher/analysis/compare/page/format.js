// Formats numbers and creates elements without markup: text from outside stays text.

const DASH = "–";

function formatCount(value, tidy = trim) {
  const size = Math.abs(value);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit * 0.99995) return tidy((value / limit).toPrecision(3)) + suffix;
  }
  return trim(value.toPrecision(4));
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function formatSeconds(seconds) {
  const size = Math.abs(seconds);
  if (size < 1 && size > 0) return `${trim((seconds * 1000).toPrecision(3))} ms`;
  if (size < 90) return `${trim(seconds.toPrecision(3))} s`;
  if (size < 5400) return `${trim((seconds / 60).toPrecision(3))} min`;
  return `${trim((seconds / 3600).toPrecision(3))} h`;
}

function formatValue(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (unit === "share") return `${trim((100 * value).toPrecision(3))} %`;
  if (unit === "points") return `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)} points`;
  if (unit === "s") return formatSeconds(value);
  if (unit === "GiB") return `${value.toFixed(2)} GiB`;
  if (unit === "tokens/s" || unit === "tokens" || unit === "rows/s") return formatCount(value);
  if (unit === "J" && Math.abs(value) < 0.1) return `${trim((1000 * value).toPrecision(3))} mJ`;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(2).replace("e+", "e");
  return Number.isInteger(value) ? value.toLocaleString("en") : trim(value.toPrecision(4));
}

function formatPlace(value, axis) {
  if (axis === "seconds") return formatSeconds(value);
  if (axis === "tokens") return `${formatCount(value)} tokens`;
  return `step ${Math.round(value).toLocaleString("en")}`;
}

function unitWords(unit) {
  return { share: "", s: "", "tokens/s": "tokens/s", tokens: "", GiB: "GiB" }[unit] ?? unit;
}

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shorten(name) {
  return name.length > 28 ? `${name.slice(0, 27)}…` : name;
}

function byId(id) {
  return document.getElementById(id);
}

function capitalise(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
