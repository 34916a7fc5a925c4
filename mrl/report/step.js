"use strict";
// A step as a timeline: its phases in order, each on the line of its workers; a worker without a bar waits.

const WORKERS = {
  generate: ["engines"], reward: ["reward workers"], filter: ["driver"], recompute: ["trainer ranks"],
  estimate: ["driver"], update: ["trainer ranks"], park: ["engines"], save: ["trainer ranks"],
  sync: ["trainer ranks", "engines"], validate: ["engines"],
};
const WAITS = /(^|\/|_)wait_|held_by|^perf\/driver_/;

class StepTimeline {
  constructor(data) {
    this.data = data;
    this.run = data.runs[0];
    this.phases = element("div", { class: "plot" });
    this.bars = element("div", { class: "plot" });
    this.waits = element("div", {});
    this.place = element("input", { type: "range", min: 0, id: "step-place", input: () => this.showStep() });
    this.label = element("span", {});
  }

  content() {
    const runs = this.data.runs.map((run, place) => [place, run.name]);
    return [
      ...(runs.length > 1 ? [choice("Run", runs, (place) => this.show(this.data.runs[place]))] : []),
      element("p", { class: "quiet" },
        "Seconds of each phase over the steps. Below: one step, or the mean of the steps that share a point."),
      this.phases, element("div", { class: "controls" }, this.place, this.label), this.bars, this.waits,
    ];
  }

  show(run) {
    this.run = run;
    this.place.max = Math.max(0, run.curves.step.length - 1);
    this.place.value = this.place.max;
    const traces = this.names().map((name, place) => ({
      x: run.curves.step, y: this.line(name), name, stackgroup: "one", line: { width: 0.5, color: colour(place) },
    }));
    const axes = { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "seconds" } } };
    Plotly.react(this.phases, traces, layout({ ...axes, showlegend: true }), SETTINGS);
    this.showStep();
  }

  names() {
    return [...this.data.phases, "validate"].filter((name) => `time/${name}_seconds` in this.run.curves.metrics);
  }

  line(name) {
    return this.run.curves.metrics[`time/${name}_seconds`].mean;
  }

  showStep() {
    const place = Number(this.place.value), curves = this.run.curves;
    const first = curves.first[place], last = curves.step[place];
    this.label.textContent = first === last ? `step ${last}` : `mean of steps ${first} to ${last}`;
    let start = 0;
    const traces = [];
    for (const [number, name] of this.names().entries()) {
      const seconds = this.line(name)[place] || 0, workers = WORKERS[name] || ["driver"];
      traces.push({
        type: "bar", orientation: "h", name, y: workers, x: workers.map(() => seconds),
        base: workers.map(() => start), marker: { color: colour(number) },
        hovertemplate: `${name}: ${figure(seconds)} s<extra></extra>`,
      });
      start += seconds;
    }
    Plotly.react(this.bars, traces, layout({
      height: 200, barmode: "overlay", bargap: 0.35, hovermode: "closest", showlegend: false,
      xaxis: { title: { text: "seconds since the step began" } },
      yaxis: { categoryorder: "array", categoryarray: ["driver", "reward workers", "trainer ranks", "engines"] },
    }), SETTINGS);
    this.waits.replaceChildren(...this.waitsAt(place));
  }

  waitsAt(place) {
    const curves = this.run.curves, rows = [];
    const streams = Object.keys(curves.metrics).some((name) => name.startsWith("stream/"));
    for (const described of this.data.figures.filter((each) => each.section !== "Overview")) {
      for (const name of described.names.filter((each) => WAITS.test(each) && each in curves.metrics)) {
        const value = curves.metrics[name].mean[place];
        if (value !== null) rows.push([name, figure(value) + " " + described.unit, described.meaning]);
      }
    }
    const note = streams
      ? "Streaming: engines generate while the trainer works; generate is the time the step waits for its groups."
      : "On shared GPUs engines and trainer ranks alternate: one waits while the other works.";
    const waits = rows.length ? [table(["waiting and driver time", "value", "meaning"], rows)] : [];
    return [element("p", { class: "quiet" }, note), ...waits];
  }
}

function showStep(data) {
  if (!data.runs.some((run) => run.curves.step.length)) return;
  const timeline = new StepTimeline(data);
  section("Step timeline", ...timeline.content());
  timeline.show(timeline.run);
}
