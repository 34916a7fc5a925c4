"use strict";

function showNotes(data) {
  const notes = data.runs.flatMap((run) => run.notes.map((note) => element("li", {}, data.runs.length > 1 ? `${run.name}: ${note}` : note)));
  if (notes.length) document.querySelector("main").append(element("ul", { class: "notes", id: "notes" }, ...notes));
}

const data = JSON.parse(document.getElementById("data").textContent);
for (const show of [showNotes, showCurves, showStep, showSamples, showSettings]) show(data);
