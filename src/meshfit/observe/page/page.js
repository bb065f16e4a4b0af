"use strict";
// Draws the data that lies in #data; on a live page, also what comes after it. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const dark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const ink = (kind) => (dark() ? kind.dark : kind.colour);
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const sentence = (text) => (/^\w*[_=]/.test(text) ? text : text[0].toUpperCase() + text.slice(1)) + "."; // but for a word of code
const percent = (share) => (share >= 0.0995 ? Math.round(share * 100) : (share * 100).toFixed(1)) + " %";

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3).replace(/\.?0+$/, "") + " M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3).replace(/\.?0+$/, "") + " k";
  if (size >= 100 || value === Math.round(value)) return Math.round(value).toLocaleString("en");
  if (size >= 1e-4 || size === 0) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}
function duration(s, digits = 3) {
  if (s < 0.001) return Number((s * 1e6).toPrecision(digits)) + " µs";
  if (s < 1) return Number((s * 1e3).toPrecision(digits)) + " ms";
  return Number(s.toPrecision(digits)) + " s";
}
function ticks(low, high, count) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((f) => f * power >= raw) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// One tooltip for the whole page.
const tip = html("div", { class: "tip", role: "status" });
document.body.append(tip);
function showTip(event, head, rows) {
  tip.replaceChildren(html("div", {}, head), ...rows.map(([colour, name, value]) =>
    html("div", {}, html("i", { style: { background: colour } }), name, html("b", {}, value))));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - box.height - 4, event.clientY + 14)) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

// A line chart, stacked areas or a heat map. Hover reads it, dragging zooms all charts of the same x, a double click resets.
const charts = new Map();
const zooms = { step: null, s: null };

class Chart {
  constructor(spec) {
    this.hidden = new Set();
    this.legend = html("div", { class: "legend" });
    this.svg = svg("svg", { role: "img", tabindex: "0" });
    this.heading = html("h3", {});
    this.element = html("figure", { class: "chart" + (spec.wide ? " wide" : ""), id: "chart-" + spec.id }, this.heading, this.svg, this.legend);
    this.svg.addEventListener("pointermove", (e) => this.move(e));
    this.svg.addEventListener("pointerleave", () => { hideTip(); this.over?.replaceChildren(); });
    this.svg.addEventListener("pointerdown", (e) => this.press(e));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("keydown", (e) => { if (e.key === "Escape") this.zoom(null); });
    this.set(spec);
  }
  set(spec) {
    this.spec = spec;
    this.svg.setAttribute("aria-label", spec.title);
    this.heading.replaceChildren(...[spec.title, html("small", {}, spec.unit),
      spec.log === undefined ? null : html("button", { class: "log", onclick: () => { this.log = !(this.log ?? spec.log); this.set(this.spec); } }, (this.log ?? spec.log) ? "linear" : "log"),
      html("button", { class: "reset", onclick: () => this.zoom(null) }, "reset zoom")].filter(Boolean));
    this.draw();
  }
  colour(series) { return series.kind ? ink(data.kinds[series.kind]) : variable("--t" + (series.tone || 0)); }
  zoom(range) {
    zooms[this.spec.x] = range;
    for (const chart of charts.values()) if (chart.spec.x === this.spec.x) chart.draw();
  }
  get shown() { return this.spec.series.filter((s) => !this.hidden.has(s.name)); }
  draw() {
    if (this.element.clientWidth < 120) return; // not on the page yet
    const spec = this.spec, width = this.element.clientWidth - 36, height = spec.wide ? 250 : 190;
    const box = { left: 46, right: 8, top: 8, bottom: 24 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const xs = spec.series.flatMap((s) => s.x);
    const full = [Math.min(...xs), Math.max(...xs)];
    const zoomed = zooms[spec.x];
    let [x0, x1] = zoomed || full;
    if (x1 <= x0) { x0 -= 0.5; x1 += 0.5; }
    this.element.classList.toggle("zoomed", Boolean(zoomed));
    this.range = [x0, x1];
    const inner = { w: width - box.left - box.right, h: height - box.top - box.bottom };
    this.x = (v) => box.left + ((v - x0) / (x1 - x0)) * inner.w;
    this.back = (px) => x0 + ((px - box.left) / inner.w) * (x1 - x0);
    this.box = box; this.size = { width, height };
    const parts = spec.heat ? this.heat(inner) : this.lines(inner, x0, x1);
    ticks(x0, x1, Math.max(2, Math.floor(inner.w / 90))).forEach((at, i) => {
      const said = spec.x === "s" ? (at >= 600 ? short(at / 60) + " min" : short(at) + " s") : (i ? "" : "step ") + short(at);
      parts.push(svg("text", { x: this.x(at), y: height - 6, "text-anchor": "middle" }, said));
    });
    this.over = svg("g", {});
    this.svg.replaceChildren(...parts, this.over);
    this.drawLegend();
  }
  lines(inner, x0, x1) {
    const spec = this.spec, parts = [];
    const stacks = spec.stack ? this.stacked() : null;
    let low = Infinity, high = -Infinity;
    const within = (s, ys) => s.x.forEach((x, i) => {
      if (ys[i] === null || x < x0 || x > x1) return;
      low = Math.min(low, ys[i]); high = Math.max(high, ys[i]);
    });
    this.shown.forEach((s, i) => within(s, stacks ? stacks[i] : s.y));
    if (stacks) { low = 0; if (spec.top) high = spec.top; }
    if (!(high > -Infinity)) { low = 0; high = 1; }
    const log = (this.log ?? spec.log) && low > 0 && high / low > 3;
    if (!log && !stacks && low > 0 && (spec.zero || low < 0.55 * high)) low = 0;
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= low ? Math.abs(low) * 0.1 : 0; }
    if (!spec.top && !log) { const room = (high - low) * 0.05; high += room; if (low !== 0) low -= room; }
    const scale = (v) => (log ? Math.log10(Math.max(v, 1e-30)) : v);
    const [l, h] = [scale(low), scale(high)];
    this.y = (v) => this.box.top + inner.h - ((scale(v) - l) / (h - l)) * inner.h;
    const marks = log ? ticks(Math.floor(l), Math.ceil(h), 5).filter((v) => v >= l && v <= h && v === Math.round(v)).map((v) => 10 ** v) : ticks(low, high, 5);
    for (const at of marks) {
      const y = this.y(at);
      parts.push(svg("line", { class: "grid", x1: this.box.left, x2: this.size.width - this.box.right, y1: y, y2: y }));
      parts.push(svg("text", { x: this.box.left - 8, y: y + 4, "text-anchor": "end" }, short(at)));
    }
    const id = "clip-" + spec.id.replace(/[^\w-]/g, "");
    parts.push(svg("clipPath", { id }, svg("rect", { x: this.box.left - 5, y: 0, width: inner.w + 10, height: this.size.height - this.box.bottom + 2 })));
    const group = svg("g", { "clip-path": `url(#${id})` });
    if (stacks) {
      let below = this.shown[0]?.x.map(() => 0) || [];
      this.shown.forEach((s, i) => {
        const top = stacks[i].map((v, j) => `${this.x(s.x[j]).toFixed(1)},${this.y(v).toFixed(1)}`);
        const bottom = below.map((v, j) => `${this.x(s.x[j]).toFixed(1)},${this.y(v).toFixed(1)}`).reverse();
        group.append(svg("path", { d: "M" + [...top, ...bottom].join("L") + "Z", fill: this.colour(s), opacity: 0.85 }));
        below = stacks[i];
      });
    } else {
      for (const s of this.shown) {
        let path = "", pen = "M";
        s.x.forEach((x, i) => {
          if (s.y[i] === null) { pen = "M"; return; }
          path += `${pen}${this.x(x).toFixed(1)} ${this.y(s.y[i]).toFixed(1)}`; pen = "L";
        });
        group.append(svg("path", { class: "line " + (s.style || ""), d: path, stroke: this.colour(s) }));
        if (s.style === "points" && s.x.length < 80) s.x.forEach((x, i) => {
          if (s.y[i] !== null) group.append(svg("circle", { class: "dot", cx: this.x(x), cy: this.y(s.y[i]), r: 4, fill: this.colour(s) }));
        });
      }
    }
    parts.push(group);
    return parts;
  }
  stacked() {
    let sum = [];
    return this.shown.map((s) => { sum = s.y.map((v, i) => (sum[i] || 0) + (v || 0)); return sum; });
  }
  heat(inner) {
    const parts = [], rows = this.spec.series.length, h = inner.h / rows, paint = variable("--t0");
    this.spec.series.forEach((s, row) => s.x.forEach((x, i) => {
      const before = i ? s.x[i - 1] : x - (s.x[1] - s.x[0] || 1);
      const a = Math.max(this.x(before), this.box.left), b = Math.min(this.x(x), this.size.width - this.box.right);
      if (b > a) parts.push(svg("rect", { x: a.toFixed(1), y: (this.box.top + row * h).toFixed(1), width: (b - a + 0.3).toFixed(1), height: Math.max(h - 1, 0.8).toFixed(1), fill: paint, opacity: (0.06 + 0.0094 * (s.y[i] || 0)).toFixed(3) }));
    }));
    const every = Math.max(1, Math.ceil(rows / 8));
    for (let row = 0; row < rows; row += every) parts.push(svg("text", { x: this.box.left - 8, y: this.box.top + (row + 0.5) * h + 4, "text-anchor": "end" }, row));
    this.y = null;
    return parts;
  }
  drawLegend() {
    const spec = this.spec;
    if (spec.heat || spec.series.filter((s) => s.style !== "faint").length < 2) { this.legend.replaceChildren(); return; }
    this.legend.replaceChildren(...spec.series.filter((s) => s.style !== "faint").map((s) =>
      html("button", { class: this.hidden.has(s.name) ? "off" : "", onclick: () => {
        this.hidden.has(s.name) ? this.hidden.delete(s.name) : this.hidden.add(s.name);
        this.draw();
      } }, html("i", { style: { background: this.colour(s) } }), s.name)));
  }
  at(event) {
    const area = this.svg.getBoundingClientRect();
    return ((event.clientX - area.left) / area.width) * this.size.width;
  }
  move(event) {
    if (this.dragging) return;
    const wanted = this.back(this.at(event)), rows = [];
    let shown = null;
    for (const s of this.spec.heat ? this.spec.series.slice(0, 12) : this.shown) {
      if (s.style === "faint" && this.shown.length > 1) continue;
      const i = nearest(s.x, wanted);
      if (i < 0 || s.y[i] === null) continue;
      if (shown === null || Math.abs(s.x[i] - wanted) < Math.abs(shown - wanted)) shown = s.x[i];
      rows.push([this.colour(s), s.name, short(s.y[i]) + (this.spec.unit.startsWith("%") ? " %" : ""), s.x[i], s.y[i]]);
    }
    if (shown === null) return;
    const x = this.x(shown);
    const marks = [svg("line", { class: "cross", x1: x, x2: x, y1: this.box.top, y2: this.size.height - this.box.bottom })];
    if (this.y && !this.spec.stack) for (const row of rows) marks.push(svg("circle", { class: "dot", cx: this.x(row[3]), cy: this.y(row[4]), r: 4, fill: row[0] }));
    this.over.replaceChildren(...marks);
    showTip(event, this.spec.x === "step" ? "step " + Math.round(shown).toLocaleString("en") : duration(shown) + " in", rows.map((r) => r.slice(0, 3)));
  }
  press(event) {
    if (event.button) return;
    const from = this.at(event);
    this.dragging = true;
    hideTip();
    this.svg.setPointerCapture(event.pointerId);
    const clamp = (px) => Math.max(this.box.left, Math.min(this.size.width - this.box.right, px));
    const drag = (e) => {
      const [a, b] = [clamp(from), clamp(this.at(e))].sort((p, q) => p - q);
      this.over.replaceChildren(svg("rect", { class: "select", x: a, y: this.box.top, width: b - a, height: this.size.height - this.box.top - this.box.bottom }));
    };
    const end = (e) => {
      this.dragging = false;
      this.svg.removeEventListener("pointermove", drag);
      this.over.replaceChildren();
      const [a, b] = [clamp(from), clamp(this.at(e))].sort((p, q) => p - q);
      if (b - a > 6) this.zoom([this.back(a), this.back(b)]);
    };
    this.svg.addEventListener("pointermove", drag);
    this.svg.addEventListener("pointerup", end, { once: true });
  }
}
function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < wanted) low = mid; else high = mid; }
  return Math.abs(xs[low] - wanted) <= Math.abs(xs[high] - wanted) ? low : high;
}

// Lanes of spans on a canvas: one a device. Dragging zooms, a double click resets, with Shift it moves.
class Timeline {
  constructor() {
    this.canvas = html("canvas", { tabindex: "0", role: "img", "aria-label": "timeline of all devices" });
    this.buttons = html("span", { class: "switch" });
    this.legend = html("div", { class: "legend" });
    this.which = 0;
    this.view = null;
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("pointerdown", (e) => this.press(e));
    this.canvas.addEventListener("dblclick", () => { this.view = null; this.draw(); });
    this.canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || e.metaKey) { e.preventDefault(); this.scale(e.deltaY > 0 ? 1.25 : 0.8, this.time(e)); } }, { passive: false });
    this.canvas.addEventListener("keydown", (e) => {
      const [a, b] = this.range, by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[e.key];
      if (by) this.view = [a + by * (b - a), b + by * (b - a)];
      else if (e.key === "+" || e.key === "-") return this.scale(e.key === "+" ? 0.7 : 1.4, (a + b) / 2);
      else if (e.key === "Escape") this.view = null; else return;
      e.preventDefault(); this.draw();
    });
    this.aside = html("span", { class: "aside" });
    this.element = html("section", { id: "timeline" },
      html("div", { class: "title" }, html("h2", {}, "Timeline"), this.buttons, this.aside),
      html("div", { class: "lanes" }, this.canvas), this.legend);
  }
  set(spec) {
    this.spec = spec;
    this.which = Math.min(this.which, Math.max(0, spec.windows.length - 1));
    this.buttons.replaceChildren(...spec.windows.map((w, i) => html("button", { class: i === this.which ? "on" : "", onclick: () => { this.which = i; this.view = null; this.set(this.spec); } }, w.label)));
    this.legend.replaceChildren(...spec.kinds.map((k) => html("span", {}, html("i", { class: k.waits ? "waits" : "", style: { backgroundColor: ink(k) } }), k.label)));
    this.draw();
  }
  get range() {
    const w = this.spec.windows[this.which];
    return this.view || (w ? [w.start, w.end] : [0, 1]);
  }
  scale(by, around) {
    const [a, b] = this.range;
    this.view = [around - (around - a) * by, around + (b - around) * by];
    this.draw();
  }
  get rows() { // each lane with its place; those of the ideal stand below a line of words
    const below = this.spec.lanes.length * (this.lane + this.gap), words = 24;
    return [...this.spec.lanes.map((row, i) => ({ row, y: this.top + i * (this.lane + this.gap) })),
      ...(this.spec.ideal || []).map((row, i) => ({ row, ideal: true, y: this.top + below + words + i * (this.lane + this.gap) }))];
  }
  draw() {
    const lane = 30, gap = 9, top = 26, width = this.canvas.parentElement?.clientWidth || 1000, left = width < 560 ? 58 : 74;
    Object.assign(this, { lane, gap, left, top, width });
    const spec = this.spec, rows = this.rows, ratio = devicePixelRatio || 1;
    const height = (rows.length ? rows[rows.length - 1].y + lane + gap : top) + 12;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    this.canvas.style.height = height + "px";
    const c = this.canvas.getContext("2d");
    c.scale(ratio, ratio);
    const [t0, t1] = this.range, per = (width - left - 10) / (t1 - t0);
    this.per = per;
    const steps = spec.windows[this.which]?.steps;
    this.aside.textContent = (steps && !this.view ? (steps[0] === steps[1] ? `step ${steps[0]}` : `steps ${steps[0]} to ${steps[1]}`) + ", " : "") + `${duration(t1 - t0)} across; drag to zoom, double click to go back`;
    c.font = "11px " + variable("--sans");
    c.textBaseline = "middle";
    for (const at of ticks(0, t1 - t0, Math.max(2, Math.floor((width - left) / 110)))) {
      const x = left + at * per;
      c.fillStyle = variable("--line"); c.fillRect(x, top - 6, 1, height - top);
      c.fillStyle = variable("--faint"); c.textAlign = x > width - 34 ? "right" : "center"; c.fillText(at ? duration(at) : "0", Math.min(x, width - 4), 11);
    }
    if (spec.ideal?.length) {
      const y = top + spec.lanes.length * (lane + gap) + 10;
      c.fillStyle = variable("--card"); c.fillRect(left - 1, y - 9, width - left, 18);
      c.fillStyle = variable("--soft"); c.textAlign = "left";
      const [without, measured] = spec.idle.map(percent), head = width < 480 ? `ideal: ${without} idle, measured: ${measured}` : `ideal: ${without} idle between microbatches, measured: ${measured}`;
      c.fillText(width < 760 ? head : head + " (the same work in the same order, with transfers that take no time and nobody late)", left, y);
    }
    for (const { row, ideal, y } of rows) {
      c.fillStyle = variable("--soft"); c.textAlign = "right"; c.fillText(row.label, left - 12, y + lane / 2);
      c.fillStyle = variable("--fill"); c.fillRect(left, y, width - left - 10, lane);
      const box = (at, took, paint, from, tall) => {
        if (at + took < t0 || at > t1) return [0, 0];
        const x = left + Math.max(at - t0, 0) * per, w = Math.max(left + Math.min(at + took - t0, t1 - t0) * per - x, 0.6);
        c.fillStyle = paint; c.fillRect(x, from, w - (w > 3 ? 0.7 : 0), tall);
        return [x, w];
      };
      for (const [kind, at, took, , micro] of row.spans) {
        const k = spec.kinds[kind], tall = k.waits ? lane / 3 : lane;
        c.globalAlpha = ideal ? 0.72 : 1;
        const [x, w] = box(at, took, ink(k), y + lane - tall, tall);
        c.globalAlpha = 1;
        if (micro !== undefined && w > 12) { c.fillStyle = "#fff"; c.textAlign = "center"; c.fillText(micro, x + w / 2, y + lane / 2 + 0.5); }
      }
      for (const [kind, at, took] of row.beside || []) box(at, took, ink(spec.kinds[kind]), y + lane + 1, gap - 5);
    }
  }
  time(event) {
    const area = this.canvas.getBoundingClientRect();
    return this.range[0] + (event.clientX - area.left - this.left) / this.per;
  }
  move(event) {
    if (this.dragging) return;
    const area = this.canvas.getBoundingClientRect(), at = this.time(event);
    const down = event.clientY - area.top, place = this.rows.find(({ y }) => down >= y && down < y + this.lane + this.gap), row = place?.row;
    const slack = 1.5 / this.per, spans = place && down > place.y + this.lane ? row.beside || [] : row?.spans;
    const span = spans?.find(([, from, took]) => at >= from && at <= from + took) || spans?.find(([, from, took]) => at >= from - slack && at <= from + took + slack);
    if (!span) return hideTip();
    const kind = this.spec.kinds[span[0]], rows = [[ink(kind), kind.label, duration(span[2])]];
    if (span[4] !== undefined) rows.push(["transparent", "microbatch", String(span[4])]);
    showTip(event, `${row.label}${place.ideal ? ", ideal" : ""}, step ${span[3]}`, rows);
  }
  press(event) {
    if (event.button) return;
    const from = this.time(event), start = [...this.range];
    this.dragging = true;
    hideTip();
    this.canvas.setPointerCapture(event.pointerId);
    const drag = (e) => {
      if (e.shiftKey) {
        const by = from - (start[0] + (e.clientX - this.canvas.getBoundingClientRect().left - this.left) / this.per);
        this.view = [start[0] + by, start[1] + by];
        return this.draw();
      }
      this.draw();
      const c = this.canvas.getContext("2d"), a = this.left + (from - this.range[0]) * this.per, b = this.left + (this.time(e) - this.range[0]) * this.per;
      c.globalAlpha = 0.18; c.fillStyle = variable("--accent"); c.fillRect(Math.min(a, b), this.top - 6, Math.abs(b - a), 9999); c.globalAlpha = 1;
    };
    this.canvas.addEventListener("pointermove", drag);
    this.canvas.addEventListener("pointerup", (e) => {
      this.dragging = false;
      this.canvas.removeEventListener("pointermove", drag);
      const to = this.time(e);
      if (!e.shiftKey && Math.abs(to - from) * this.per > 6) this.view = [Math.min(from, to), Math.max(from, to)];
      this.draw();
    }, { once: true });
  }
}

// The page, from top to bottom.
let data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const timeline = new Timeline();
const parts = {};

function part(name, make) {
  if (!parts[name]) { parts[name] = html("div", {}); page.append(parts[name]); }
  parts[name].replaceChildren(...[make()].flat().filter(Boolean));
}
function section(title, aside, ...content) {
  return html("section", {}, html("div", { class: "title" }, html("h2", {}, title), aside ? html("span", { class: "aside" }, aside) : null), ...content);
}
const words = { finished: "finished", failed: "failed", running: "under way", cut: "cut off" };

function head(d) {
  const theme = html("button", { class: "theme", title: "light or dark", "aria-label": "light or dark", onclick: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; render(); } });
  return html("header", { class: "top" }, html("h1", {}, d.name), d.plan ? html("span", { class: "plan" }, d.plan) : null,
    d.state ? html("span", { class: "state " + d.state }, words[d.state]) : null, html("span", { class: "right" }, html("span", {}, d.when || ""), theme));
}
function verdict(d) {
  const found = [];
  if (d.error) found.push(html("div", { class: "error" }, d.error));
  const v = d.verdict;
  if (v) {
    const said = sentence(v.evidence), change = v.change ? " " + sentence(v.change) : "";
    found.push(html("div", { class: "verdict" + (v.good ? " good" : "") }, html("span", { class: "word" }, v.title[0].toUpperCase() + v.title.slice(1)), html("p", {}, said, html("em", {}, change)),
      v.gain ? html("span", { class: "aside" }, `Without it: ${v.gain} as fast, at best.`) : null));
  }
  return found;
}
function tiles(d) {
  return html("div", { class: "tiles" }, d.tiles.map((t) => html("div", { class: "tile" }, html("div", { class: "label" }, t.label), html("div", { class: "value" }, t.value), html("div", { class: "note" }, t.note))));
}
function bars(d) {
  if (!d.bars.some((b) => b.parts.length)) return null;
  const wide = page.clientWidth - (page.clientWidth > 860 ? 260 : 100);
  const used = [...new Set(d.bars.flatMap((b) => b.parts.map(([name]) => name)))];
  const rows = d.bars.map((b) => html("div", { class: "row" }, html("span", {}, b.label),
    html("div", { class: "bar" }, b.parts.map(([name, share]) => {
      const kind = d.kinds[name];
      const box = html("i", { class: kind.waits ? "waits" : "", style: { width: share * 100 + "%", backgroundColor: ink(kind) } }, share * wide > 40 ? percent(share) : null);
      box.addEventListener("pointermove", (e) => showTip(e, b.label, [[ink(kind), kind.label, percent(share)]]));
      box.addEventListener("pointerleave", hideTip);
      return box;
    })), html("span", { class: "note" }, b.note)));
  const legend = html("div", { class: "legend" }, used.map((name) => html("span", {}, html("i", { class: d.kinds[name].waits ? "waits" : "", style: { backgroundColor: ink(d.kinds[name]) } }), d.kinds[name].label)));
  return section("Where the time went", "striped: the device waits", html("div", { class: "bars" }, rows), legend);
}
function findings(d) {
  const rest = d.findings.filter((f, i) => i && !f.good); // the first is the verdict
  if (!rest.length) return null;
  return section("Also worth a look", null, html("div", { class: "findings" }, rest.map((f) => html("article", {}, html("h3", {}, f.title[0].toUpperCase() + f.title.slice(1)),
    html("p", {}, html("b", {}, sentence(f.evidence)), f.change ? sentence(f.change) : null),
    html("div", { class: "gain" }, f.gain ? html("b", {}, f.gain) : null, f.gain ? "as fast, at best" : null)))));
}
function chartsOf(d) {
  if (!parts.charts) { parts.charts = section("In numbers", "hover to read, drag to zoom"); parts.grid = html("div", { class: "charts" }); parts.charts.append(parts.grid); page.append(parts.charts); }
  for (const spec of d.charts) {
    if (charts.has(spec.id)) charts.get(spec.id).set(spec);
    else { const chart = new Chart(spec); charts.set(spec.id, chart); parts.grid.append(chart.element); chart.draw(); }
  }
}
function tables(d) {
  const pairs = (t) => html("dl", {}, t.rows.map(([k, v]) => [html("dt", {}, k), html("dd", {}, v)]));
  const columns = (t) => html("table", {}, html("thead", {}, html("tr", {}, t.head.map((h) => html("th", {}, h)))), html("tbody", {}, t.rows.map((row) => html("tr", {}, row.map((v) => html("td", {}, v))))));
  return section("About this run", null, html("div", { class: "tables" }, d.tables.map((t) => html("div", { class: "table" }, html("h3", {}, t.title), t.head ? columns(t) : pairs(t)))));
}
function notes(d) {
  return d.notes.length ? section("Decided on the way", null, html("ul", { class: "notes" }, d.notes.map((n) => html("li", {}, n)))) : null;
}
function renderRun(d) {
  document.title = d.name + " · meshfit";
  part("head", () => head(d));
  part("verdict", () => verdict(d));
  part("tiles", () => tiles(d));
  part("bars", () => bars(d));
  part("findings", () => findings(d));
  if (d.timeline.lanes.length) {
    if (!timeline.element.isConnected) page.append(timeline.element);
    timeline.set(d.timeline);
  }
  chartsOf(d);
  part("notes", () => notes(d));
  part("tables", () => tables(d));
  part("foot", () => html("footer", {}, html("span", {}, "Drawn by meshfit from the run's own events."), html("span", {}, d.live ? "live" : "")));
}
function spark(loss) {
  const ys = loss.y.filter((y) => y !== null);
  if (ys.length < 2) return null;
  const low = Math.min(...ys), high = Math.max(...ys), x1 = loss.x[loss.x.length - 1], x0 = loss.x[0];
  const at = (x, y) => `${(((x - x0) / (x1 - x0 || 1)) * 300).toFixed(1)} ${(56 - ((y - low) / (high - low || 1)) * 52).toFixed(1)}`;
  const path = loss.x.map((x, i) => (loss.y[i] === null ? "" : at(x, loss.y[i]))).filter(Boolean).join("L");
  return svg("svg", { viewBox: "0 0 300 60", preserveAspectRatio: "none" }, svg("path", { d: "M" + path, fill: "none", stroke: variable("--t0"), "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
}
function renderRuns(d) {
  document.title = d.name + " · meshfit";
  part("head", () => head(d));
  part("runs", () => html("div", { class: "runs" }, d.runs.map((r) => html("a", { class: "run", href: "run/" + r.id },
    html("h2", {}, r.name, html("span", { class: "aside" }, words[r.state])), html("span", { class: "plan" }, r.plan), spark(r.loss),
    r.of ? html("div", { class: "progress" }, html("i", { style: { width: Math.min(100, (100 * r.steps) / r.of) + "%" } })) : null,
    html("div", { class: "figures" }, r.tiles.map((t) => html("span", {}, html("b", {}, t.value), t.label))),
    r.verdict ? html("p", {}, r.verdict.title + ": " + r.verdict.evidence) : null))));
}
function render() { (data.mode === "runs" ? renderRuns : renderRun)(data); }

render();
let pending = 0;
addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => { for (const chart of charts.values()) chart.draw(); if (data.timeline) timeline.draw(); }); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);

let theme;
addEventListener("beforeprint", () => { theme = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; render(); });
addEventListener("afterprint", () => { if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme; render(); });

// Live: asks again after each answer, less often when it is not looked at; the page stays if nobody answers.
async function follow() {
  for (;;) {
    await new Promise((go) => setTimeout(go, document.hidden ? 15000 : data.every * 1000));
    try {
      const answer = await fetch(data.source, { cache: "no-store", credentials: "same-origin" });
      if (!answer.ok) continue;
      data = await answer.json();
      render();
      if (data.state && data.state !== "running") return;
    } catch { /* the server is gone, or not yet back */ }
  }
}
if (data.live) follow();
