"use strict";
// Draws a run from the data in the page. Text of the run is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 230, RIGHT = 70, ROW = 30, BAR = 20, LINE = 14, CHARACTER = 7.2;
const NARROW = 640;
const KINDS = {
  forward: "forward", backward: "backward", optimizer: "optimizer step", sync: "norm", idle: "idle",
};
const PARTS = {
  frozen: "frozen weights", trained: "trained weights", state: "gradients, optimizer states",
  activation: "activations in flight", workspace: "workspace", driver: "driver",
};
const POLL_MS = 1000;

let data = JSON.parse(document.getElementById("data").textContent);
KINDS.sync = data.exchanges;
const page = document.getElementById("page");
const tip = element("div", { id: "tip", role: "status" });
document.body.append(tip);

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function seconds(value) {
  if (value === 0) return "0 s";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (value >= size || unit === "us") return `${(value / size).toPrecision(3)} ${unit}`;
  }
}

function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function showTip(event) {
  const text = event.target.dataset && event.target.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const over = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${Math.max(4, over ? event.clientX - 10 - tip.offsetWidth : event.clientX + 14)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4)}px`;
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function table(of) {
  const kind = (index) => (of.numbers[index] ? { class: "number" } : {});
  const head = element("tr", {}, ...of.titles.map((title, index) => element("th", kind(index), title)));
  const rows = of.rows.map((row) =>
    element("tr", {}, ...row.map((cell, index) => element("td", kind(index), cell))));
  return element("div", { class: "wide" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function legend(words) {
  const entries = Object.entries(words).map(([kind, word]) =>
    element("span", {}, shape("svg", {}, shape("rect", { class: kind, width: 12, height: 12 })), word));
  return element("div", { class: "legend" }, ...entries);
}

function width() {
  return Math.max(280, page.clientWidth - 40);
}

// Where names and bars of the rows of a picture are: names at the left, where that leaves no room above the bars.
function placed(lines, said = 0) {
  const whole = width(), narrow = whole < NARROW, above = narrow ? lines * LINE : 0;
  return {
    whole, above, row: ROW + above, left: narrow ? 0 : LEFT,
    most: Math.floor((narrow ? whole - said : LEFT) / CHARACTER),
    line: (number) => (narrow ? number * LINE + 11 : lines === 1 ? 19 : 13 * (number + 1)),
  };
}

function fact(title, value) {
  return element("div", { class: "fact" }, title, element("b", {}, value));
}

function facts() {
  const found = [fact("predicted step", seconds(data.predicted.step_s))];
  if (data.report) {
    found.push(fact("measured step", seconds(data.report.step_s)));
    found.push(fact("error", `${data.report.error < 0 ? "" : "+"}${(100 * data.report.error).toFixed(1)} %`));
  }
  const steps = data.steps.length;
  if (steps) {
    found.push(fact(data.live ? "steps so far" : "steps", data.steps[steps - 1]));
    for (const [name, title] of [["loss", "loss"], ["eval_loss", "held-out loss"]]) {
      const known = (data.series[name] || []).filter((value) => typeof value === "number");
      if (known.length) found.push(fact(`last ${title}`, short(known[known.length - 1])));
    }
    for (const [name, text] of Object.entries(data.last_figures)) found.push(fact(`last held-out ${name}`, text));
    const rate = data.rates[steps - 1];
    if (rate) found.push(fact(data.rate, short(rate)));
  }
  return element("div", { class: "facts", id: "facts" }, ...found);
}

function timeline(of, end) {
  if (!of.events.length) {
    return element("p", {}, `${of.title}: ${of.num_events} events are too many for a page; trace.json has them, for Perfetto.`);
  }
  const { whole, above, row, left, most, line } = placed(2);
  const scale = (whole - left - RIGHT) / (end * 1e6), height = of.labels.length * row + 22;
  const svg = shape("svg", { viewBox: `0 0 ${whole} ${height}`, class: "timeline", role: "img", "aria-label": of.title });
  of.labels.forEach(([name, layers], rank) => {
    const y = rank * row;
    svg.append(shape("rect", { class: "idle", x: left, y: y + above + 4, width: of.step_s * 1e6 * scale, height: BAR }));
    const device = shape("text", { x: 0, y: y + line(0) }, cut(name, most));
    const held = shape("text", { x: 0, y: y + line(1), class: "small" }, cut(layers, Math.floor(1.1 * most)));
    device.dataset.tip = held.dataset.tip = `${name}\n${layers}`;
    svg.append(device, held, shape("text", { x: whole - RIGHT + 8, y: y + above + 18, class: "small" }, `${percent(of.idle[rank])} idle`));
  });
  for (const [rank, kind, words, number, start, taken] of of.events) {
    if (kind === "message") continue;
    const x = left + start * scale, y = rank * row + above, wide = Math.max(taken * scale, 0.4), thin = kind === "sync";
    const bar = shape("rect", { class: `bar ${kind}${wide < 3 ? " narrow" : ""}`, x, width: wide, y: y + (thin ? 5 + BAR : 4), height: thin ? 4 : BAR });
    bar.dataset.tip = `${words}: ${KINDS[kind]}\nfrom ${seconds(start / 1e6)}, for ${seconds(taken / 1e6)}`;
    svg.append(bar);
    if (number !== "" && wide > 6 + 6 * number.length) {
      svg.append(shape("text", { class: `number-in-bar ${kind}-number`, x: x + wide / 2, y: y + 18 }, number));
    }
  }
  const y = of.labels.length * row + 14;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = share || left ? "middle" : "start";
    svg.append(shape("text", { class: "small", x: left + share * end * 1e6 * scale, y, "text-anchor": anchor }, seconds(share * end)));
  }
  return element("div", {}, element("h3", {}, `${of.title}: ${seconds(of.step_s)}`), svg);
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function timelines() {
  const end = Math.max(...data.timelines.map((each) => each.step_s));
  return section("A step", legend(KINDS), ...data.timelines.map((each) => timeline(each, end)));
}

function memory() {
  const said_width = 190, { whole, above, row: height, left, most: letters, line } = placed(1, said_width);
  const used = Math.max(...data.memory.map((each) => Math.max(each.total, each.peak || 0)));
  const usable = Math.max(...data.memory.map((each) => each.usable));
  // a model that is small beside its devices is drawn so large that its parts are seen
  const most = usable > 3 * used ? 1.2 * used : Math.max(usable, used);
  const scale = (whole - left - (above ? 4 : said_width)) / most;
  const svg = shape("svg", { viewBox: `0 0 ${whole} ${data.memory.length * height}`, id: "memory", role: "img", "aria-label": "memory of each device" });
  data.memory.forEach((each, row) => {
    const top = row * height, y = top + above + 4, said = `${each.device}: ${each.text} of ${each.usable_text} planned`;
    const peak = each.peak_text === null ? "" : `\npeak measured ${each.peak_text}`;
    const name = shape("text", { x: 0, y: top + line(0) }, cut(each.device, letters));
    name.dataset.tip = said + peak;
    svg.append(name);
    let x = left;
    for (const [part, bytes, text] of each.parts) {
      const bar = shape("rect", { class: `bar ${part}`, x, y, width: Math.max(bytes * scale, 0.4), height: BAR });
      bar.dataset.tip = `${PARTS[part]}: ${text}\n${said}${peak}`;
      svg.append(bar);
      x += bytes * scale;
    }
    const at = above ? { x: whole, "text-anchor": "end" } : { x: whole - said_width + 12 };
    svg.append(shape("text", { class: "small", y: top + line(0), ...at }, `${each.text} of ${each.usable_text}`));
    for (const [kind, bytes] of [["limit", each.usable], ["mark", each.peak]]) {
      if (typeof bytes === "number" && bytes <= most) {
        const at = left + bytes * scale;
        svg.append(shape("line", { class: kind, x1: at, x2: at, y1: y - 3, y2: y + BAR + 3 }));
      }
    }
  });
  const parts = Object.fromEntries(Object.entries(PARTS).filter(([part]) =>
    data.memory.some((each) => each.parts.some(([name]) => name === part))));
  const red = data.memory.some((each) => each.peak !== null) ? " Red: the peak that was measured." : "";
  const dashed = data.memory.some((each) => each.usable <= most) ? "Dashed: what a plan may fill." : "";
  return section("Memory", legend(parts), element("p", {}, dashed + red), svg);
}

function curve(title, steps, values, unit) {
  const known = steps.map((step, index) => [step, values[index]]).filter(([, value]) => typeof value === "number");
  if (known.length < 2) return null;
  const whole = width(), height = 190, left = 70, bottom = 24;
  const numbers = known.map(([, value]) => value), first = known[0][0], last = known[known.length - 1][0];
  const least = Math.min(...numbers), most = Math.max(...numbers), span = most - least || Math.abs(most) || 1;
  const x = (step) => left + ((step - first) / (last - first || 1)) * (whole - left - 20);
  const y = (value) => 10 + (1 - (value - least) / span) * (height - bottom - 16);
  const svg = shape("svg", { viewBox: `0 0 ${whole} ${height}`, class: "chart", role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    const value = least + share * span;
    svg.append(shape("line", { class: "grid", x1: left, x2: whole - 20, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "small", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of new Set([first, Math.round((first + last) / 2), last])) {
    const at = step === last ? { x: whole - 2, "text-anchor": "end" } : { x: x(step), "text-anchor": "middle" };
    svg.append(shape("text", { class: "small", y: height - 4, ...at }, `step ${step}`));
  }
  svg.append(shape("polyline", { class: "curve", points: known.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  const dot = shape("circle", { class: "point", r: 4, visibility: "hidden" });
  const field = shape("rect", { x: left, y: 0, width: whole - left, height, fill: "transparent" });
  field.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * whole;
    const near = known.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best));
    dot.setAttribute("cx", x(near[0]));
    dot.setAttribute("cy", y(near[1]));
    dot.setAttribute("visibility", "visible");
    field.dataset.tip = `step ${near[0]}: ${short(near[1])}${unit}`;
  });
  field.addEventListener("pointerleave", () => dot.setAttribute("visibility", "hidden"));
  svg.append(field, dot);
  return element("div", {}, element("h3", {}, title), svg);
}

function curves() {
  const drawn = [
    ["loss", data.series.loss, ""],
    ["held-out loss", data.series.eval_loss, ""],
    ...Object.entries(data.figures).map(([name, values]) => [`held-out ${name}`, values, ""]),
    [`${data.rate}, by the wall clock`, data.rates, ""],
    ["seconds of a step", data.series.step_s, " s"],
    ["learning rate", data.series.learning_rate, ""],
  ].map(([title, values, unit]) => values && curve(title, data.steps, values, unit)).filter(Boolean);
  const notes = [...data.notes];
  if (data.thinned) notes.push("Not every step is drawn.");
  const none = data.live ? "Curves come with the second step." : "No curves: there is no metrics.jsonl here with two steps.";
  if (!drawn.length) drawn.push(element("p", {}, none));
  const made = section("Steps", ...notes.map((text) => element("p", {}, text)), ...drawn);
  made.id = "curves";
  return made;
}

function devices() {
  if (!data.devices.length) return element("section", { id: "devices" });
  const { whole, above, row: height, left, most, line } = placed(1), scale = whole - left - RIGHT;
  const svg = shape("svg", { viewBox: `0 0 ${whole} ${data.devices.length * height}`, role: "img", "aria-label": "busy share of each device" });
  data.devices.forEach((each, row) => {
    const top = row * height, y = top + above + 4, said = `${each.device}: busy ${percent(each.busy)}, waits ${percent(1 - each.busy)}`;
    const name = shape("text", { x: 0, y: top + line(0) }, cut(each.device, most));
    const bars = [["backward", left, each.busy], ["idle", left + each.busy * scale, 1 - each.busy]].map(([kind, x, share]) =>
      shape("rect", { class: `bar ${kind}`, x, y, width: Math.max(share * scale, 0), height: BAR }));
    for (const drawn of [name, ...bars]) drawn.dataset.tip = said;
    svg.append(name, ...bars, shape("text", { class: "small", x: whole - RIGHT + 8, y: y + 15 }, percent(each.busy)));
  });
  const slow = data.devices.filter((each) => each.slow).map((each) =>
    element("p", { class: "alarm" }, `${each.device} takes ${each.slow.toFixed(2)} times as long as planned`));
  const made = section(`Devices, the last ${data.devices[0].steps} steps`, legend({ backward: "busy", idle: "waits" }), ...slow, svg);
  made.id = "devices";
  return made;
}

function draw() {
  const parts = [
    element("h1", {}, data.title),
    element("p", {}, data.live ? `${data.name}, live` : data.name),
    element("p", { id: "state" }, data.state || ""),
    facts(),
    ...data.marks.map((text) => element("p", {}, text)),
    section("Plan", ...data.sentences.map((text) => element("p", {}, text)), ...bound(), table(data.stages)),
    timelines(),
    memory(),
    devices(),
    curves(),
  ];
  if (data.links.rows.length) parts.push(section("Messages, as predicted", table(data.links)));
  if (data.results.length) parts.push(section("Predicted beside measured", ...data.results.map(table)));
  page.replaceChildren(...parts);
}

function bound() {
  if (!data.bound) return [];
  const title = element("summary", {}, "Which plans the bound speaks about");
  return [element("details", { id: "bound" }, title, element("p", {}, data.bound))];
}

function drawAnew(id, made) {
  document.getElementById(id).replaceWith(made);
}

async function poll() {
  let wait_ms = POLL_MS;
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    if (answer.ok) {
      const found = await answer.json();
      if (found.version !== data.version) {
        window.location.reload();
        return;
      }
      Object.assign(data, found);
      drawAnew("facts", facts());
      drawAnew("devices", devices());
      drawAnew("curves", curves());
    }
  } catch (error) {
    data.state = "hetpipe watch does not answer; this is what it said last";
    wait_ms = 5 * POLL_MS;
  }
  document.getElementById("state").textContent = data.state;
  window.setTimeout(poll, wait_ms);
}

for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, showTip);
let drawn = window.innerWidth;
window.addEventListener("resize", () => {  // a phone that hides its bar changes the height alone
  if (drawn === window.innerWidth) return;
  drawn = window.innerWidth;
  draw();
});
draw();
if (data.live) poll();
