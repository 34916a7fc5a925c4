"use strict";
// Samples to browse: filters, a list, and all samples of the chosen prompt side by side with coloured tokens.

const TOKENS = 4000, SIDE_BY_SIDE = 12;
const red = (share) => `rgba(214, 60, 50, ${Math.min(0.75, share).toFixed(3)})`;
const blue = (share) => `rgba(45, 105, 200, ${Math.min(0.75, share).toFixed(3)})`;
const signed = (share) => (share < 0 ? blue(-share) : red(share));
const COLOURS = {
  logprob: (value) => red(-value / 6),
  ratio: (value) => signed(Math.log2(value)),
  age: (value) => red(value / 8),
  advantage: (value) => signed(value / 3),
};
const COLOUR_NAMES = [
  ["", "nothing"], ["logprob", "engine log-prob"], ["ratio", "trainer / engine ratio"],
  ["age", "staleness in versions"], ["advantage", "advantage"],
];
const FILTERS = ["run", "kind", "domain", "status", "verdict"];
const RANGES = ["step", "reward", "response_tokens"];
const HEAD = ["run", "step", "kind", "domain", "reward", "tokens", "status", "prompt", "response"];

class SampleBrowser {
  constructor(source) {
    this.source = source;
    this.query = { names: {}, ranges: {}, text: "" };
    this.requests = 0;
    this.colour = "";
    this.count = element("p", { class: "quiet", id: "sample-count" });
    this.list = element("div", { class: "list", id: "sample-list" });
    this.chosen = element("div", { id: "chosen" });
  }

  content() {
    const filter = ({ target }) => {
      this.query.text = target.value.toLowerCase();
      this.show();
    };
    const placeholder = "in prompt, response, reason";
    const search = element("input", { type: "search", id: "find-sample", placeholder, input: filter });
    const controls = element("div", { class: "controls" }, element("label", {}, "Search ", search));
    for (const name of FILTERS) {
      const values = this.source.values(name), options = ["", ...values.filter((value) => value)];
      const label = choice(name, options.map((value) => [value, value || "all"]), (value) => { this.query.names[name] = value; this.show(); });
      label.hidden = values.length < 2;
      controls.append(label);
    }
    for (const name of RANGES) controls.append(this.range(name));
    controls.append(choice("Colour tokens by", COLOUR_NAMES, (value) => { this.colour = value; this.showCards(); }));
    return [controls, this.count, this.list, this.chosen];
  }

  range(name) {
    const inputs = ["from", "to"].map((end) => element("input", { type: "number", step: "any", placeholder: end, "data-range": `${name}-${end}`, input: () => {
      this.query.ranges[name] = inputs.map((input) => input.value);
      this.show();
    } }));
    return element("label", {}, name.replace("_", " ") + " ", ...inputs);
  }

  async show() {
    const ticket = ++this.requests;
    const found = await this.source.find(this.query, null);
    if (ticket === this.requests) this.fill(found, [element("tr", {}, ...HEAD.map((name) => element("th", {}, name)))]);
  }

  async showMore(next, rows) {
    const ticket = ++this.requests;
    const found = await this.source.find(this.query, next);
    if (ticket === this.requests) this.fill(found, rows);
  }

  fill(found, before) {
    const rows = [...before, ...found.rows.map((row) => this.line(row))];
    this.count.textContent = found.summary;
    const more = element("button", { click: () => this.showMore(found.next, rows) }, found.nextLabel);
    this.list.replaceChildren(element("table", {}, ...rows), ...(found.next ? [more] : []));
  }

  line(row) {
    const short = (text) => element("td", { class: "cut" }, String(text ?? "").slice(0, 200));
    const values = [row.run, row.step, row.kind, row.domain, row.reward, row.response_tokens, row.status];
    const cells = values.map((value) => element("td", {}, figure(value)));
    const choose = () => {
      this.row = row;
      for (const other of this.list.querySelectorAll("tr")) other.classList.toggle("chosen", other === made);
      this.showChosen();
    };
    const made = element("tr", { class: "choosable", click: choose }, ...cells, short(row.prompt), short(row.response));
    return made;
  }

  async showChosen(limit = SIDE_BY_SIDE) {
    const row = this.row, found = await this.source.ofPrompt(row, limit);
    if (row !== this.row) return;
    this.found = { ...found, limit };
    this.showCards();
  }

  showCards() {
    if (!this.found) return;
    const { rows, total, limit } = this.found, left = total - rows.length;
    if (!rows.length) {
      this.chosen.replaceChildren(element("p", { class: "quiet" }, "The sample is no longer in its file."));
      return;
    }
    this.chosen.replaceChildren(
      element("h3", {}, `Prompt and its ${total} samples in this page`),
      element("div", { class: "text" }, String(rows[0].prompt ?? "")),
      element("p", { class: "quiet" }, `ground truth: ${rows[0].ground_truth ?? "not written"}`),
      element("div", { class: "samples" }, ...rows.map((row) => this.card(row))),
      ...(left > 0 ? [element("button", { click: () => this.showChosen(limit + SIDE_BY_SIDE) }, `${left} more`)] : []));
  }

  card(row) {
    const parts = Object.entries(row.parts || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const title = `${row.run}, step ${row.step}, ${row.kind} ${row.sample_id}`;
    const said = [`reward ${figure(row.reward)}`, row.status, `${row.response_tokens} tokens`, Array.isArray(row.policy_versions) && `versions ${row.policy_versions.join(" to ")}`, parts, row.why];
    return element("div", { class: "sample" }, element("strong", {}, title),
      element("p", { class: "quiet" }, said.filter((each) => each).join(", ")),
      element("p", { class: "quiet" }, `verdict: ${[row.verdict, row.reason].filter((each) => each).join(", ")}`), ...this.conversations(row));
  }

  /** All conversations of a program, in order of time; of one that leaves another, only its own turns. */
  conversations(row) {
    const all = [...(Array.isArray(row.branches) ? row.branches : []), row];
    if (all.length === 1) return this.response(row);
    return all.flatMap((one, place) => {
      const { conversation, turns = 0 } = one.continues || {};
      const name = `conversation ${place + 1} of ${all.length}`;
      const title = conversation ? `${name}, after turn ${turns} of conversation ${conversation}` : name;
      const opening = conversation ? [] : [element("div", { class: "text observation" }, String(one.opening ?? ""))];
      const own = one.tokens ? this.response(one) : (one.turns || []).flatMap((turn, number) => number < turns ? [] : [
        element("div", { class: "turn" }, `turn ${number + 1}`), element("div", { class: "text" }, String(turn.said ?? "")),
        ...(turn.observed ? [element("div", { class: "text observation" }, String(turn.observed))] : [])]);
      return [element("div", { class: "turn" }, title), ...opening, ...own];
    });
  }

  response(row) {
    const tokens = row.tokens;
    if (!tokens || !Array.isArray(tokens.text)) {
      const text = this.colour ? "The run wrote no per-token values of this sample." : "";
      return [element("p", { class: "quiet" }, text), element("div", { class: "text" }, String(row.response ?? ""))];
    }
    const missing = this.colour && !(this.colour in tokens);
    const note = missing ? [element("p", { class: "quiet" }, `The run wrote no ${this.colour} of this sample's tokens.`)] : [];
    return [...note, ...this.turns(tokens)];
  }

  turns(tokens, limit = TOKENS) {
    const own = (place) => valueAt(tokens.policy ?? 1, place);
    const isEpisode = Array.isArray(tokens.policy), blocks = [];
    let block = null, turn = 0;
    for (let place = 0; place < Math.min(limit, tokens.text.length); place++) {
      if (!block || own(place) !== own(place - 1)) {
        block = element("div", { class: own(place) ? "text" : "text observation" });
        if (isEpisode) blocks.push(element("div", { class: "turn" }, own(place) ? `turn ${++turn}` : "the environment"));
        blocks.push(block);
      }
      block.append(this.token(tokens, place));
    }
    if (tokens.text.length > limit) blocks.push(element("p", { class: "quiet" }, `${tokens.text.length - limit} further tokens are not shown.`));
    return blocks;
  }

  token(tokens, place) {
    const known = Object.keys(COLOURS).filter((name) => typeof valueAt(tokens[name], place) === "number");
    const span = element("span", { title: known.map((name) => `${name} ${figure(valueAt(tokens[name], place))}`).join("\n") }, tokens.text[place]);
    if (known.includes(this.colour) && valueAt(tokens.policy ?? 1, place)) span.style.backgroundColor = COLOURS[this.colour](valueAt(tokens[this.colour], place));
    return span;
  }
}

function valueAt(values, place) {
  return Array.isArray(values) ? values[place] : values;
}

function showSamples(data) {
  if (!data.runs.some((run) => run.samples.seen)) return;
  const browser = new SampleBrowser(new HeldSamples(data.runs));
  const counts = data.runs.flatMap((run) => Object.entries(run.samples.counts).flatMap(([what, found]) =>
    found.map(([value, count]) => [run.name, what, value, count, figure(count / run.samples.seen)])));
  const note = "The 30 most common values of each kind. Reasons omit numbers and quotations.";
  const list = table(["run", "kind", "value", "samples", "share"], counts);
  section("Samples", ...browser.content(), folded("counts", "Counts over all samples", element("p", {}, note), list));
  browser.show();
}
