// Curves of the metrics that the program records, such as its loss. uPlot draws them.

import { h, lacks } from "./dom.js";

const COLOURS = ["#3b82d6", "#d6573a", "#2e9e5b", "#9a5bd6", "#e0a526", "#14a3a8", "#c2438a", "#7a8290"];

let parts;
let charts = new Map(); // title -> { chart, names }

function open(root, context) {
  charts = new Map();
  parts = { name: h("input", { type: "search", placeholder: "name of a metric", onchange: () => context.refresh() }), charts: h("div", { className: "charts" }), about: h("div", {}) };
  root.append(h("h2", {}, "Metrics"), h("div", { className: "controls" }, h("label", {}, "Metric ", parts.name)), parts.charts, parts.about);
}

function close() {
  for (const { chart } of charts.values()) chart.destroy();
  charts = new Map();
}

async function load(context) {
  const answer = await context.ask("metrics", { name: parts.name.value });
  return () => {
    const byTitle = new Map();
    for (const series of answer.series) {
      const title = `${series.name} (${series.instrument})`;
      if (!byTitle.has(title)) byTitle.set(title, []);
      byTitle.get(title).push(series);
    }
    for (const [title, { chart, box }] of charts) {
      if (!byTitle.has(title)) {
        chart.destroy();
        box.remove();
        charts.delete(title);
      }
    }
    for (const [title, series] of byTitle) draw(title, series);
    parts.about.replaceChildren(lacks(answer, "curves are") ?? "", answer.series.length ? "" : h("p", {}, "No metric is recorded. telemetry.get_meter() makes instruments."));
  };
}

// Return the curves of a chart. A series of several processes has three: the mean, the least and the greatest value.
function curvesOf(series) {
  return series.flatMap((each, number) => {
    const colour = COLOURS[number % COLOURS.length];
    const label = [each.process, each.attributes].filter(Boolean).join(" ");
    const curves = [{ label, stroke: colour, width: 1.5, data: [each.unix_s, each.values] }];
    if (each.low.length) {
      curves.push({ label: `${label}, greatest`, stroke: colour, width: 0.5, data: [each.unix_s, each.high] });
      curves.push({ label: `${label}, least`, stroke: colour, width: 0.5, data: [each.unix_s, each.low] });
    }
    return curves;
  });
}

function draw(title, series) {
  const curves = curvesOf(series);
  const data = curves.length === 1 ? curves[0].data : uPlot.join(curves.map((each) => each.data));
  const names = JSON.stringify(curves.map((each) => each.label));
  const known = charts.get(title);
  if (known?.names === names) {
    known.chart.setData(data);
    return;
  }
  known?.chart.destroy();
  const box = known?.box ?? h("div", { className: "chart" }, h("h3", {}, title));
  if (!known) parts.charts.append(box);
  const text = getComputedStyle(document.body).color;
  const axis = { stroke: text, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
  const chart = new uPlot({
    width: Math.max(200, box.clientWidth - 24), height: 220, scales: { x: { time: true } }, axes: [{ ...axis }, { ...axis }],
    legend: { show: curves.length <= 8 },
    series: [{}, ...curves.map(({ data: _, ...each }) => ({ ...each, spanGaps: true }))],
  }, data, box);
  charts.set(title, { chart, names, box });
}

export default { title: "Metrics", everyMs: 2000, open, load, close };
