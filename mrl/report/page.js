"use strict";

function showNotes(data) {
  const list = element("ul", { class: "notes", id: "notes" });
  partInTurn.append(list);
  const fill = (newer) => {
    const notes = newer.runs.flatMap((run) => run.notes.map((note) => (newer.runs.length > 1 ? `${run.name}: ${note}` : note)));
    list.replaceChildren(...notes.map((note) => element("li", {}, note)));
    list.hidden = !notes.length;
  };
  fill(data);
  return fill;
}

const data = JSON.parse(document.getElementById("data").textContent);
const parts = [showNotes, ...(data.live ? [showRuns] : []), showCurves, showStep, showSamples, showSettings].map((show) => ({ show, update: null, place: element("div", {}) }));
document.querySelector("main").append(...parts.map((part) => part.place));

// A part shows what it has and gives what takes newer data; one that has nothing yet is asked again.
function showAll(now) {
  for (const part of parts) {
    partInTurn = part.place;
    if (part.update) part.update(now);
    else part.update = part.show(now) || null;
  }
}

showAll(data);
if (data.live) follow(data, showAll);
