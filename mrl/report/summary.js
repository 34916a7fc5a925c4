"use strict";
// What each run is and how far it came: a list for one run, a table with a row per run for several.

function duration(seconds) {
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const badge = ({ status }) => element("span", { class: `status ${status}` }, status);
const oneLine = (...children) => element("span", { class: "one-line" }, ...children);
const bar = (step, steps) => (steps ? element("progress", { value: step, max: steps }) : null);

const SUMMARY = {
  Status: (run) => element("span", {}, badge(run), " " + run.reason),
  Step: ({ step, steps }) => oneLine(steps ? `${step} of ${steps} ` : step, bar(step, steps)),
  Elapsed: ({ seconds }) => oneLine(duration(seconds)),
  "Time left": (run) => run.status === "running" && run.seconds_left > 0
    && oneLine("about " + duration(run.seconds_left)),
  "Best validation": ({ best }) => best && oneLine(`${figure(best.value)} at step ${best.step}`),
  Model: ({ model }) => model,
  Hardware: ({ hardware }) => hardware,
  Version: ({ version }) => version,
};

function runLabel(run, place) {
  const swatch = element("span", { class: "swatch" });
  swatch.style.backgroundColor = colour(place);
  return element("span", { class: "one-line" }, swatch, run.name);
}

function showSummary({ runs }) {
  const column = ([name, show]) => [name, ...runs.map((run) => show(run.overview) || "")];
  const shown = Object.entries(SUMMARY).map(column).filter(([, ...values]) => values.some((value) => value));
  const heading = document.querySelector("h1");
  if (runs.length === 1) {
    heading.append(" ", badge(runs[0].overview));
    main.append(element("dl", { id: "summary" }, ...shown.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  } else {
    heading.replaceChildren(...runs.map(runLabel));
    const [heads, ...rows] = [["Run", ...runs.map(runLabel)], ...shown].reduce(
      (lines, cells) => cells.map((value, place) => [...(lines[place] || []), value]), []);
    main.append(element("div", { id: "summary" }, table(heads, rows)));
  }
}
