// The page: views, the choice of a program, and the loop that refreshes the shown view.

import { ApiError, request } from "./api.js";
import { h, onHost } from "./dom.js";
import collectives from "./collectives.js";
import failures from "./failures.js";
import logs from "./logs.js";
import metrics from "./metrics.js";
import ranks from "./ranks.js";
import sql from "./sql.js";
import stacks from "./stacks.js";
import timeline from "./timeline.js";

const VIEWS = { ranks, failures, timeline, stacks, logs, sql, collectives, metrics };
const PROGRAMS_EVERY_MS = 5000;

const $ = (id) => document.getElementById(id);
let view = null;
let timer = 0;
let running = null; // AbortController of the refresh under way

// What views use. `parameters` are those of the address after the view's name.
const context = {
  parameters: new URLSearchParams(),
  // The parameters that choose the program: none for all.
  get program() {
    const [pid, host] = split($("program").value);
    return pid ? { program: pid, host } : {};
  },
  ask: (path, parameters = {}, options = {}) =>
    request(path, { ...context.program, ...parameters }, { signal: running?.signal, ...options }),
  refresh: () => refresh(),
  fail,
};

// Programs on different hosts may have the same pid. A choice is "pid host".
const choice = (program) => `${program.pid} ${program.host}`;

function split(chosen) {
  const at = chosen.indexOf(" ");
  return at < 0 ? [null, ""] : [Number(chosen.slice(0, at)), chosen.slice(at + 1)];
}

function fail(error) {
  if (error.name === "AbortError") return;
  $("problem").textContent = error.message;
  $("problem").hidden = false;
  if (!(error instanceof ApiError)) console.error(error);
}

// Show the view that the address names: #/stacks?rank=4711.
function show() {
  const [name, parameters] = location.hash.replace(/^#\/?/, "").split("?");
  const shown = Object.hasOwn(VIEWS, name) ? name : "ranks";
  context.parameters = new URLSearchParams(parameters);
  view?.close?.();
  view = VIEWS[shown];
  for (const link of $("views").children) {
    if (link.dataset.view === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  $("view").replaceChildren();
  view.open($("view"), context);
  refresh();
}

// Refresh the view, and again after its interval. A refresh that still runs is given up.
async function refresh() {
  clearTimeout(timer);
  running?.abort();
  const own = (running = new AbortController());
  const shown = view;
  const start = performance.now();
  try {
    const draw = await shown.load(context);
    if (own.signal.aborted) return;
    const loaded = performance.now();
    draw();
    $("problem").hidden = true;
    const drawn = performance.now();
    performance.clearMeasures();
    performance.measure("load", { start, end: loaded });
    performance.measure("draw", { start: loaded, end: drawn });
    $("status").textContent = `updated ${new Date().toLocaleTimeString([], { hour12: false })}`;
  } catch (error) {
    if (own.signal.aborted) return;
    fail(error);
  }
  // A server that needs long for its answers, as with many ranks, is not asked all the time.
  if (shown.everyMs) timer = setTimeout(next, Math.max(shown.everyMs, 2 * (performance.now() - start)));
}

// Hidden pages do not ask.
function next() {
  if (!document.hidden) refresh();
}

async function updatePrograms() {
  try {
    const { programs } = await request("programs");
    const chosen = $("program").value;
    const options = programs.map((each) => h("option", { value: choice(each) }, `${each.command.slice(-60)} (${each.pid})${onHost(each)}`));
    if (chosen && !programs.some((each) => choice(each) === chosen)) {
      options.push(h("option", { value: chosen }, `${chosen} (has ended)`));
    }
    $("program").replaceChildren(h("option", { value: "" }, programs.length ? "all" : "none runs"), ...options);
    $("program").value = chosen;
  } catch (error) {
    fail(error);
  }
  setTimeout(updatePrograms, PROGRAMS_EVERY_MS);
}

for (const [name, { title }] of Object.entries(VIEWS)) {
  const link = h("a", { href: `#/${name}` }, title);
  link.dataset.view = name;
  $("views").append(link);
}
$("program").addEventListener("change", show);
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && view.everyMs) refresh();
});
await updatePrograms();
show();
