// Failures with their chains of causes, and the last output of the process.

import { clock, h, lacks, onHost } from "./dom.js";

let list;
let shown = "";

function open(root) {
  shown = "";
  list = h("div", { className: "failures" });
  root.append(h("h2", {}, "Failures"), list);
}

async function load(context) {
  const answer = await context.ask("failures");
  return () => {
    const text = JSON.stringify(answer);
    if (text === shown) return; // keeps open what the reader has opened
    shown = text;
    list.replaceChildren(...answer.failures.map(failure), lacks(answer, "earlier failures are") ?? "");
    if (!answer.failures.length) list.prepend(h("p", {}, "No failure is recorded."));
  };
}

function failure(each, number) {
  return h("details", { open: number === 0 },
    h("summary", {}, h("span", { className: "key failed" }), `${each.unix_s ? clock(each.unix_s) : ""} ${each.process} (pid ${each.pid})${onHost(each)}: ${each.what}`),
    h("ol", { className: "chain" }, each.chain.map((cause) => h("li", {}, `${cause.what}, in ${cause.process} (pid ${cause.pid})`))),
    each.log.length ? [h("h3", {}, "Last lines of the process"), h("pre", {}, each.log.join("\n"))] : h("p", { className: "muted" }, "The process has printed nothing."),
    h("a", { href: `#/logs?rank=${each.pid}` }, "its logs"),
  );
}

export default { title: "Failures", everyMs: 3000, open, load };
