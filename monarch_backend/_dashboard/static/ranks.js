// Ranks: totals, a grid of the processes of each mesh coloured by state, the busiest processes, and one in detail.

import { bytes, count, duration, h, lacks, onHost, setText, table } from "./dom.js";

const STATES = {
  failed: "has ended with an error, or an actor has failed",
  stopped: "is stopped by a signal or a debugger",
  breakpoint: "waits at a breakpoint",
  constructing: "constructs an actor",
  collective: "is in a collective or a transfer",
  waiting: "waits for a reply",
  running: "runs an endpoint",
  idle: "waits for messages",
  ended: "has ended",
};
const ROWS = 50;
const ORDERS = {
  "longest activity": (rank) => rank.since_s,
  queue: (rank) => rank.queue,
  "messages/s": (rank) => rank.rates?.messages_per_s ?? 0,
  memory: (rank) => rank.memory_bytes ?? 0,
};

let parts = {};
let cells = new Map(); // key of a process -> its button
let shape = ""; // what the grid was built for
let byKey = new Map();
let chosen = null;

const keyOf = (program, rank) => `${program.host}/${program.pid}/${rank.pid}`;
const countsOf = (program, mesh) => `${program.host}/${program.pid}/${mesh}`;

function open(root, context) {
  cells = new Map();
  shape = "";
  parts = {
    totals: h("div", { className: "totals" }),
    about: h("div", {}),
    legend: h("p", {}, Object.entries(STATES).map(([state, text]) =>
      [h("span", { className: `key ${state}` }), h("span", { title: text }, state)])),
    tree: h("div", {}),
    filter: h("input", { type: "search", placeholder: "part of a label, or a state", oninput: () => draw() }),
    order: h("select", { onchange: () => draw() }, Object.keys(ORDERS).map((name) => h("option", {}, name))),
    rows: h("div", { className: "wide" }),
    detail: h("aside", { className: "detail" }),
  };
  parts.tree.addEventListener("click", (event) => {
    const key = event.target.dataset.key;
    if (!key) return;
    chosen = key;
    draw();
    context.refresh();
  });
  parts.tree.addEventListener("mouseover", (event) => {
    const rank = byKey.get(event.target.dataset.key);
    if (rank) event.target.title = title(rank);
  });
  root.append(
    parts.totals, parts.about, parts.legend,
    h("div", { className: "columns" }, parts.tree, parts.detail),
    h("h2", {}, "Processes"),
    h("div", { className: "controls" }, h("label", {}, "Find ", parts.filter), h("label", {}, "Order ", parts.order)),
    parts.rows,
  );
}

function title(rank) {
  const doing = rank.doing ? ` ${rank.doing} for ${duration(rank.since_s)}` : "";
  return `${rank.label} (pid ${rank.pid})${onHost(rank)}: ${rank.state}${doing}, ${rank.queue} in the queue`;
}

let last = { tree: { programs: [] }, detail: null };

async function load(context) {
  const rank = chosen && byKey.get(chosen);
  const [tree, rates, detail] = await Promise.all([
    context.ask("tree"), context.ask("rates"),
    rank ? context.ask("process", { program: null, pid: rank.pid, host: rank.host }).catch((error) => ({ error })) : null,
  ]);
  const ratesOf = new Map(rates.rates.map((each) => [`${each.host}/${each.pid}`, each]));
  for (const program of tree.programs) {
    for (const each of program.ranks) {
      each.host = program.host;
      each.rates = ratesOf.get(`${each.host}/${each.pid}`);
    }
  }
  return () => {
    last = { tree: { programs: merged(tree.programs) }, detail };
    parts.about.replaceChildren(lacks(tree, "programs are") ?? "");
    draw();
  };
}

// Each rank of torchrun is a program of its own. Return those with one command as one program.
function merged(programs) {
  const found = [];
  const byCommand = new Map();
  for (const program of programs) {
    const [first] = program.ranks;
    if (!first?.label.startsWith("rank ")) {
      found.push(program);
      continue;
    }
    first.mesh ||= "ranks";
    const known = byCommand.get(program.command);
    if (known) known.ranks.push(...program.ranks);
    else {
      byCommand.set(program.command, program);
      found.push(program);
    }
  }
  const number = (rank) => Number(rank.label.split(" ")[1]) || 0;
  for (const program of byCommand.values()) program.ranks.sort((a, b) => number(a) - number(b));
  return found;
}

function draw() {
  const { programs } = last.tree;
  byKey = new Map(programs.flatMap((program) => program.ranks.map((rank) => [keyOf(program, rank), rank])));
  drawTotals([...byKey.values()]);
  const wanted = programs.map((program) => [program.command, program.ranks.map((rank) => [keyOf(program, rank), rank.label])]);
  const newShape = JSON.stringify(wanted);
  if (newShape !== shape) build(programs);
  shape = newShape;
  for (const [key, rank] of byKey) {
    const cell = cells.get(key);
    const name = `rank ${rank.state}`;
    if (cell.className !== name) {
      cell.className = name;
      cell.setAttribute("aria-label", `${rank.label}: ${rank.state}`);
    }
    setText(cell, rank.queue ? (rank.queue > 99 ? "99+" : String(rank.queue)) : "");
    const pressed = String(key === chosen);
    if (cell.getAttribute("aria-pressed") !== pressed) cell.setAttribute("aria-pressed", pressed);
  }
  drawMeshCounts(programs);
  drawRows();
  drawDetail();
}

function drawTotals(ranks) {
  const sum = (value) => ranks.reduce((total, rank) => total + (value(rank) ?? 0), 0);
  const facts = {
    processes: String(ranks.filter((rank) => rank.exit_code === null).length),
    failed: String(ranks.filter((rank) => rank.state === "failed").length),
    "messages/s": count(sum((rank) => rank.rates?.messages_per_s)),
    "bytes/s": bytes(sum((rank) => rank.rates?.bytes_per_s)),
    "in queues": count(sum((rank) => rank.queue)),
    processors: sum((rank) => rank.rates?.cpu).toFixed(1),
    memory: bytes(sum((rank) => rank.memory_bytes)),
  };
  parts.totals.replaceChildren(...Object.entries(facts).map(([name, value]) => h("div", {}, h("b", {}, value), name)));
}

// Return the processes of a program by mesh. "" has its own process and others without a mesh.
function meshesOf(program) {
  const meshes = new Map();
  for (const rank of program.ranks) {
    if (!meshes.has(rank.mesh)) meshes.set(rank.mesh, []);
    meshes.get(rank.mesh).push(rank);
  }
  return meshes;
}

function build(programs) {
  cells = new Map();
  parts.counts = new Map();
  parts.tree.replaceChildren(...programs.map((program) => h("section", {},
    h("h2", {}, `${program.command} (pid ${program.pid})${onHost(program)}`),
    [...meshesOf(program)].map(([mesh, ranks]) => {
      const counts = h("span", { className: "muted" });
      parts.counts.set(countsOf(program, mesh), counts);
      const buttons = ranks.map((rank) => {
        const cell = h("button", { type: "button" });
        cell.dataset.key = keyOf(program, rank);
        cells.set(cell.dataset.key, cell);
        return cell;
      });
      return h("details", { open: true }, h("summary", {}, mesh || "program", " ", counts), h("div", { className: "grid" }, buttons));
    }))));
  if (!programs.length) parts.tree.append(h("p", {}, "No program of this user runs on this machine."));
}

function drawMeshCounts(programs) {
  for (const program of programs) {
    for (const [mesh, ranks] of meshesOf(program)) {
      const states = {};
      for (const rank of ranks) states[rank.state] = (states[rank.state] ?? 0) + 1;
      const text = Object.entries(states).map(([state, number]) => `${number} ${state}`).join(", ");
      setText(parts.counts.get(countsOf(program, mesh)), `${ranks.length} processes: ${text}`);
    }
  }
}

function drawRows() {
  const text = parts.filter.value.toLowerCase();
  const found = [...byKey.values()].filter((rank) => !text || `${rank.label} ${rank.state}`.toLowerCase().includes(text));
  const order = ORDERS[parts.order.value];
  found.sort((a, b) => order(b) - order(a));
  const rows = table([
    ["process", (rank) => rank.label], ["pid", (rank) => rank.pid, "number"], ["state", (rank) => rank.state],
    ["doing", (rank) => rank.doing], ["for", (rank) => (rank.doing ? duration(rank.since_s) : ""), "number"],
    ["queue", (rank) => rank.queue, "number"], ["handled", (rank) => rank.done, "number"],
    ["messages/s", (rank) => (rank.rates ? count(rank.rates.messages_per_s) : ""), "number"],
    ["bytes/s", (rank) => (rank.rates ? bytes(rank.rates.bytes_per_s) : ""), "number"],
    ["memory", (rank) => bytes(rank.memory_bytes), "number"],
  ], found.slice(0, ROWS));
  const more = found.length > ROWS ? h("p", { className: "muted" }, `${found.length - ROWS} more: narrow the search`) : "";
  parts.rows.replaceChildren(rows, more);
}

function drawDetail() {
  const rank = chosen && byKey.get(chosen);
  if (!rank) {
    parts.detail.replaceChildren(h("p", { className: "muted" }, "Choose a process in the grid."));
    return;
  }
  const pid = rank.pid;
  const activities = last.detail?.rank?.pid === pid && last.detail.rank.label === rank.label ? last.detail.activities : [];
  parts.detail.replaceChildren(
    h("h3", {}, rank.label), h("p", {}, title(rank)),
    rank.exit_code === null ? "" : h("p", {}, `It has ended with ${rank.exit_code}.`),
    h("p", {}, h("a", { href: `#/stacks?rank=${pid}` }, "stack"), " · ", h("a", { href: `#/logs?rank=${pid}` }, "logs")),
    last.detail?.error ? h("p", {}, last.detail.error.message) : "",
    activities.length ? table([
      ["kind", (each) => each.kind], ["activity", (each) => (each.detail ? `${each.name}: ${each.detail}` : each.name)],
      ["state", (each) => each.state], ["for", (each) => duration(each.seconds), "number"], ["queue", (each) => each.queue, "number"],
    ], activities) : "",
  );
}

export default { title: "Ranks", everyMs: 1000, open, load };
