// The last seconds as a timeline on a canvas: a row for each track, slices, and arrows of messages.
// Wheel: zoom at the pointer. Drag: move. Only rows in view are drawn.

import { duration, h } from "./dom.js";

const ROW = 18;
const GUTTER = 230;
const RULER = 20;
const COLOURS = { message: "#2e9e5b", sent: "#7a8290", wait: "#e0a526", span: "#9a5bd6", collective: "#3b82d6", transfer: "#14a3a8" };

let parts;
let tracks = []; // { name, slices }, slices by start
let arrows = [];
let range = [0, 1]; // microseconds in view
let whole = [0, 1];
let rowOf = new Map();
let observer = null;

function open(root, context) {
  tracks = [];
  const change = () => context.refresh();
  parts = {
    seconds: h("select", { onchange: change }, [1, 10, 60, 600].map((each) => h("option", { value: each, selected: each === 60 }, `${each} s`))),
    about: h("span", { className: "muted" }),
    canvas: h("canvas", { tabIndex: 0, "aria-label": "timeline" }),
    tip: h("div", { className: "tip", hidden: true }),
    detail: h("pre", { hidden: true }),
  };
  parts.height = h("div", {});
  parts.box = h("div", { className: "timeline", onscroll: paint }, parts.canvas, parts.height);
  const buttons = [["Zoom in", 0.5], ["Zoom out", 2]].map(([name, factor]) => h("button", { type: "button", onclick: () => zoom(factor, (range[0] + range[1]) / 2) }, name));
  root.append(h("h2", {}, "Timeline"), h("div", { className: "controls" }, h("label", {}, "Last ", parts.seconds), h("button", { type: "button", onclick: change }, "Read again"),
    ...buttons, h("button", { type: "button", onclick: () => { range = [...whole]; paint(); } }, "All"), parts.about), parts.box, parts.detail, parts.tip);
  parts.canvas.addEventListener("wheel", (event) => {
    if (event.offsetX < GUTTER || event.shiftKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
  }, { passive: false });
  drag(parts.canvas);
  parts.canvas.addEventListener("mouseleave", () => (parts.tip.hidden = true));
  parts.canvas.addEventListener("click", (event) => {
    const found = sliceAt(event.offsetX, event.offsetY);
    parts.detail.hidden = !found;
    if (found) parts.detail.textContent = `${describe(found)}\n${JSON.stringify(found.slice.args, null, 1)}`;
  });
  observer = new ResizeObserver(paint);
  observer.observe(parts.box);
}

function close() {
  observer?.disconnect();
}

async function load(context) {
  parts.about.textContent = "reads ...";
  const answer = await context.ask("timeline", { seconds: parts.seconds.value });
  return () => {
    read(answer.trace.traceEvents);
    const slices = tracks.reduce((total, track) => total + track.slices.length, 0);
    parts.about.textContent = `${slices} slices, ${arrows.length} messages${answer.left_out ? `; ${answer.left_out} processes have earlier events than are shown` : ""}. Wheel: zoom. Drag: move. monarch-backend trace writes all of it for Perfetto.`;
    range = [...whole];
    paint();
  };
}

function read(events) {
  const processes = new Map();
  const names = new Map();
  const slices = new Map();
  const starts = new Map();
  arrows = [];
  for (const each of events) {
    const key = `${each.pid}/${each.tid}`;
    if (each.ph === "M" && each.name === "process_name") processes.set(each.pid, each.args.name);
    else if (each.ph === "M" && each.name === "thread_name") names.set(key, each.args.name);
    else if (each.ph === "X") {
      if (!slices.has(key)) slices.set(key, []);
      slices.get(key).push(each);
    } else if (each.ph === "s") starts.set(each.id, [key, each.ts]);
    else if (each.ph === "f" && starts.has(each.id)) arrows.push([...starts.get(each.id), key, each.ts]);
  }
  tracks = [];
  rowOf = new Map();
  for (const [key, found] of slices) tracks.push({ key, pid: found[0].pid, name: `${processes.get(found[0].pid)?.replace(/ \(pid \d+/, "").replace(/\)$/, "")}: ${names.get(key)}`, slices: found });
  const order = [...processes.keys()];
  tracks.sort((a, b) => order.indexOf(a.pid) - order.indexOf(b.pid));
  tracks.forEach((track, row) => rowOf.set(track.key, row));
  let end = 1;
  for (const track of tracks) {
    track.longest = 0;
    const around = []; // ends of the slices that this one is in
    for (const slice of track.slices) {
      while (around.length && around.at(-1) <= slice.ts) around.pop();
      slice.depth = around.length;
      around.push(slice.ts + slice.dur);
      end = Math.max(end, slice.ts + slice.dur);
      track.longest = Math.max(track.longest, slice.dur);
    }
  }
  whole = [0, end * 1.01];
}

const width = () => parts.box.clientWidth;
const timeAt = (x) => range[0] + ((x - GUTTER) / (width() - GUTTER)) * (range[1] - range[0]);
const xAt = (time) => GUTTER + ((time - range[0]) / (range[1] - range[0])) * (width() - GUTTER);

function zoom(factor, at) {
  const span = Math.max(0.01, (range[1] - range[0]) * factor);
  const share = (at - range[0]) / (range[1] - range[0]);
  range = [at - span * share, at + span * (1 - share)];
  paint();
}

function drag(canvas) {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    from = [event.clientX, [...range]];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (from = null));
  canvas.addEventListener("pointermove", (event) => {
    if (from) {
      const by = ((from[0] - event.clientX) / (width() - GUTTER)) * (range[1] - range[0]);
      range = [from[1][0] + by, from[1][1] + by];
      paint();
    }
    tip(event);
  });
}

function tip(event) {
  const found = sliceAt(event.offsetX, event.offsetY);
  parts.tip.hidden = !found;
  if (!found) return;
  parts.tip.textContent = describe(found);
  parts.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 430)}px`;
  parts.tip.style.top = `${event.clientY + 14}px`;
}

function describe({ slice, track }) {
  return `${slice.name}\n${track.name}\n${duration(slice.dur / 1e6)}, ${slice.args.status ?? slice.cat}`;
}

function sliceAt(x, y) {
  if (x < GUTTER || y < RULER) return null;
  const track = tracks[Math.floor((y - RULER + parts.box.scrollTop) / ROW)];
  const time = timeAt(x);
  const slack = ((range[1] - range[0]) / width()) * 2;
  const found = track?.slices.findLast((each) => each.ts - slack <= time && time <= each.ts + each.dur + slack);
  return found ? { slice: found, track } : null;
}

// Return the index of the first slice that may reach into the view: slices are ordered by start.
function firstIn(track) {
  let [low, high] = [0, track.slices.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.slices[middle].ts < range[0] - track.longest) low = middle + 1;
    else high = middle;
  }
  return low;
}

function paint() {
  const [w, height] = [width(), parts.box.clientHeight];
  if (!w || !height) return;
  const scale = devicePixelRatio;
  const { canvas } = parts;
  if (canvas.width !== Math.round(w * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(w * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${w}px`;
    canvas.style.height = `${height}px`;
  }
  parts.height.style.height = `${Math.max(0, RULER + tracks.length * ROW - height)}px`;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, w, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const top = parts.box.scrollTop;
  const rows = [Math.floor(top / ROW), Math.min(tracks.length, Math.ceil((top + height) / ROW))];
  for (let row = rows[0]; row < rows[1]; row++) paintTrack(pen, tracks[row], RULER + row * ROW - top, w, style.color, row);
  paintArrows(pen, top, rows);
  paintRuler(pen, w, style);
  canvas.dataset.painted = String(tracks.length); // for tests: a canvas has no text
}

function paintTrack(pen, track, y, w, colour, row) {
  if (row % 2) {
    pen.fillStyle = "#8881";
    pen.fillRect(0, y, w, ROW);
  }
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, y, w - GUTTER, ROW);
  pen.clip();
  let covered = -1; // of slices that fall on one pixel, the first is drawn
  for (let number = firstIn(track); number < track.slices.length; number++) {
    const slice = track.slices[number];
    if (slice.ts > range[1]) break;
    const left = Math.max(GUTTER, xAt(slice.ts));
    const right = Math.min(w, xAt(slice.ts + slice.dur));
    if (right < GUTTER || (right <= covered && right - left < 1)) continue;
    if (right - left < 1) covered = left + 1;
    const failed = ["error", "lost", "aborted"].includes(slice.args.status);
    pen.fillStyle = failed ? "#d63a3a" : (COLOURS[slice.cat] ?? "#7a8290");
    const inset = Math.min(slice.depth, 3) * 3; // what is inside is lower
    pen.fillRect(left, y + 1 + inset, Math.max(1, right - left), ROW - 2 - inset);
    if (right - left > 40) {
      pen.fillStyle = "#fff";
      pen.fillText(slice.name, left + 4, y + (ROW + inset) / 2, right - left - 8);
    }
  }
  pen.restore();
  pen.fillStyle = colour;
  const cut = track.name.length > 40 ? `${track.name.slice(0, 39)}…` : track.name;
  pen.fillText(cut, 6, y + ROW / 2, GUTTER - 12);
}

function paintArrows(pen, top, rows) {
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, RULER, width() - GUTTER, parts.box.clientHeight);
  pen.clip();
  pen.strokeStyle = "#8889";
  pen.beginPath();
  const visible = arrows.filter(([from, start, to, end]) => {
    const [low, high] = [Math.min(rowOf.get(from), rowOf.get(to)), Math.max(rowOf.get(from), rowOf.get(to))];
    return high >= rows[0] && low < rows[1] && end >= range[0] && start <= range[1];
  });
  if (visible.length <= 2000) { // more would only be a grey surface
    for (const [from, start, to, end] of visible) {
      pen.moveTo(xAt(start), RULER + rowOf.get(from) * ROW + ROW / 2 - top);
      pen.lineTo(xAt(end), RULER + rowOf.get(to) * ROW + ROW / 2 - top);
    }
  }
  pen.stroke();
  pen.restore();
}

function paintRuler(pen, w, style) {
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, w, RULER);
  pen.fillStyle = style.color;
  const wanted = (range[1] - range[0]) / Math.max(1, (w - GUTTER) / 90);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].find((each) => each * power >= wanted) * power;
  for (let time = Math.ceil(range[0] / step) * step; time < range[1]; time += step) {
    const x = xAt(time);
    if (x < GUTTER) continue;
    pen.fillRect(x, RULER - 5, 1, 5);
    pen.fillText(time >= 1e6 || step >= 1e6 ? `${(time / 1e6).toFixed(step < 1e6 ? 3 : 0)} s` : `${(time / 1e3).toFixed(step < 1e3 ? 3 : 0)} ms`, x + 2, 8);
  }
}

export default { title: "Timeline", everyMs: 0, open, load, close };
