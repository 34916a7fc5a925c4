"use strict";
// What runs have of settings and facts, one column a run, and where they differ.

function comparison(runs, treeOf) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(treeOf(run))))].sort();
  const rows = names.map((name) => {
    const values = runs.map((run) => treeOf(run)[name] ?? "");
    const differs = new Set(values).size > 1;
    const cells = values.map((value) => element("td", { class: differs ? "differs" : null }, String(value)));
    const row = element("tr", {}, element("td", {}, name), ...cells);
    row.differs = differs;
    return row;
  });
  const head = element("tr", {}, element("th", {}, ""), ...runs.map((run) => element("th", {}, run.name)));
  return { rows, table: element("table", {}, head, ...rows) };
}

function showSettings(data) {
  const several = data.runs.length > 1, settings = comparison(data.runs, (run) => run.config);
  const box = element("input", { type: "checkbox", id: "only-differing", checked: several, change: () => hide() });
  const hide = () => { for (const row of settings.rows) row.hidden = box.checked && !row.differs; };
  hide();
  section("Configuration", ...(several ? [element("label", {}, box, " only what differs")] : []), element("div", {}, settings.table));
  const facts = Object.keys(data.runs[0].facts).flatMap((what) =>
    [element("h3", {}, what), comparison(data.runs, (run) => run.facts[what]).table]);
  section("Versions and hardware", element("div", {}, ...facts));
}
