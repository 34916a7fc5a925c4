"use strict";
// Curves over steps or hours, each drawn when it comes into view; constant ones are listed instead.

const BUTTONS = ["toImage", "zoom2d", "pan2d", "resetScale2d"];
const SETTINGS = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [BUTTONS] };
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash", "longdashdot"];

function layout({ xaxis, yaxis, ...changes }) {
  const axis = { gridcolor: "#eceef2", zerolinecolor: "#d5d8dd", exponentformat: "none", automargin: true };
  return {
    height: 250, margin: { l: 46, r: 10, t: 8, b: 34 },
    hovermode: "x unified", hoverlabel: { namelength: -1 },
    font: { family: "system-ui, sans-serif", size: 11, color: "#4a505a" },
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { size: 10 } },
    ...changes, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, separatethousands: true, ...yaxis },
  };
}

function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}

class CurveFigures {
  constructor(runs) {
    this.runs = runs;
    this.view = { axis: "step", smoothing: 0, log: false };
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        entry.target.inView = entry.isIntersecting;
        if (entry.isIntersecting) this.draw(entry.target);
      }
    }, { rootMargin: "300px" });
    this.plots = [];
  }

  section(title, figures) {
    const constant = figures.filter(({ names }) => names.every((name) => this.isConstant(name)));
    const varying = figures.filter((described) => !constant.includes(described));
    const cards = element("div", { class: "figures" }, ...varying.map((described) => this.card(described)));
    section(title, cards, ...this.constants(constant));
  }

  isConstant(name) {
    return this.runs.every(({ curves }) => {
      const { mean = [], low = [], high = [] } = curves.metrics[name] || {};
      const values = [...mean, ...low, ...high].filter((value) => value !== null);
      return !(name in curves.not_finite) && values.every((value) => value === values[0]);
    });
  }

  constants(figures) {
    const valueOf = (run, name) => run.curves.metrics[name]?.mean.find((value) => value !== null);
    const rows = figures.flatMap((described) => described.names.map((name) =>
      [name, ...this.runs.map((run) => figure(valueOf(run, name))), described.unit, described.meaning]));
    const heads = this.runs.length > 1 ? this.runs.map((run) => run.name) : ["value"];
    const list = table(["metric", ...heads, "unit", "meaning"], rows);
    rows.forEach(([name], place) => { list.rows[place + 1].dataset.metric = name; });
    return rows.length ? [folded("constants", `Constant (${rows.length})`, list)] : [];
  }

  card(described) {
    const plot = element("div", { class: "plot" }), { title, unit, meaning, names } = described;
    plot.described = described;
    this.plots.push(plot);
    this.seen.observe(plot);
    const heading = element("h3", { title }, title + (unit ? ` [${unit}]` : ""));
    const text = element("p", { title: meaning }, meaning), metric = [title, ...names].join(" ");
    return element("div", { class: "figure", "data-metric": metric }, heading, text, plot);
  }

  show(change) {
    Object.assign(this.view, change);
    for (const plot of this.plots) if (plot.inView) this.draw(plot);
  }

  draw(plot) {
    const { axis, log } = this.view, { names } = plot.described, view = JSON.stringify(this.view);
    if (plot.view === view) return;
    plot.view = view;
    const traces = names.flatMap((name) => this.runs.flatMap((run) => this.trace(run, name, plot.described)));
    const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
    const isLog = log && values.every((value) => value > 0), isSmall = (value) => Math.abs(value) < 1e-4;
    const form = (isLog ? values.some(isSmall) : values.every(isSmall)) ? "e" : "none";
    Plotly.react(plot, traces, layout({
      uirevision: `${axis} ${isLog}`, showlegend: names.length > 1 && names.length <= 8,
      xaxis: { title: { text: axis === "step" ? "step" : "hours of steps, saving and validation" } },
      yaxis: { type: isLog ? "log" : "linear", exponentformat: form },
    }), SETTINGS);
  }

  trace(run, name, { names, entry }) {
    const line = run.curves.metrics[name], several = this.runs.length > 1, place = names.indexOf(name);
    if (!line) return [];
    const label = names.length > 1 ? name.replace(entry.split("<")[0], "") : several ? run.name : name;
    const keepsGaps = name in run.curves.not_finite;
    const places = [...line.mean.keys()].filter((each) => keepsGaps || line.mean[each] !== null);
    const x = places.map((each) => run.curves[this.view.axis][each]);
    const values = (key) => places.map((each) => line[key][each]);
    const style = {
      x, name: label.replaceAll("<", "&lt;"), showlegend: run === this.runs[0], marker: { size: 4 },
      mode: places.length > 60 ? "lines" : "lines+markers",
      line: {
        width: 1.6, color: colour(several ? this.runs.indexOf(run) : place),
        dash: several ? DASHES[place % DASHES.length] : "solid",
      },
    };
    const { smoothing } = this.view, raw = { ...style, y: values("mean") };
    const pale = { ...raw, opacity: 0.25, showlegend: false, hoverinfo: "skip" };
    const curves = smoothing ? [pale, { ...style, mode: "lines", y: smoothed(raw.y, smoothing) }] : [raw];
    if (!line.low || names.length * this.runs.length > 3) return curves;
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    const fill = { fill: "tonexty", fillcolor: "rgba(100,120,150,0.15)" };
    return [{ ...edge, y: values("low") }, { ...edge, y: values("high"), ...fill }, ...curves];
  }
}

function showOnly(text) {
  const items = document.querySelectorAll("[data-metric]");
  for (const item of items) item.hidden = !item.dataset.metric.includes(text);
  for (const part of document.querySelectorAll("section:has(.figures)")) {
    part.hidden = !part.querySelector("[data-metric]:not([hidden])");
    for (const list of part.querySelectorAll("details")) list.open = text !== "";
  }
}

function showCurves(data) {
  const curves = new CurveFigures(data.runs);
  const filter = ({ target }) => showOnly(target.value);
  const find = { type: "search", placeholder: "metric name", id: "find-figure", input: filter };
  const smooth = ({ target }) => {
    curves.show({ smoothing: Number(target.value) });
    target.nextSibling.textContent = target.value;
  };
  const weight = { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0, input: smooth };
  const scale = ({ target }) => curves.show({ log: target.checked });
  document.getElementById("controls").append(
    choice("Curves over", [["step", "steps"], ["hours", "hours"]], (axis) => curves.show({ axis })),
    element("label", {}, "Smoothing ", element("input", weight), element("output", {}, "0")),
    element("label", {}, element("input", { type: "checkbox", id: "log-scale", change: scale }), " Log scale"),
    element("input", find));
  for (const title of new Set(data.figures.map((described) => described.section))) {
    curves.section(title, data.figures.filter((described) => described.section === title));
  }
}
