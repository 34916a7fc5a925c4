"use strict";
// Settings and facts of the runs, a column per run: settings that differ come first, the others are folded.

function comparison(runs, names, treeOf, defaults) {
  const rows = names.map((name) => {
    const values = runs.map((run) => treeOf(run)[name] ?? ""), differs = new Set(values).size > 1;
    const cells = values.map((value) => element("span", { class: differs ? "differs" : null }, value));
    return [name, ...cells, ...(defaults ? [defaults[name] || "none"] : [])];
  });
  const columns = runs.map((run) => (runs.length > 1 ? run.name : "value"));
  const made = table(["", ...columns, ...(defaults ? ["default"] : [])], rows);
  made.classList.add("comparison");
  return made;
}

function showSettings({ runs }) {
  const namesOf = (treeOf) => [...new Set(runs.flatMap((run) => Object.keys(treeOf(run))))];
  const defaults = Object.assign({}, ...runs.map((run) => run.differing)), groups = [[], [], []];
  for (const name of namesOf((run) => run.config)) {
    groups[new Set(runs.map((run) => run.config[name])).size > 1 ? 0 : name in defaults ? 1 : 2].push(name);
  }
  const titles = ["Different between the runs", "Different from the defaults", "Equal to the defaults"];
  const list = (names, place) => folded("", `${titles[place]} (${names.length})`,
    comparison(runs, names, (run) => run.config, place < 2 && defaults));
  const lists = groups.map(list).filter((_, place) => groups[place].length);
  if (lists.length) lists[0].open = true;
  section("Configuration", ...lists);
  const facts = Object.keys(runs[0].facts).flatMap((kind) => {
    const ofRun = (run) => run.facts[kind];
    return [element("h3", {}, kind), comparison(runs, namesOf(ofRun), ofRun)];
  });
  section("Versions and hardware", element("div", {}, ...facts));
}
