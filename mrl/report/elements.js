"use strict";
// Elements from plain values. What a run wrote becomes text nodes and never markup.

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function choice(label, options, changed) {
  const select = element("select", { change: () => changed(select.value) });
  for (const [value, text] of options) select.append(element("option", { value }, text));
  return element("label", {}, label + " ", select);
}

function table(heads, rows) {
  const cells = (tag, values) => values.map((value) => element(tag, {}, value instanceof Node ? value : String(value)));
  const body = rows.map((row) => element("tr", {}, ...cells("td", row)));
  return element("table", {}, element("tr", {}, ...cells("th", heads)), ...body);
}

const main = document.querySelector("main");

function section(title, ...children) {
  const made = element("section", { id: title.replaceAll(" ", "-") }, element("h2", {}, title), ...children);
  main.append(made);
  document.querySelector("nav").append(element("a", { href: "#" + made.id }, title));
  return made;
}

function folded(name, title, ...children) {
  return element("details", { class: name }, element("summary", {}, title), ...children);
}

const CURVE_COLOURS = "1f66c1 e1701a 2a9d5c c93a52 7d5fc4 8a6552 d05fa8 6c757d a59a1c 1aa3b8".split(" ");
const colour = (place) => "#" + CURVE_COLOURS[place % CURVE_COLOURS.length];

function figure(number) {
  if (typeof number !== "number") return number === null || number === undefined ? "" : String(number);
  if (Number.isInteger(number)) return String(number);
  return Math.abs(number) < 1e-4 ? number.toExponential(3) : String(Number(number.toPrecision(4)));
}
