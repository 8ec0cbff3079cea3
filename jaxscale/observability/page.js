// Draws the data of a run. Texts come from files that anyone may have written: they go
// in as text, never as markup, and into plotly through `plain`.
const at = id => document.getElementById(id);
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const wrapped = text => plain(text).replace(/(.{1,80})(\s+|$)/g, "$1<br>").replace(/<br>$/, "");
const number = (x, digits = 3) => x === null || x === undefined ? "-" :
  Number(x.toPrecision(digits)).toLocaleString("en-US", {maximumSignificantDigits: digits});
const seconds = x => x === null || x === undefined ? "-" : x < 120 ? `${number(x)} s` :
  x < 7200 ? `${number(x / 60)} min` : `${number(x / 3600)} h`;

const PARTS = {productive: "#4f9d49", lost: "#c0504d", data_wait: "#e8a765", checkpoint: "#3f83c7",
  evaluation: "#8b7bb5", compile: "#b7d3ee", start: "#a9d8a3", restart: "#d9822b", idle: "#c5ccd4"};
const SEGMENTS = {"wait for data": "#e8a765", dispatch: "#6ba6df", step: "#4f9d49", save: "#3f83c7",
  evaluate: "#8b7bb5", start: "#a9d8a3", compile: "#b7d3ee", fault: "#c0504d"};
const MARKS = {restart: "#d9822b", "not finite": "#8b7bb5"};
const RED = "#c0504d";
let data = JSON.parse(at("data").textContent), drawn = {};

function plot(id, traces, layout) {
  const narrow = window.innerWidth < 800;
  Plotly.react(id, traces, {
    template: {}, height: 340, margin: {l: narrow ? 52 : 64, r: 12, t: 28, b: 48},
    font: {family: "system-ui, sans-serif", size: 12, color: "#1d2733"},
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", uirevision: "kept",
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, ...layout,
  }, {responsive: true, displayModeBar: false});
}
const axis = (title, more = {}) => ({title: {text: title}, gridcolor: "#e8ecf1", zeroline: false, automargin: true, ...more});

function table(id, columns, rows) {
  const body = document.createElement("tbody"), head = document.createElement("thead");
  const line = (cells, kind, parent) => {
    const row = parent.insertRow();
    for (const cell of cells) {
      const found = document.createElement(kind);
      const [text, color] = Array.isArray(cell) ? cell : [cell];
      if (color) {
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.background = color;
        found.append(swatch);
      }
      found.className = String(text).length > 30 ? "long" : String(text).length < 12 ? "short" : "";
      String(text).split("\n").forEach((part, i) => found.append(...(i ? [document.createElement("br")] : []), part));
      row.append(found);
    }
  };
  line(columns, "th", head);
  for (const row of rows) line(row, "td", body);
  at(id).replaceChildren(...(rows.length ? [head, body] : []));
}

function options(id, names, change) {
  const select = at(id), before = select.value;
  if (JSON.stringify([...select.options].map(o => o.text)) !== JSON.stringify(names)) {
    select.replaceChildren(...names.map(name => new Option(name, name)));
    if (names.includes(before)) select.value = before;
  }
  select.onchange = change;
  return Math.max(select.selectedIndex, 0);
}

function drawHead() {
  at("title").textContent = data.title;
  const view = data.moments[0];
  at("state").textContent = view.text;
  at("state").className = view.silent.length || view.text.startsWith("Nothing was heard") ? "bad" : "";
  at("facts").replaceChildren(...Object.entries(data.facts).map(([name, value]) => {
    const pair = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; dd.textContent = value;
    pair.append(dt, dd);
    return pair;
  }));
  at("footer").textContent = `${LIVE ? "Live, " : ""}as of ${new Date(1000 * data.time).toISOString().replace("T", " ").slice(0, 19)} UTC`;
}

function drawGoodput() {
  const {seconds: parts, wall} = data.goodput;
  plot("goodput", Object.entries(parts).map(([name, value]) => ({
    type: "bar", orientation: "h", x: [value], y: [""], name: `${name.replace("_", " ")} ${(100 * value / (wall || 1)).toFixed(1)}%`,
    marker: {color: PARTS[name] || "#999"}, visible: value > 0 ? true : window.innerWidth < 800 ? false : "legendonly",
    hovertemplate: `${plain(name.replace("_", " "))}: ${seconds(value)}<extra></extra>`,
  })), {barmode: "stack", height: window.innerWidth < 800 ? 300 : 170, xaxis: axis("time, s"), yaxis: {visible: false},
        legend: {orientation: "h", y: 1.05, yanchor: "bottom", traceorder: "normal"}});
}

function drawLoss() {
  const {loss, again, evaluation, marks} = data.loss, traces = [];
  const points = (name, [x, y], more) => x.length && traces.push({x, y, name, connectgaps: false, ...more});
  points("computed again", again, {mode: "markers", marker: {color: "#aab3bd", size: 5}});
  points("loss", loss, {mode: loss[0].length < 60 ? "lines+markers" : "lines", line: {color: "#3f83c7", width: 1.5}});
  points("held out", evaluation, {mode: "lines+markers", line: {color: "#1d2733", width: 1}, marker: {size: 6, symbol: "diamond"}});
  const kinds = [...new Set(marks.map(mark => mark.kind))];
  for (const kind of kinds) {
    const found = marks.filter(mark => mark.kind === kind);
    traces.push({x: found.map(m => m.step), y: found.map(() => 0.02), yaxis: "y2", mode: "markers", name: plain(kind),
      marker: {symbol: "triangle-up", size: 10, color: MARKS[kind] || RED}, text: found.map(m => wrapped(m.text)),
      hovertemplate: "step %{x}: %{text}<extra></extra>"});
  }
  plot("loss", traces, {xaxis: axis("step"), yaxis: axis("loss, nats/token"),
    yaxis2: {overlaying: "y", range: [0, 1], visible: false, fixedrange: true},
    shapes: (marks.length > MOST_LINES ? [] : marks).map(m => ({type: "line", x0: m.step, x1: m.step, y0: 0, y1: 1, yref: "paper",
      line: {color: MARKS[m.kind] || RED, width: 1, dash: "dot"}}))});
}

function drawRates() {
  const {lr, grad_norm: norm} = data.rates, traces = [];
  at("rates-about").textContent = lr[0].length ? "Dotted: the norm of the gradients before they are clipped." : "The run has recorded none.";
  const points = (name, [x, y], more) => x.length && traces.push({x, y, name, connectgaps: false, mode: "lines", ...more});
  points("learning rate", lr, {line: {color: "#3f83c7", width: 1.5}});
  points("gradient norm", norm, {yaxis: "y2", line: {color: "#8a94a0", width: 1, dash: "dot"}});
  if (traces.length) plot("rates", traces, {xaxis: axis("step"), yaxis: axis("learning rate", {rangemode: "tozero"}),
    yaxis2: {overlaying: "y", side: "right", title: {text: "gradient norm"}, rangemode: "tozero", tickformat: ".2~g", showgrid: false, zeroline: false, automargin: true}});
}

function drawSettings() {
  at("command").hidden = !data.command;
  at("command").replaceChildren(...data.command.split(/ (?=--)/).map(words => {
    const part = document.createElement("span");  // a line does not break within an option
    part.textContent = words;
    return part;
  }).flatMap(part => [part, " "]));
  at("settings-about").textContent = data.settings.length ? "Each is an option of jaxscale train, with -- before it." : "The run has no run.json.";
  table("settings", ["setting", "value"], data.settings);
}

const shade = (i, count) => count < 2 ? "#9ad0a0" : `hsl(${280 - 150 * i / (count - 1)}, 55%, ${30 + 40 * i / (count - 1)}%)`;

function drawMesh() {
  const chosen = options("moment", data.moments.map(view => view.label), drawMesh);
  const view = data.moments[chosen], silent = new Set(view.silent), count = view.states.length;
  at("mesh-text").textContent = chosen || view.silent.length ? view.text : "";
  const names = ["data", "pipe", "context"].map((_, i) => data.directions[i].join(" x ") || "-");
  const trace = (points, more) => ({type: "scatter3d", mode: "markers", x: points.map(p => p[0]), y: points.map(p => p[1]),
    z: points.map(p => p[2]), text: points.map(p => wrapped(view.names[p[3]] || `rank ${p[3]}`)),
    hovertemplate: "%{text}<extra></extra>", ...more});
  const size = view.points.length > 200 ? 5 : view.points.length > 32 ? 8 : 12;
  const edges = (direct, color, width, name) => {
    const x = [], y = [], z = [];
    for (const [from, to, , isDirect] of view.edges) if (isDirect === direct)
      for (const p of [view.points[from], view.points[to], [null, null, null]]) { x.push(p[0]); y.push(p[1]); z.push(p[2]); }
    return {type: "scatter3d", mode: "lines", x, y, z, name, line: {color, width}, hoverinfo: "skip", visible: x.length > 0, showlegend: x.length > 0};
  };
  const groups = view.states.slice(0, 24).map((state, i) => trace(view.points.filter(p => Math.min(p[4], 23) === i),
    {name: plain(state), marker: {size, color: shade(i, count), line: {color: "#fff", width: 1}}}));
  const rings = view.points.filter(p => silent.has(p[3]));
  const many = view.points.length <= 64;
  plot("mesh", [edges(false, "#9aa4af", 2, "waits through others"), edges(true, RED, 5, "waits directly"), ...groups,
    trace(rings, {name: "holds up the others", hoverinfo: "skip", hovertemplate: null, showlegend: rings.length > 0,
      marker: {size: 2 * size, symbol: "circle-open", color: RED, line: {color: RED, width: 3}}}),
    trace(many ? view.points : rings.slice(0, 8), {mode: "text", text: (many ? view.points : rings.slice(0, 8)).map(p => p[3]), textposition: "top center",
      textfont: {size: 12}, hoverinfo: "skip", hovertemplate: null, showlegend: false})],
  {height: 520, margin: {l: 0, r: 0, t: 10, b: 0}, legend: {orientation: "h", y: 0, yanchor: "top"},
    scene: {aspectmode: "cube", uirevision: "kept", camera: {eye: {x: 1.25, y: 1.35, z: 0.8}, center: {x: 0, y: 0, z: -0.1}},
      ...Object.fromEntries(["xaxis", "yaxis", "zaxis"].map((key, i) => {
        const most = Math.max(0, ...view.points.map(p => p[i]));
        return [key, {title: {text: plain(names[i])}, range: [-0.6, most + 0.6], dtick: Math.max(1, Math.ceil(most / 8)), showspikes: false, visible: most > 0}];
      }))}});
  table("states", ["state, the most behind first", "ranks", "such as"], view.states.slice(0, 24).map((state, i) => {
    const ranks = [...new Set(view.points.filter(p => p[4] === i).map(p => p[3]))];
    return [[state, shade(i, count)], view.counts[i], ranks.slice(0, 4).map(r => view.names[r]).join("\n") + (ranks.length > 4 ? "\n..." : "")];
  }));
}

const FEW = 20, MOST_LINES = 40;
function drawFaults() {
  const all = data.faults, kinds = {};
  for (const f of all) kinds[f.kind] = (kinds[f.kind] || 0) + 1;
  at("faults-about").textContent = all.length ?
    Object.entries(kinds).map(([kind, count]) => `${count} ${kind.replace("_", " ")}`).join(", ") + ". The newest first. " +
    "Silent: since the last word of the suspects, or how long it took to notice. Down: until a step was done again. Lost: steps computed again." :
    "None is known.";
  const more = at("more"), shown = more.dataset.all ? all.length : FEW;
  more.hidden = all.length <= FEW;
  more.textContent = more.dataset.all ? `the newest ${FEW}` : `all ${all.length}`;
  more.onclick = () => { more.dataset.all = more.dataset.all ? "" : "1"; drawFaults(); };
  table("faults", ["at", "cycle", "step", "fault", "suspects", "silent", "down", "lost", "where they stood"], [...all].reverse().slice(0, shown).map(f => [
    seconds(f.time), f.cycle, f.step, `${f.kind}: ${f.reason}`, f.suspects.join("\n") || "-", seconds(f.silent), seconds(f.restart),
    f.lost === null ? "-" : `${f.lost} ${f.lost === 1 ? "step" : "steps"}`,
    f.stacks.slice(0, 4).map(([stack, ranks]) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.slice(0, 6).join(", ")}${ranks.length > 6 ? ", ..." : ""}: ${stack}`).join("\n") || "-"]));
}

function drawHeat() {
  const {rows, layers} = data.heat, names = Object.keys(layers);
  const name = names[options("layer", names, drawHeat)], {columns, each, cells: z} = layers[name];
  at("slow-text").textContent = data.slow + (each > 1 ? ` A column is ${each} steps, and shows the largest.` : "");
  const flat = z.flat().filter(v => v !== null).sort((a, b) => a - b);
  plot("heat", columns.length ? [{type: "heatmap", z, x: columns, y: rows.map(r => `rank ${r}`), colorscale: "YlOrRd", reversescale: true,
    zmin: 0, zmax: flat[Math.floor(0.998 * (flat.length - 1))], colorbar: {thickness: 12, title: {text: name.startsWith("arrival") ? "" : "s"}},
    hovertemplate: "%{y}, step %{x}: %{z}<extra></extra>"}] : [],
    {height: Math.min(620, 130 + 18 * Math.max(rows.length, 3)), margin: {l: 74, r: 8, t: 12, b: 48}, xaxis: axis("step"),
     yaxis: axis("", {autorange: "reversed", type: "category"})});
}

function drawTimeline() {
  const {rows, segments, window: sight, end, total, steps, schedule} = data.timeline;
  at("timeline-about").textContent = (rows.length < total ? `${rows.length} of ${total} ranks, slow and suspect ones first; ` : "") +
    `upper bar: host, lower bar: device. The last ${steps.toLocaleString("en-US")} steps are drawn one by one; drag to zoom. Clocks of hosts may differ by milliseconds.`;
  const traces = Object.entries(segments).map(([name, list]) => {
    const x = [], y = [], text = [];
    for (const [row, thread, from, to, step] of list) {
      const place = row + (thread ? 0.17 : -0.17);
      x.push(from, to, null); y.push(place, place, null);
      const said = `${plain(rows[row])}<br>${name}, step ${step}: ${seconds(to - from)}`;
      text.push(said, said, "");
    }
    const lines = {x, y, text, name, mode: name === "fault" ? "markers" : "lines", hovertemplate: "%{text}<extra></extra>",
      line: {color: SEGMENTS[name] || "#777", width: rows.length > 12 ? 5 : 9}, marker: {color: RED, symbol: "x", size: 9}};
    return lines;
  });
  const brief = r => window.innerWidth < 800 ? r.replace(/ \(.*/, "") : r.length > 48 ? `${r.slice(0, 47)}…` : r;
  const range = shown => [shown[0], shown[1] + 0.03 * (shown[1] - shown[0])];
  plot("timeline", traces, {height: 150 + 28 * Math.max(rows.length, 2), hovermode: "closest", xaxis: axis("time since the first event, s", {range: range(sight)}),
    yaxis: axis("", {range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, i) => i),
      ticktext: rows.map(r => plain(brief(r))), fixedrange: true}),
    legend: {orientation: "h", y: 1.02, yanchor: "bottom"}});
  at("recent").onclick = () => Plotly.relayout("timeline", {"xaxis.range": range(sight)});
  at("whole").onclick = () => Plotly.relayout("timeline", {"xaxis.range": range([0, end])});
  at("schedule").hidden = !schedule;
  if (drawn.schedule !== schedule) at("schedule-drawing").innerHTML = drawn.schedule = schedule;  // ours: numbers alone
}

function drawMemory() {
  const lines = Object.entries(data.memory.lines);
  at("memory").hidden = !lines.length;
  at("memory-about").textContent = lines.length ? "Of the devices of each process." : "The run has recorded none: devices such as CPUs do not tell.";
  if (lines.length) plot("memory", lines.map(([name, [x, y]]) => ({x, y: y.map(v => v === null ? null : v / 1e9), name: plain(name), mode: "lines+markers",
    marker: {size: 4}})), {xaxis: axis("step"), yaxis: axis("memory, GB", {rangemode: "tozero"})});
}

function drawCompile() {
  at("compile-about").textContent = data.compile.length ? "Of the lowest rank." : "The run has recorded none.";
  table("compile", ["cycle", "step", "program", "time"], data.compile.map(c => [c.cycle, c.step, c.name, seconds(c.seconds)]));
}

const SECTIONS = {title: drawHead, goodput: drawGoodput, loss: drawLoss, rates: drawRates, settings: drawSettings, moments: drawMesh, faults: drawFaults,
  heat: drawHeat, timeline: drawTimeline, memory: drawMemory, compile: drawCompile};
function draw() {
  document.body.dataset.drawn = data.time;
  at("all").hidden = Boolean(data.empty);
  if (data.empty) { at("title").textContent = data.title; at("state").textContent = data.empty; return; }
  const several = data.timeline.total > 1;  // one rank waits for nobody
  for (const id of ["waits", "slow"]) at(id).hidden = !several;
  for (const [key, section] of Object.entries(SECTIONS)) {
    if (!several && (key === "moments" || key === "heat")) continue;
    const text = key === "title" ? null : JSON.stringify(data[key]);
    if (text !== null && drawn[key] === text) continue;
    section();
    drawn[key] = text;
  }
}

async function follow() {
  try {
    const answer = await fetch(`data.json?since=${data.time}`, {signal: AbortSignal.timeout(60000)});
    if (answer.status === 200) { data = await answer.json(); draw(); }
    else if (answer.status !== 204) throw new Error(`status ${answer.status}`);
  } catch (error) {
    at("footer").textContent = `The server does not answer (${error.message}); the page is as of ${new Date(1000 * data.time).toISOString()}`;
  }
  setTimeout(follow, 2000);
}

draw();
if (LIVE) setTimeout(follow, 1000);
