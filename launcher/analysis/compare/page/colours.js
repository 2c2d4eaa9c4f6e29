// Fifty distinguishable lines: ten hues in five shades, each with its own dashes and marks.

const HUES = {
  light: ["#2160c4", "#c4520a", "#0a8060", "#8e3cc2", "#c0243f", "#8a6a00", "#067d94", "#b8308a", "#557a12", "#6b5546"],
  dark: ["#6ea8ff", "#ff9f5f", "#3fd0a4", "#cb9dff", "#ff7f90", "#e3c34a", "#5fd2ec", "#f78cd2", "#aad05c", "#cdb09a"],
};
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [12, 4]];
const MARKS = ["circle", "square", "triangle", "diamond", "down", "plus"];
const SHADES = [0, 0.22, -0.22, 0.38, -0.38]; // towards the text colour, or towards the background

function colourOf(index, theme) {
  const hue = HUES[theme][index % 10];
  const shade = SHADES[Math.floor(index / 10) % 5];
  const ink = theme === "light" ? 0 : 255;
  const towards = shade > 0 ? ink : theme === "light" ? 170 : 60;
  const parts = [1, 3, 5].map((at) => parseInt(hue.slice(at, at + 2), 16));
  const mixed = parts.map((part) => Math.round(part + (towards - part) * Math.abs(shade)));
  return "#" + mixed.map((part) => part.toString(16).padStart(2, "0")).join("");
}

function dashOf(index) {
  return DASHES[Math.floor(index / 10) % DASHES.length];
}

function markOf(index) {
  return MARKS[(index + Math.floor(index / 10)) % MARKS.length];
}

// Corners of a mark around a point; a circle has none.
function cornersOf(mark, x, y, size) {
  const s = size;
  return {
    square: [[x - s, y - s], [x + s, y - s], [x + s, y + s], [x - s, y + s]],
    triangle: [[x, y - s * 1.25], [x + s * 1.15, y + s * 0.9], [x - s * 1.15, y + s * 0.9]],
    down: [[x, y + s * 1.25], [x + s * 1.15, y - s * 0.9], [x - s * 1.15, y - s * 0.9]],
    diamond: [[x, y - s * 1.4], [x + s * 1.4, y], [x, y + s * 1.4], [x - s * 1.4, y]],
    plus: [[-1, -3], [1, -3], [1, -1], [3, -1], [3, 1], [1, 1], [1, 3], [-1, 3], [-1, 1], [-3, 1], [-3, -1], [-1, -1]]
      .map(([a, b]) => [x + (a * s) / 2.2, y + (b * s) / 2.2]),
  }[mark];
}

function addMark(path, mark, x, y, size) {
  path.moveTo(x + size, y);
  if (mark === "circle") path.arc(x, y, size, 0, 7);
  else cornersOf(mark, x, y, size).forEach(([a, b], at) => (at ? path.lineTo(a, b) : path.moveTo(a, b)));
  path.closePath();
}

function makeSwatch(index, theme) {
  const space = "http://www.w3.org/2000/svg";
  const add = (parent, tag, attributes) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  };
  const colour = colourOf(index, theme);
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 36 12");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  svg.dataset.run = index;
  const dashes = dashOf(index).join(" ") || "none";
  add(svg, "line", { x1: 0, y1: 6, x2: 36, y2: 6, stroke: colour, "stroke-width": 2.2, "stroke-dasharray": dashes });
  if (markOf(index) === "circle") add(svg, "circle", { cx: 18, cy: 6, r: 3.6, fill: colour });
  else add(svg, "polygon", { points: cornersOf(markOf(index), 18, 6, 3.4).join(" "), fill: colour });
  return svg;
}
