// Plots in SVG: axes, zoom by dragging, values where the pointer rests. What they show goes
// in as text, never as markup.
//
// A plot has layers: `curve`, `spans`, `rules` and `cells` make them. Each has a name and a
// color for the legend; `x`, the values that it spans; `y(from, to)`, those that it has
// between two x; `draw(svg, X, Y)`, where X and Y turn values into pixels; and
// `find(px, py, X, Y)`, how far its nearest point is and what that says.
const at = id => document.getElementById(id);
const number = (x, digits = 3) => x === null || x === undefined ? "-" :
  Number(x.toPrecision(digits)).toLocaleString("en-US", {maximumSignificantDigits: digits});
const FAR = {far: Infinity, text: ""};
const zooms = {}, turns = {};  // by plot: the range of x, and how the mesh is turned

function element(kind, text = "", kids = [], style = {}) {
  const made = document.createElement(kind);
  made.textContent = text;
  made.append(...kids);
  Object.assign(made.style, style);
  return made;
}

function shape(parent, kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

function swatch(color) {
  const made = element("span", "", [], {background: color});
  made.className = "swatch";
  return made;
}

function legend(entries) {
  const made = element("div", "", entries.map(({name, color}) => element("span", "", [swatch(color), name])));
  made.className = "legend";
  return made;
}

const nearest = found => found.reduce((a, b) => b.far < a.far ? b : a, FAR);

function curve(name, color, [x, y], {width = 1.5, dots = 0, dash = "none"} = {}) {
  const known = x.map((_, i) => i).filter(i => y[i] !== null);
  return {
    name, color, x,
    y: (from, to) => known.filter(i => from <= x[i] && x[i] <= to).map(i => y[i]),
    draw(svg, X, Y) {
      let d = "", pen = "M";
      for (const [i, value] of y.entries()) {
        if (value !== null) d += `${pen}${X(x[i]).toFixed(1)} ${Y(value).toFixed(1)}`;
        pen = value === null ? "M" : "L";
      }
      if (width) shape(svg, "path", {d, fill: "none", stroke: color, "stroke-width": width, "stroke-dasharray": dash});
      if (dots) for (const i of known) shape(svg, "circle", {cx: X(x[i]), cy: Y(y[i]), r: dots, fill: color});
    },
    find: (px, py, X, Y) => nearest(known.map(i => ({far: Math.abs(X(x[i]) - px) + 0.2 * Math.abs(Y(y[i]) - py),
      text: `${name}, ${number(x[i], 9)}: ${number(y[i], 5)}`}))),
  };
}

// Dotted vertical lines, each [x, text], with a triangle at the bottom.
function rules(name, color, marks, {lines = true} = {}) {
  return {
    name, color, x: marks.map(mark => mark[0]), y: () => [],
    draw(svg, X, Y) {
      const floor = Y.range[0];
      for (const [x] of marks) {
        if (lines) shape(svg, "line", {x1: X(x), x2: X(x), y1: 0, y2: floor, stroke: color, "stroke-dasharray": "2 3"});
        shape(svg, "path", {d: `M${X(x) - 5} ${floor}h10l-5 -9z`, fill: color});
      }
    },
    find: (px, py, X, Y) => nearest(marks.map(([x, text]) => ({far: Math.hypot(X(x) - px, 0.2 * (Y.range[0] - py)), text: `step ${x}: ${text}`}))),
  };
}

// Horizontal bars, each [from, to, y, text]; `least` pixels wide.
function spans(name, color, bars, {width = 9, least = 1} = {}) {
  return {
    name, color, x: bars.flatMap(bar => [bar[0], bar[1]]), y: () => [],
    draw(svg, X, Y) {
      const d = bars.map(([from, to, y]) => `M${X(from).toFixed(1)} ${Y(y).toFixed(1)}H${Math.max(X(to), X(from) + least).toFixed(1)}`).join("");
      shape(svg, "path", {d, stroke: color, "stroke-width": width});
    },
    find: (px, py, X, Y) => nearest(bars.map(([from, to, y, text]) => ({text,
      far: Math.max(X(from) - px, px - X(to), 0) + 4 * Math.max(Math.abs(Y(y) - py) - width / 2, 0)}))),
  };
}

// Rows of values in shades from pale to dark, the first row on top; null is blank.
const SHADES = [[255, 255, 204], [254, 217, 118], [253, 141, 60], [227, 26, 28], [128, 0, 38]];
function cells(rows, {low, high, unit, say}) {
  const columns = rows.length ? rows[0].length : 0;
  const shade = value => {
    const place = 4 * Math.min(Math.max((value - low) / (high - low || 1), 0), 1), i = Math.min(Math.floor(place), 3);
    return SHADES[i].map((c, k) => c + (place - i) * (SHADES[i + 1][k] - c));
  };
  return {
    name: `${number(low)} to ${number(high)}${unit}`, x: [-0.5, columns - 0.5], y: () => [],
    color: `linear-gradient(90deg, ${SHADES.map(c => `rgb(${c})`).join(", ")})`,
    draw(svg, X, Y) {
      const canvas = element("canvas");
      [canvas.width, canvas.height] = [columns, rows.length];
      const context = canvas.getContext("2d"), image = context.createImageData(columns, rows.length);
      rows.flat().forEach((value, i) => value === null || image.data.set([...shade(value), 255], 4 * i));
      context.putImageData(image, 0, 0);
      shape(svg, "image", {x: X(-0.5), y: Y(-0.5), width: X(columns - 0.5) - X(-0.5), height: Y(rows.length - 0.5) - Y(-0.5),
        preserveAspectRatio: "none", style: "image-rendering: pixelated", href: canvas.toDataURL()});
    },
    find(px, py, X, Y) {
      const row = Math.round(Y.back(py)), column = Math.round(X.back(px)), value = rows[row]?.[column];
      return value === null || value === undefined ? FAR : {far: 0, text: `${say(row, column)}: ${number(value)}${unit}`};
    },
  };
}

function scale(low, high, from, to) {
  const map = value => from + (value - low) / (high - low) * (to - from);
  map.back = pixel => low + (pixel - from) / (to - from) * (high - low);
  map.range = [from, to];
  return map;
}

// The range of some values, with room around them unless `room` is 0.
function spread(values, room = 0.05) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return [low - room * (high - low), high + room * (high - low)];
}

// Round values between two, at most `most`.
function ticks(low, high, most, whole = false) {
  const raw = (high - low) / Math.max(most, 1), size = 10 ** Math.floor(Math.log10(raw));
  const found = [1, 2, 5, 10].map(k => k * size).find(step => step >= 0.999 * raw), step = whole ? Math.max(found, 1) : found;
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({length: Math.max(last - first + 1, 0)}, (_, i) => (first + i) * step);
}

function point(svg, answer) {  // `answer(px, py)` has what a place says
  svg.onpointerleave = () => { at("tip").hidden = true; };
  return event => {
    const box = svg.getBoundingClientRect(), {far, text} = answer(event.clientX - box.left, event.clientY - box.top);
    const tip = at("tip");
    tip.hidden = far > 40;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  };
}

// `names` of rows in place of a vertical scale; `range` is the first sight of x.
function plot(id, layers, {title = ["step", ""], height = 300, names = null, zero = false, range = null, whole = true, label = null} = {}) {
  const box = at(id), width = Math.max(box.clientWidth, 280), again = () => plot(id, layers, {title, height, names, zero, range, whole, label});
  layers = layers.filter(layer => layer.x.length);
  if (!layers.length) return box.replaceChildren();
  const said = label || (value => number(value, 6));
  const sight = zooms[id] || range || spread(layers.flatMap(layer => layer.x), names ? 0 : 0.02);
  const visible = layers.flatMap(layer => layer.y(...sight));
  const [bottom, top] = names ? [names.length - 0.5, -0.5] : spread(zero ? [0, ...visible] : visible);
  const left = names ? Math.min(16 + 6.4 * Math.max(...names.map(name => name.length)), 0.4 * width) : 66;
  const inside = {x: left, y: 6, width: width - left - 12, height: height - 52};
  const X = scale(...sight, 0, inside.width), Y = scale(bottom, top, inside.height, 0);

  const svg = shape(document.createDocumentFragment(), "svg", {width, height, role: "img", "aria-label": `${title[1] || id} over ${title[0]}`});
  const rows = names ? names.map((name, i) => [i, name]) : ticks(bottom, top, height / 50).map(value => [value, number(value, 6)]);
  const stride = Math.ceil(14 * rows.length / inside.height);  // of names that have room
  for (const [value, name] of rows) {
    const y = inside.y + Y(value);
    if (!names) shape(svg, "line", {x1: left, x2: left + inside.width, y1: y, y2: y, stroke: "var(--line)"});
    if (!names || value % stride === 0) shape(svg, "text", {x: left - 8, y: y + 4, "text-anchor": "end"}, name);
  }
  const floor = inside.y + inside.height;
  for (const value of ticks(...sight, inside.width / 90, whole)) {
    const x = left + X(value);
    shape(svg, "line", {x1: x, x2: x, y1: inside.y, y2: floor + 5, stroke: "var(--line)"});
    shape(svg, "text", {x, y: floor + 18, "text-anchor": "middle"}, said(value));
  }
  shape(svg, "text", {x: left + inside.width / 2, y: height - 6, "text-anchor": "middle"}, title[0]);
  shape(svg, "text", {transform: `translate(13 ${inside.y + inside.height / 2}) rotate(-90)`, "text-anchor": "middle"}, title[1]);
  const clipped = shape(svg, "svg", {...inside, overflow: "hidden"});
  for (const layer of layers) layer.draw(clipped, X, Y);

  const hover = point(svg, (px, py) => nearest(layers.map(layer => layer.find(px - inside.x, py - inside.y, X, Y))));
  const place = event => Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left - left, 0), inside.width);
  let begun = null, chosen = null;
  svg.onpointerdown = event => { begun = place(event); svg.setPointerCapture(event.pointerId); };
  svg.onpointermove = event => {
    if (begun === null) return hover(event);
    const now = place(event);
    chosen = chosen || shape(clipped, "rect", {y: 0, height: inside.height, fill: "#3f83c7", "fill-opacity": 0.2});
    chosen.setAttribute("x", Math.min(begun, now));
    chosen.setAttribute("width", Math.abs(now - begun));
  };
  svg.onpointerup = event => {
    const ends = [X.back(begun), X.back(place(event))].sort((a, b) => a - b), far = Math.abs(place(event) - begun) > 5;
    begun = null;
    if (far) { zooms[id] = ends; again(); }
  };
  svg.ondblclick = () => { delete zooms[id]; again(); };
  const several = layers.length > 1 || names;
  box.replaceChildren(...(several ? [legend(layers)] : []), svg);
}

// Points in a cube, which dragging turns. Each point is {at: [x, y, z], color, text, label, ring, r},
// each edge [point, point, color, width]; `titles` name the directions.
function cube(id, points, edges, titles, height = 460) {
  const box = at(id), width = Math.max(box.clientWidth, 280), turn = turns[id] = turns[id] || [0.6, 0.45];
  const most = [0, 1, 2].map(i => Math.max(0, ...points.map(p => p.at[i])));
  const size = 0.46 * Math.min(width, 1.2 * height);
  const place = p => {
    const [x, y, z] = p.map((value, i) => most[i] ? value / most[i] - 0.5 : 0);
    const [across, deep] = [Math.cos(turn[0]) * x - Math.sin(turn[0]) * y, Math.sin(turn[0]) * x + Math.cos(turn[0]) * y];
    const up = Math.cos(turn[1]) * z + Math.sin(turn[1]) * deep;
    return [width / 2 + size * across, height / 2 - size * up, Math.sin(turn[1]) * z - Math.cos(turn[1]) * deep];
  };
  const svg = shape(document.createDocumentFragment(), "svg", {width, height, role: "img", "aria-label": "the mesh"});
  const line = (a, b, color, thick) => shape(svg, "line", {x1: a[0], y1: a[1], x2: b[0], y2: b[1], stroke: color, "stroke-width": thick});
  for (const i of [0, 1, 2]) {
    if (!most[i]) continue;
    const end = [0, 0, 0], past = [0, 0, 0];
    [end[i], past[i]] = [most[i], 1.25 * most[i]];
    line(place([0, 0, 0]), place(end), "var(--line)", 1);
    const [x, y] = place(past);
    shape(svg, "text", {x, y, "text-anchor": "middle", fill: "var(--soft)"}, `${titles[i]}, 0 to ${most[i]}`);
  }
  const seen = points.map(p => place(p.at));
  for (const [a, b, color, thick] of edges) line(seen[a], seen[b], color, thick);
  for (const i of points.map((_, i) => i).sort((a, b) => seen[a][2] - seen[b][2])) {
    const [cx, cy] = seen[i], {color, ring, label, r} = points[i];
    shape(svg, "circle", {cx, cy, r, fill: color, stroke: "#fff"});
    if (ring) shape(svg, "circle", {cx, cy, r: r + 5, fill: "none", stroke: ring, "stroke-width": 3, class: "ring"});
    if (label) shape(svg, "text", {x: cx, y: cy - r - 4, "text-anchor": "middle"}, label);
  }
  const hover = point(svg, (px, py) => nearest(points.map((p, i) => ({far: 2 * Math.hypot(seen[i][0] - px, seen[i][1] - py), text: p.text}))));
  svg.onpointermove = event => {
    if (!event.buttons) return hover(event);
    turn[0] -= event.movementX / 150;
    turn[1] = Math.min(Math.max(turn[1] + event.movementY / 150, -1.5), 1.5);
    cube(id, points, edges, titles, height);
  };
  svg.ondblclick = () => { delete turns[id]; cube(id, points, edges, titles, height); };
  box.replaceChildren(svg);
}
