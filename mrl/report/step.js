"use strict";
// A step as a timeline: its phases one after the other, each on the line of who works in it; who has no bar waits.

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
      element("div", { class: "controls" }, choice("Run", runs, (place) => this.show(this.data.runs[place]))),
      element("p", { class: "quiet" }, "Seconds of each phase over the steps, and below one step (or the mean of those of a point)."),
      this.phases, element("div", { class: "controls" }, this.place, this.label), this.bars, this.waits,
    ];
  }

  show(run) {
    this.run = run;
    this.place.max = Math.max(0, run.curves.step.length - 1);
    this.place.value = this.place.max;
    const traces = this.names().map((name) => ({
      x: run.curves.step, y: this.line(name), name, stackgroup: "one", line: { width: 0.5 },
    }));
    const layout = { height: 260, margin: { l: 52, r: 8, t: 6, b: 30 }, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "s" } } };
    Plotly.react(this.phases, traces, layout, SETTINGS);
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
    for (const name of this.names()) {
      const seconds = this.line(name)[place] || 0, workers = WORKERS[name] || ["driver"];
      traces.push({ type: "bar", orientation: "h", name, y: workers, x: workers.map(() => seconds), base: workers.map(() => start) });
      start += seconds;
    }
    Plotly.react(this.bars, traces, {
      height: 230, barmode: "overlay", margin: { l: 110, r: 8, t: 6, b: 36 }, xaxis: { title: { text: "s since the step began" } },
      yaxis: { categoryorder: "array", categoryarray: ["driver", "reward workers", "trainer ranks", "engines"] },
    }, SETTINGS);
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
      ? "A stream: the engines go on generating beside the trainer's phases; generate is the step's wait for its groups."
      : "Shared slots take turns: engines rest while trainer ranks work, and the other way round.";
    return [element("p", { class: "quiet" }, note), ...(rows.length ? [table(["who waited, and what the driver did", "", ""], rows)] : [])];
  }
}

function showStep(data) {
  if (!data.runs.some((run) => run.curves.step.length)) return;
  const timeline = new StepTimeline(data);
  section("A step", ...timeline.content());
  timeline.show(timeline.run);
}
