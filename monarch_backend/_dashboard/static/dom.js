// Elements and texts. All data becomes text nodes or attributes, never markup.

// Return a new element. `attributes` are properties; keys with a dash, and role, are attributes. null children are left out.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// Set the text of an element, if it differs.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function duration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(number) {
  if (number === null || number === undefined) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1024) return `${number.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} TiB`;
}

export function count(number) {
  return number < 1000 ? number.toFixed(0) : number < 1e6 ? `${(number / 1e3).toFixed(1)} k` : `${(number / 1e6).toFixed(1)} M`;
}

// Return " on HOST" for what is on another host, else nothing.
export function onHost({ host }) {
  return host ? ` on ${host}` : "";
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

// Return a table. `columns` are pairs of a title and a function from a row to a text or element; "number" aligns right.
export function table(columns, rows) {
  const head = h("tr", {}, columns.map(([title, , kind]) => h("th", { className: kind ?? "" }, title)));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell, kind]) => h("td", { className: kind ?? "" }, cell(row) ?? ""))));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, body));
}

// Return a line about what an answer lacks, or null.
export function lacks(answer, what) {
  const texts = [];
  if (answer.left_out) texts.push(`${answer.left_out} ${what} left out`);
  if (answer.not_read?.length) texts.push(`not read: ${answer.not_read.join("; ")}`);
  return texts.length ? h("p", { className: "muted" }, texts.join(". ")) : null;
}
