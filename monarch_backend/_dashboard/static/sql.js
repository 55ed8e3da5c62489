// A query in SQL over what programs have recorded, and its rows.

import { h, table } from "./dom.js";

const EXAMPLES = {
  "what takes long": "select process, name, detail, state, duration_us from activities where state != 'idle' order by duration_us desc",
  "slow endpoints": "select actor, endpoint, rank, count(*) as calls, avg(duration_us), max(duration_us), avg(queued_us)\nfrom messages group by 1, 2, 3 order by 6 desc",
  failures: "select full_name, endpoint, messages.status, duration_us from messages join actors on actors.id = to_actor_id\nwhere messages.status not in ('complete', 'active')",
  "slow spans": "select name, process, fields_json, duration_us, status from spans order by duration_us desc limit 100",
  "bytes of collectives": "select process, name, detail, count(*), sum(bytes), avg(duration_us) from collectives group by 1, 2, 3",
};

let parts;

function open(root, context) {
  parts = {
    query: h("textarea", { value: EXAMPLES["what takes long"], spellcheck: false, "aria-label": "query" }),
    about: h("span", { className: "muted" }),
    rows: h("div", { className: "scroll" }),
  };
  const examples = h("select", { onchange: () => { parts.query.value = EXAMPLES[examples.value]; context.refresh(); } },
    Object.keys(EXAMPLES).map((name) => h("option", {}, name)));
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); context.refresh(); } }, parts.query,
    h("div", { className: "controls" }, h("button", {}, "Run"), h("label", {}, "Example ", examples), parts.about));
  parts.query.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  root.append(h("h2", {}, "SQL"), form, parts.rows);
}

async function load(context) {
  const parameters = { query: parts.query.value };
  parts.about.textContent = "runs ...";
  let answer;
  try {
    answer = await context.ask("sql", parameters, { post: true });
  } catch (error) {
    parts.about.textContent = "";
    throw error;
  }
  return () => {
    const columns = answer.columns.map((name, at) => [
      name, (row) => (row[at] === null ? "" : String(row[at])), answer.rows.some((row) => typeof row[at] === "number") ? "number" : ""]);
    parts.rows.replaceChildren(table(columns, answer.rows));
    parts.about.textContent = [`${answer.rows.length} rows${answer.truncated ? ", more were left out" : ""}`,
      ...(answer.overwritten ? [`${answer.overwritten} older events overwritten`] : []),
      `answered: ${answer.hosts.filter((each) => each.answered).map((each) => each.name).join(", ") || "no host"}`,
      ...answer.not_read.map((each) => `not read: ${each}`)].join("; ");
  };
}

export default { title: "SQL", everyMs: 0, open, load };
