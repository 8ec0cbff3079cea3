// Draws the data of a run. Texts come from files that anyone may have written: they go
// in as text, never as markup.
const seconds = x => x === null || x === undefined ? "-" : x < 120 ? `${number(x)} s` :
  x < 7200 ? `${number(x / 60)} min` : `${number(x / 3600)} h`;

const PARTS = {productive: "#4f9d49", lost: "#c0504d", data_wait: "#e8a765", checkpoint: "#3f83c7",
  evaluation: "#8b7bb5", compile: "#b7d3ee", start: "#a9d8a3", restart: "#d9822b", idle: "#c5ccd4"};
const SEGMENTS = {"wait for data": "#e8a765", dispatch: "#6ba6df", step: "#4f9d49", save: "#3f83c7",
  evaluate: "#8b7bb5", start: "#a9d8a3", compile: "#b7d3ee", fault: "#c0504d"};
const MARKS = {restart: "#d9822b", "not finite": "#8b7bb5"};
const RED = "#c0504d", BLUE = "#3f83c7", INK = "var(--ink)", GRAY = "#9aa4af";
let data = JSON.parse(at("data").textContent), drawn = {};

function table(id, columns, rows) {
  const body = document.createElement("tbody"), head = document.createElement("thead");
  const line = (cells, kind, parent) => {
    const row = parent.insertRow();
    for (const cell of cells) {
      const found = document.createElement(kind);
      const [text, color] = Array.isArray(cell) ? cell : [cell];
      if (color) found.append(swatch(color));
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
  at("facts").replaceChildren(...Object.entries(data.facts).map(([name, value]) =>
    element("div", "", [element("dt", name), element("dd", value)])));
  at("footer").textContent = `${LIVE ? "Live, " : ""}as of ${new Date(1000 * data.time).toISOString().replace("T", " ").slice(0, 19)} UTC`;
}

function drawGoodput() {
  const {seconds: parts, wall} = data.goodput, known = Object.entries(parts).filter(part => part[1] > 0);
  const bar = element("div", "", known.map(([name, value]) =>
    element("span", "", [], {width: `${100 * value / (wall || 1)}%`, background: PARTS[name] || "#999"})));
  bar.className = "bar";
  at("goodput").replaceChildren(bar, legend(known.map(([name, value]) => ({color: PARTS[name] || "#999",
    name: `${name.replace("_", " ")} ${(100 * value / (wall || 1)).toFixed(1)}%, ${seconds(value)}`}))));
}

function drawLoss() {
  const {loss, again, evaluation, marks} = data.loss, lines = marks.length <= MOST_LINES;
  plot("loss", [
    curve("computed again", "#aab3bd", again, {width: 0, dots: 2.5}),
    curve("loss", BLUE, loss, {dots: loss[0].length < 60 ? 3 : 0}),
    curve("held out", INK, evaluation, {width: 1, dots: 4}),
    ...[...new Set(marks.map(mark => mark.kind))].map(kind =>
      rules(kind, MARKS[kind] || RED, marks.filter(m => m.kind === kind).map(m => [m.step, m.text]), {lines})),
  ], {title: ["step", "loss, nats/token"], height: 340});
}

function drawRates() {
  const {lr, grad_norm: norm} = data.rates;
  at("rates-about").textContent = lr[0].length ? "The gradient norm is that before clipping." : "The run has recorded none.";
  plot("rates", [curve("learning rate", BLUE, lr)], {title: ["step", "learning rate"], height: 220, zero: true});
  plot("norms", [curve("gradient norm", "var(--soft)", norm)], {title: ["step", "gradient norm"], height: 220, zero: true});
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
  const r = view.points.length > 200 ? 3 : view.points.length > 32 ? 5 : 8, many = view.points.length > 64;
  const points = view.points.map(([x, y, z, rank, state]) => ({at: [x, y, z], r, color: shade(state, count), ring: silent.has(rank) && RED,
    text: view.names[rank] || `rank ${rank}`, label: many && !silent.has(rank) ? "" : `${rank}`}));
  const edges = [...view.edges].sort((a, b) => a[3] - b[3]).map(([from, to, , direct]) => [from, to, direct ? RED : GRAY, direct ? 3 : 1.5]);
  cube("mesh", points, edges, data.directions.map(axes => axes.join(" x ")));
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
  const chosen = names[options("layer", names, () => { delete zooms.heat; drawHeat(); })], {columns, each, cells: values} = layers[chosen];
  at("slow-text").textContent = data.slow + (each > 1 ? ` A column is ${each} steps, and shows the largest.` : "");
  const flat = values.flat().filter(v => v !== null).sort((a, b) => a - b);
  plot("heat", columns.length ? [cells(values, {low: flat[0] ?? 0, high: flat[Math.floor(0.998 * (flat.length - 1))] ?? 1,
    unit: chosen.endsWith(", s") ? " s" : "", say: (row, column) => `rank ${rows[row]}, step ${columns[column]}`})] : [],
    {names: rows.map(r => `rank ${r}`), height: Math.min(620, 80 + 18 * Math.max(rows.length, 3)), label: i => columns[i] ?? ""});
}

function drawTimeline() {
  const {rows, segments, window: range, end, total, steps, schedule} = data.timeline;
  at("timeline-about").textContent = (rows.length < total ? `${rows.length} of ${total} ranks, slow and suspect ones first; ` : "") +
    `upper bar: host, lower bar: device. The last ${steps.toLocaleString("en-US")} steps are drawn one by one; drag to zoom. Clocks of hosts may differ by milliseconds.`;
  const width = rows.length > 12 ? 5 : 9, brief = r => innerWidth < 800 ? r.replace(/ \(.*/, "") : r.length > 48 ? `${r.slice(0, 47)}…` : r;
  const layers = Object.entries(segments).map(([name, list]) => spans(name, SEGMENTS[name] || "#777", list.map(([row, thread, from, to, step]) =>
    [from, to, row + (thread ? 0.17 : -0.17), `${rows[row]}\n${name}, step ${step}: ${seconds(to - from)}`]), {width, least: name === "fault" ? 5 : 1}));
  const show = sight => {
    if (sight) zooms.timeline = sight;
    plot("timeline", layers, {title: ["time since the first event, s", ""], names: rows.map(brief), range, whole: false,
      height: 90 + 28 * Math.max(rows.length, 2)});
  };
  show();
  at("recent").onclick = () => show(range);
  at("whole").onclick = () => show([0, end]);
  at("schedule").hidden = !schedule;
  if (drawn.schedule !== schedule) at("schedule-drawing").innerHTML = drawn.schedule = schedule;  // ours: numbers alone
}

function drawMemory() {
  const lines = Object.entries(data.memory.lines), colors = Object.values(SEGMENTS);
  at("memory-about").textContent = lines.length ? "Of the devices of each process." : "The run has recorded none: devices such as CPUs do not tell.";
  plot("memory", lines.map(([name, [x, y]], i) => curve(name, colors[i % colors.length], [x, y.map(v => v === null ? null : v / 1e9)], {dots: 2})),
    {title: ["step", "memory, GB"], zero: true});
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

let wide = innerWidth;
onresize = () => {
  if (innerWidth === wide) return;  // on a phone, scrolling alone
  wide = innerWidth;
  drawn = {};
  draw();
};

draw();
if (LIVE) setTimeout(follow, 1000);
