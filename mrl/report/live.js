"use strict";
// A page that is fed while runs are written: it asks for what is newer, and for samples.

const SECONDS = 2;

class ServedSamples {
  constructor(data) {
    this.update(data);
  }

  update(data) {
    this.runs = data.runs;
    this.seen = data.runs.reduce((sum, run) => sum + run.samples.seen, 0);
  }

  values(name) {
    return name === "run" ? this.runs.map((run) => run.name) : [...new Set(this.runs.flatMap((run) => run.samples.values[name]))].sort();
  }

  async find(query, next) {
    const { run, ...names } = query.names;
    const asked = new URLSearchParams(run ? [["run", run]] : this.runs.map((each) => ["run", each.name]));
    for (const [name, value] of Object.entries(names)) if (value) asked.set(name, value);
    for (const [name, [low, high]] of Object.entries(query.ranges)) {
      if (low !== "") asked.set(`${name}-from`, low);
      if (high !== "") asked.set(`${name}-to`, high);
    }
    if (query.text) asked.set("text", query.text);
    if (next) { asked.set("ends", next.ends.join(".")); asked.set("skip", next.skip); }
    const found = await answered(`samples?${asked}`);
    const searched = query.text ? `; the text was looked for in the latest ${found.looked} of these` : ", the latest steps first";
    return {
      rows: found.rows, next: found.next, nextSaid: query.text ? "look on" : "more",
      said: `${found.fitting} of ${this.seen} samples${searched}.`,
    };
  }

  ofPrompt(row, limit) {
    const asked = new URLSearchParams(this.runs.map((each) => ["run", each.name]));
    asked.set("of", row.run);
    asked.set("number", row.number);
    asked.set("limit", limit);
    return answered(`prompt?${asked}`);
  }
}

async function answered(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.status === 204 ? null : answer.json();
}

function showRuns(data) {
  if (data.live.listed.length < 2) return null;
  const box = element("div", { class: "list", id: "runs" });
  const fill = (newer) => box.replaceChildren(...newer.live.listed.map((run) => runLine(run, newer.live.shown)));
  section("Runs", box);
  fill(data);
  return fill;
}

function runLine(run, shown) {
  const others = shown.filter((name) => name !== run.name), isShown = others.length < shown.length;
  const address = (names) => "?" + new URLSearchParams(names.map((name) => ["run", name]));
  const beside = isShown ? others : [...shown, run.name];
  const links = [element("a", { href: address([run.name]) }, run.name)];
  if (beside.length) links.push(" ", element("a", { href: address(beside), class: "quiet" }, isShown ? "take away" : "compare"));
  return element("p", { class: isShown ? "chosen" : null }, ...links, " ", element("span", { class: "quiet" }, run.folder));
}

async function follow(data, showAll) {
  const state = element("p", { class: "quiet", id: "state" });
  document.querySelector("header").append(state);
  const said = (text) => { if (state.textContent !== text) state.textContent = text; };
  for (;;) {
    said(data.live.behind ? `reading: ${figure(data.live.behind / 1e6)} MB are left` : "up to date");
    await new Promise((done) => setTimeout(done, data.live.behind ? 50 : 1000 * SECONDS));
    if (document.hidden) continue;
    try {
      const asked = new URLSearchParams(data.live.shown.map((name) => ["run", name]));
      asked.set("version", data.live.version);
      const newer = await answered(`feed?${asked}`);
      if (newer) showAll(Object.assign(data, newer));
    } catch (error) {
      said(`not up to date: ${error.message}`);
      await new Promise((done) => setTimeout(done, 5000));
    }
  }
}
