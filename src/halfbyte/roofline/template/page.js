"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
const number = (value) => value === null || value === undefined ? "" :
  value === 0 ? "0" : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
const percent = (value) => value === null || value === undefined ? "" : (100 * value).toFixed(1) + " %";
const bytes = (value) => !value ? "" : value >= 1e9 ? number(value / 1e9) + " GB" :
  value >= 1e6 ? number(value / 1e6) + " MB" : number(value / 1e3) + " kB";

// Choosing a run: of those that were made, the one that is nearest to what is chosen.
const KEYS = ["batch", "mode", "provider"];
const distinct = (key) => [...new Set(data.runs.map((run) => run[key]))];
const chosen = () => {
  const wanted = KEYS.map((key) => byId(key).value);
  const score = (run) => KEYS.reduce((sum, key, place) => sum + (String(run[key]) === wanted[place] ? 1 : 0), 0);
  return data.runs.reduce((best, run) => score(run) > score(best) ? run : best);
};
let run = null;

function summary() {
  const weights = run.rows.filter((row) => row.group === "products");
  const time = weights.reduce((sum, row) => sum + row.ms, 0);
  const reached = weights.reduce((sum, row) => sum + (row.of_roof || 0) * row.ms, 0);
  const gaps = run.rows.find((row) => row.group === "gaps");
  const tiles = [
    [number(run.step_ms) + " ms", "a step, as it runs"],
    [number(run.profiled_ms) + " ms", "a step under the profiler; classes and gaps: " + number(run.sum_ms)],
    [number(run.floor) + " ms", "the least for its bytes and flops"],
    [percent(time / run.sum_ms), "of it weight products, at " + percent(reached / time) + " of their roof"],
    [percent(gaps ? gaps.share : 0), "of it gaps between kernels"],
  ];
  byId("summary").replaceChildren(...tiles.map(([big, small]) => {
    const tile = make("div");
    tile.append(make("b", big), make("span", small));
    return tile;
  }));
}

// The timeline: a canvas as wide as the screen that stays in place while a spacer behind it scrolls.
const LANE = 22, LEFT = 78;
const present = () => data.groups.map((_, place) => place).filter((place) => run.events.some((e) => e[2] === place));
const extent = () => Math.max(1, ...run.events.map((event) => event[0] + event[1]));
function view() {
  const scroll = byId("scroll"), width = scroll.clientWidth;
  const whole = width * 2 ** Number(byId("zoom").value);
  byId("spacer").style.width = whole + "px";
  return { width, scale: (whole - LEFT) / extent(), offset: scroll.scrollLeft };
}
function timeline() {
  const { width, scale, offset } = view(), lanes = present(), canvas = byId("timeline");
  const ratio = window.devicePixelRatio || 1, height = LANE * lanes.length + 22;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const draw = canvas.getContext("2d"), ink = getComputedStyle(document.body);
  draw.scale(ratio, ratio);
  draw.font = "11px system-ui, sans-serif";
  for (const [start, length, group] of run.events) {
    const x = LEFT + start * scale - offset, w = Math.max(length * scale, 0.4);
    if (x + w < LEFT || x > width) continue;
    draw.fillStyle = data.colors[data.groups[group]];
    draw.fillRect(Math.max(x, LEFT), LANE * lanes.indexOf(group) + 2, Math.min(w, x + w - LEFT), LANE - 4);
  }
  draw.fillStyle = ink.color;
  lanes.forEach((group, lane) => draw.fillText(data.groups[group], 0, LANE * lane + 15));
  const ticks = 3;
  for (let tick = 0; tick <= ticks; tick++) {
    const x = LEFT + (width - LEFT) * tick / ticks, us = (x - LEFT + offset) / scale / 100;
    draw.textAlign = tick === ticks ? "right" : tick ? "center" : "left";
    draw.fillText(us >= 1000 ? number(us / 1000) + " ms" : number(us) + " µs", x, height - 5);
  }
}
function point(event) {
  const { scale, offset } = view(), box = byId("timeline").getBoundingClientRect();
  const group = present()[Math.floor((event.clientY - box.top) / LANE)];
  const at = (event.clientX - box.left - LEFT + offset) / scale, near = 4 / scale;
  const found = run.events.filter((e) => e[2] === group && at >= e[0] - near && at <= e[0] + e[1] + near)
    .sort((a, b) => Math.abs(a[0] + a[1] / 2 - at) - Math.abs(b[0] + b[1] / 2 - at))[0];
  byId("kernel").textContent = found ? run.names[found[3]] + ", " + number(found[1] / 100) + " µs" : "";
}

// What ncu counted of a class: of its longest kernel.
const hardware = (row) => data.counters.find((entry) =>
  entry.class === row.name && entry.provider === run.provider && entry.batch === run.batch && run.mode !== "prefill") || {};

// Tables. A column: heading, value to sort by, text to show.
const COLUMNS = [
  ["class", (row) => row.name, (row) => row.name],
  ["ms", (row) => row.ms, (row) => row.ms.toFixed(4)],
  ["share", (row) => row.share, (row) => percent(row.share)],
  ["of roof", (row) => row.of_roof, (row) => percent(row.of_roof)],
  ["GB/s", (row) => row.gb_per_s, (row) => number(row.gb_per_s)],
  ["TFLOP/s", (row) => row.tflop_per_s, (row) => number(row.tflop_per_s)],
  ["flops a byte", (row) => row.intensity, (row) => number(row.intensity)],
  ["bytes", (row) => row.bytes, (row) => bytes(row.bytes)],
  ["counted", (row) => row.counted, (row) => bytes(row.counted)],
  ["occupancy", (row) => hardware(row).occupancy, (row) => number(hardware(row).occupancy)],
  ["waits for", (row) => hardware(row).stalls, (row) => hardware(row).stalls || ""],
  ["kernels", (row) => row.kernels, (row) => row.kernels ? String(Math.round(row.kernels * 10) / 10) : ""],
  ["longest kernel", (row) => row.kernel, (row) => row.kernel],
];
const HELP = [
  ["class", (row) => row.name, (row) => row.name],
  ["ms now", (row) => row.ms, (row) => row.ms.toFixed(4)],
  ["at its roof", (row) => row.floor, (row) => row.group === "other" ? "not known" : row.floor.toFixed(4)],
  ["gain, ms", (row) => row.gain, (row) => row.gain.toFixed(4)],
  ["of the step", (row) => row.gain / run.sum_ms, (row) => percent(row.gain / run.sum_ms)],
];
// What halfbyte changes, a line a group: measured where both were run in this mode, and why.
function changes() {
  const times = (provider) => {
    const found = data.runs.find((r) => r.provider === provider && r.mode === run.mode && r.batch === run.batch);
    if (!found) return null;
    const sums = {};
    found.rows.forEach((row) => { sums[row.group] = (sums[row.group] || 0) + row.ms; });
    return sums;
  };
  const theirs = times("bitsandbytes"), ours = times("halfbyte");
  const groups = data.groups.filter((group) => (theirs && theirs[group]) || (ours && ours[group]) || run.rows.some((row) => row.group === group));
  byId("changes").replaceChildren(...groups.map((group) => {
    const line = make("li");
    const measured = theirs && ours ? `: ${number(theirs[group] || 0)} → ${number(ours[group] || 0)} ms` : "";
    line.append(make("b", group + measured), make("span", ". " + data.help[group].replaceAll("`", "") + "."));
    return line;
  }));
}
const order = { classes: [null, 1], help: [3, -1] };
function table(id, all) {
  const columns = data.counters.length ? all : all.filter(([heading]) => !["counted", "occupancy", "waits for"].includes(heading));
  const [sorted, direction] = order[id];
  const rows = [...run.rows];
  if (sorted !== null) {
    const value = columns[sorted][1];
    const rank = (x) => x === null || x === undefined || x === "" ? null : x;
    rows.sort((a, b) => {
      const x = rank(value(a)), y = rank(value(b));
      if (x === null || y === null) return (x === null) - (y === null); // what is empty stays below
      return direction * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  }
  const head = make("tr");
  columns.forEach(([heading], place) => {
    const cell = make("th"), button = make("button", heading);
    cell.scope = "col";
    if (place === sorted) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    button.type = "button";
    button.addEventListener("click", () => {
      const text = typeof columns[place][1](run.rows[0]) === "string";
      order[id] = order[id][0] === place ? [place, -order[id][1]] : [place, text ? 1 : -1];
        table(id, all);
    });
    cell.append(button);
    head.append(cell);
  });
  byId(id).tHead.replaceChildren(head);
  byId(id).tBodies[0].replaceChildren(...rows.map((row) => {
    const line = make("tr");
    columns.forEach(([, , show], place) => {
      const cell = make("td", show(row));
      if (place === 0) {
        const key = make("i", "", "key");
        key.style.background = data.colors[row.group];
        cell.prepend(key);
      }
      line.append(cell);
    });
    return line;
  }));
}

// The roofline: both axes logarithmic.
function roofline() {
  const W = 480, H = 380, pad = { left: 48, right: 14, top: 14, bottom: 36 };
  const points = run.rows.filter((row) => row.intensity && row.tflop_per_s);
  const { read, matrix } = data.roofs, ridge = 1000 * matrix / read;
  const decade = (value, up) => 10 ** (up ? Math.ceil : Math.floor)(Math.log10(value));
  const xs = [decade(Math.min(0.3, ...points.map((p) => p.intensity)), false), decade(ridge * 3, true)];
  const ys = [decade(Math.min(matrix / 100, ...points.map((p) => p.tflop_per_s)), false), decade(matrix * 1.2, true)];
  const place = (value, [low, high], from, to) => from + (to - from) * Math.log(value / low) / Math.log(high / low);
  const x = (value) => place(value, xs, pad.left, W - pad.right), y = (value) => place(value, ys, H - pad.bottom, pad.top);
  const svg = (tag, facts, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(facts)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "roofline" });
  const power = (value) => value >= 1e4 || value < 1e-3 ? "10^" + Math.round(Math.log10(value)) : String(Number(value.toPrecision(1)));
  for (let value = xs[0]; value <= xs[1] * 1.01; value *= 10) {
    root.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: pad.top, y2: H - pad.bottom }));
    root.append(svg("text", { class: "soft", x: x(value), y: H - pad.bottom + 14, "text-anchor": "middle" }, power(value)));
  }
  for (let value = ys[0]; value <= ys[1] * 1.01; value *= 10) {
    root.append(svg("line", { class: "grid", x1: pad.left, x2: W - pad.right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { class: "soft", x: pad.left - 5, y: y(value) + 4, "text-anchor": "end" }, power(value)));
  }
  const low = Math.max(xs[0], 1000 * ys[0] / read);
  root.append(svg("path", { class: "roof", d: `M${x(low)} ${y(low * read / 1000)}L${x(ridge)} ${y(matrix)}H${W - pad.right}` }));
  root.append(svg("text", { x: W - pad.right, y: y(matrix) - 5, "text-anchor": "end" }, number(matrix) + " TFLOP/s"));
  root.append(svg("text", { x: pad.left + 6, y: pad.top + 14 }, "read " + number(read) + " GB/s"));
  root.append(svg("text", { class: "soft", x: W - pad.right, y: H - 4, "text-anchor": "end" }, "flops a byte"));
  root.append(svg("text", { class: "soft", x: 4, y: 10 }, "TFLOP/s"));
  const longest = Math.max(...points.map((row) => row.ms), 1e-9);
  for (const row of points) {
    const r = 3 + 15 * Math.sqrt(row.ms / longest);
    const circle = svg("circle", { cx: x(row.intensity), cy: y(row.tflop_per_s), r, fill: data.colors[row.group], "fill-opacity": 0.7, stroke: "#fff", "stroke-width": 0.5 });
    circle.append(svg("title", {}, `${row.name}: ${number(row.ms)} ms, ${percent(row.of_roof)} of its roof`));
    root.append(circle);
  }
  // Products of one batch share an intensity: labels stand in a column beside the points, none on another.
  const columns = [];
  for (const row of [...points].sort((a, b) => a.intensity - b.intensity)) {
    const last = columns[columns.length - 1];
    if (last && x(row.intensity) - x(last[0].intensity) < 40) last.push(row); else columns.push([row]);
  }
  for (const column of columns) {
    column.sort((a, b) => a.tflop_per_s - b.tflop_per_s);
    const heights = column.map((row) => y(row.tflop_per_s)), top = heights[heights.length - 1];
    for (let place = 1; place < heights.length; place++) heights[place] = Math.min(heights[place], heights[place - 1] - 13);
    const excess = (top - heights[heights.length - 1]) / 2;
    const right = Math.max(...column.map((row) => x(row.intensity))) + 24, end = right > W - 60;
    column.forEach((row, place) => {
      const ty = Math.min(heights[place] + excess, H - pad.bottom - 4), tx = end ? right - 48 : right;
      root.append(svg("line", { class: "grid", x1: x(row.intensity), y1: y(row.tflop_per_s), x2: end ? tx + 2 : tx - 2, y2: ty }));
      root.append(svg("text", { x: tx, y: ty + 4, "text-anchor": end ? "end" : "start" }, row.name));
    });
  }
  byId("roofline").replaceChildren(root);
}

function ceilings() {
  const { bandwidth, matrix, launch } = data.ceilings, kinds = Object.keys(bandwidth);
  const line = (tag, cells) => {
    const row = make("tr");
    row.append(...cells.map((text) => make(tag, text)));
    return row;
  };
  const size = (count) => count >= 2 ** 30 ? count / 2 ** 30 + " GiB" : count / 2 ** 20 + " MiB";
  const speed = (found) => number(found.median) + " (" + number(found.low) + "–" + number(found.high) + ")";
  byId("ceilings").tHead.replaceChildren(line("th", ["buffer", ...kinds.map((kind) => kind + ", GB/s")]));
  byId("ceilings").tBodies[0].replaceChildren(...Object.keys(bandwidth.read).map((count) =>
    line("td", [size(Number(count)), ...kinds.map((kind) => speed(bandwidth[kind][count]))])));
  byId("launch").textContent = "TFLOP/s: " + Object.entries(matrix).map(([name, found]) => name + " " + speed(found)).join(", ") +
    ". A small kernel, µs: " + Object.entries(launch).map(([name, us]) => name + " " + number(us)).join(", ") + ".";
}
function unknown() {
  const lines = run.other.map((entry) => make("li", `${entry.name}: ${number(entry.ms)} ms, ${number(entry.kernels)} a step`));
  const list = make("ul");
  list.append(...lines);
  byId("unknown").replaceChildren(...(lines.length ? [make("h2", "Kernels of no known class"), list] : []));
}

function show() {
  run = chosen();
  KEYS.forEach((key) => { byId(key).value = String(run[key]); });
  byId("kernel").textContent = "";
  summary();
  timeline();
  table("classes", COLUMNS);
  table("help", HELP);
  changes();
  roofline();
  unknown();
}
KEYS.forEach((key) => {
  byId(key).replaceChildren(...distinct(key).map((value) => make("option", String(value))));
  byId(key).addEventListener("change", show);
});
const first = ["fused graph", "graph", "eager", "prefill"].find((mode) => distinct("mode").includes(mode));
byId("mode").value = first;
if (distinct("provider").includes("halfbyte")) byId("provider").value = "halfbyte";
byId("zoom").addEventListener("input", timeline);
byId("scroll").addEventListener("scroll", () => requestAnimationFrame(timeline));
byId("timeline").addEventListener("pointerdown", point);
byId("timeline").addEventListener("pointermove", point);
window.addEventListener("resize", timeline);
ceilings();
show();
