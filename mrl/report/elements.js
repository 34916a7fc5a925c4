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
  main.append(element("h2", { id: title.replaceAll(" ", "-") }, title), ...children);
  const links = [...document.querySelectorAll("h2")].map((heading) => element("a", { href: "#" + heading.id }, heading.textContent));
  document.querySelector("nav").replaceChildren(...links);
}

function figure(number) {
  if (typeof number !== "number") return number === null || number === undefined ? "" : String(number);
  return Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(4)));
}
