"use strict";

function showNotes(data) {
  const notes = data.runs.flatMap((run) => run.notes.map((note) => (data.runs.length > 1 ? `${run.name}: ${note}` : note)));
  if (notes.length) main.append(element("ul", { class: "notes", id: "notes" }, ...notes.map((note) => element("li", {}, note))));
}

const data = JSON.parse(document.getElementById("data").textContent);
for (const show of [showSummary, showNotes, showCurves, showStep, showSamples, showSettings]) show(data);
