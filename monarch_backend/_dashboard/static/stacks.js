// Python stacks, equal ones once. They are read when the reader asks: each read interrupts the processes shortly.

import { h, onHost } from "./dom.js";

let parts;

function open(root, context) {
  parts = {
    rank: h("input", { type: "search", placeholder: "gpus 3, or a pid", value: context.parameters.get("rank") ?? "" }),
    all: h("input", { type: "checkbox" }),
    list: h("div", { className: "stacks" }, "Reads the stacks ..."),
  };
  const form = h("form", { className: "controls", onsubmit: (event) => { event.preventDefault(); context.refresh(); } },
    h("label", {}, "Process ", parts.rank), h("label", {}, parts.all, " all threads"), h("button", {}, "Read stacks"));
  root.append(h("h2", {}, "Stacks"), form, parts.list);
}

async function load(context) {
  const answer = await context.ask("stacks", { rank: parts.rank.value, all_threads: parts.all.checked });
  return () => {
    const left = answer.left_out ? h("p", { className: "muted" }, `${answer.left_out} processes were not asked: choose one`) : "";
    parts.list.replaceChildren(...answer.programs.map((program) => h("section", {},
      h("h2", {}, `${program.command} (pid ${program.pid})${onHost(program)}`),
      program.groups.map((group) => [
        h("h3", {}, `${group.labels} (${group.pids.length === 1 ? `pid ${group.pids[0]}` : `${group.pids.length} processes`})`),
        h("pre", {}, group.text)]))), left);
    if (!answer.programs.length) parts.list.append("No process runs.");
  };
}

export default { title: "Stacks", everyMs: 0, open, load };
