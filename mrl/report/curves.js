"use strict";
// Curves over steps or hours, each drawn when it comes into view.

const SETTINGS = { responsive: true, displaylogo: false };

class CurveFigures {
  constructor(runs) {
    this.runs = runs;
    this.axis = "step";
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        entry.target.inView = entry.isIntersecting;
        if (entry.isIntersecting) this.draw(entry.target);
      }
    }, { rootMargin: "300px" });
    this.plots = [];
    this.grids = new Map();
  }

  grid(title) {
    if (!this.grids.has(title)) {
      this.grids.set(title, element("div", { class: "figures" }));
      section(title, this.grids.get(title));
    }
    return this.grids.get(title);
  }

  card(described) {
    const plot = element("div", { class: "plot" });
    const heading = element("h3", {}, described.title + (described.unit ? ` [${described.unit}]` : ""));
    plot.described = described;
    this.plots.push(plot);
    this.seen.observe(plot);
    return element("div", { class: "figure" }, heading, plot, element("p", {}, described.meaning));
  }

  show(axis) {
    this.axis = axis;
    for (const plot of this.plots) if (plot.inView) this.draw(plot);
  }

  draw(plot) {
    if (plot.axis === this.axis) return;
    plot.axis = this.axis;
    const traces = this.traces(plot.described);
    const title = this.axis === "step" ? "step" : "hours of steps, saving and validation";
    Plotly.react(plot, traces, {
      height: 260, margin: { l: 52, r: 8, t: 6, b: 36 }, hovermode: "x", uirevision: this.axis,
      showlegend: traces.length > 1, legend: { orientation: "h", y: -0.25, font: { size: 10 } },
      xaxis: { title: { text: title, font: { size: 11 } } }, yaxis: { automargin: true },
    }, SETTINGS);
  }

  traces(described) {
    const found = [];
    for (const run of this.runs) {
      for (const name of described.names) {
        const line = run.curves.metrics[name];
        if (line) found.push(...this.trace(run, name, line, described));
      }
    }
    return found;
  }

  trace(run, name, line, described) {
    const label = this.runs.length > 1 ? run.name + (described.names.length > 1 ? " " + name : "") : name;
    const keepsGaps = name in run.curves.not_finite;
    const places = [...line.mean.keys()].filter((place) => keepsGaps || line.mean[place] !== null);
    const x = places.map((place) => run.curves[this.axis][place]);
    const values = (key) => places.map((place) => line[key][place]);
    const mode = places.length > 60 ? "lines" : "lines+markers";
    const mean = { x, y: values("mean"), name: label, mode, line: { width: 1.5 }, marker: { size: 4 } };
    if (!line.low || described.names.length * this.runs.length > 3) return [mean];
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    const fill = { fill: "tonexty", fillcolor: "rgba(100,120,150,0.18)" };
    return [{ ...edge, y: values("low") }, { ...edge, y: values("high"), ...fill }, mean];
  }
}

function showCurves(data) {
  const curves = new CurveFigures(data.runs);
  const axes = [["step", "steps"], ["hours", "hours"]];
  const find = element("input", { type: "search", placeholder: "part of a name", id: "find-figure", input: () => {
    for (const card of document.querySelectorAll(".figure")) {
      card.hidden = !card.querySelector("h3").textContent.includes(find.value);
    }
  } });
  main.append(element("div", { class: "controls" },
    choice("Curves over", axes, (axis) => curves.show(axis)), element("label", {}, "Figures with ", find)));
  for (const described of data.figures) curves.grid(described.section).append(curves.card(described));
}
