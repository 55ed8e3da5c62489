// Collectives in flight: who is in, and who is missing.

import { bytes, duration, h, lacks, table } from "./dom.js";

let list;

function open(root) {
  list = h("div", { className: "collectives" });
  root.append(h("h2", {}, "Collectives in flight"), list);
}

async function load(context) {
  const answer = await context.ask("collectives");
  return () => {
    const rows = table([
      ["group", (each) => each.group], ["operation", (each) => each.operation], ["number", (each) => each.number, "number"],
      ["size", (each) => bytes(each.bytes), "number"], ["for", (each) => duration(each.seconds), "number"],
      ["in it", (each) => `${each.entered_count}: ${each.entered}`],
      ["not in it", (each) => (each.missing_count ? `${each.missing_count}: ${each.missing}` : "")],
    ], answer.in_flight);
    list.replaceChildren(answer.in_flight.length ? rows : h("p", {}, "No collective is in flight."), lacks(answer, "collectives are") ?? "");
  };
}

export default { title: "Collectives", everyMs: 1000, open, load };
