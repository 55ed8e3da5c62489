// The last output of the processes, with search.

import { clock, h, onHost } from "./dom.js";

let parts;
let shown = "";

function open(root, context) {
  shown = "";
  let pause = 0;
  const later = () => {
    clearTimeout(pause);
    pause = setTimeout(context.refresh, 250);
  };
  parts = {
    search: h("input", { type: "search", placeholder: "text in the line", oninput: later }),
    rank: h("input", { type: "search", placeholder: "gpus 3, or a pid", value: context.parameters.get("rank") ?? "", oninput: later }),
    follow: h("input", { type: "checkbox", checked: true }),
    about: h("span", { className: "muted" }),
    lines: h("div", { className: "scroll mono lines" }),
  };
  root.append(h("h2", {}, "Logs"), h("div", { className: "controls" }, h("label", {}, "Search ", parts.search),
    h("label", {}, "Process ", parts.rank), h("label", {}, parts.follow, " follow"), parts.about), parts.lines);
}

async function load(context) {
  const answer = await context.ask("logs", { search: parts.search.value, rank: parts.rank.value, limit: 1000 });
  return () => {
    const text = JSON.stringify(answer);
    if (text === shown) return;
    shown = text;
    parts.lines.replaceChildren(...answer.lines.map((line) => h("div", { className: line.stream },
      h("span", { className: "muted" }, `${clock(line.unix_s)} ${line.process}${onHost(line)} `), line.text)));
    parts.about.textContent = answer.kept ? `${answer.lines.length} lines, ${answer.left_out} earlier ones` : "no program keeps output";
    if (answer.not_read.length) parts.about.textContent += `; not read: ${answer.not_read.join("; ")}`;
    if (parts.follow.checked) parts.lines.scrollTop = parts.lines.scrollHeight;
  };
}

export default { title: "Logs", everyMs: 1500, open, load };
