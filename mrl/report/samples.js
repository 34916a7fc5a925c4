"use strict";
// Samples to browse: filters, a list, and all samples of the chosen prompt side by side with coloured tokens.

const PAGE = 100, TOKENS = 4000, SIDE_BY_SIDE = 12;
const SEARCHED = Symbol("what the search looks at");
const red = (share) => `rgba(214, 60, 50, ${Math.min(0.75, share).toFixed(3)})`;
const blue = (share) => `rgba(45, 105, 200, ${Math.min(0.75, share).toFixed(3)})`;
const signed = (share) => (share < 0 ? blue(-share) : red(share));
const COLOURS = {
  logprob: (value) => red(-value / 6),
  ratio: (value) => signed(Math.log2(value)),
  age: (value) => red(value / 8),
  advantage: (value) => signed(value / 3),
};
const COLOUR_NAMES = [["", "nothing"], ["logprob", "log-prob of the engine"], ["ratio", "ratio of trainer to engine"], ["age", "age in versions"], ["advantage", "advantage"]];
const FILTERS = ["run", "kind", "domain", "status", "verdict"];
const RANGES = ["step", "reward", "response_tokens"];

class SampleBrowser {
  constructor(runs) {
    this.rows = runs.flatMap((run) => run.samples.rows.map((row) => ({ ...row, run: run.name })));
    this.seen = runs.reduce((sum, run) => sum + run.samples.seen, 0);
    this.filters = {};
    this.colour = "";
    this.text = "";
    this.count = element("p", { class: "quiet", id: "sample-count" });
    this.list = element("div", { class: "list", id: "sample-list" });
    this.chosen = element("div", { id: "chosen" });
  }

  content() {
    const search = element("input", { type: "search", id: "find-sample", placeholder: "prompt, response, truth, reason", input: () => {
      this.text = search.value.toLowerCase();
      this.show();
    } });
    const controls = element("div", { class: "controls" }, element("label", {}, "Text ", search));
    for (const name of FILTERS) {
      const values = [...new Set(this.rows.map((row) => String(row[name] ?? "")))].sort();
      if (values.length < 2) continue;
      const options = [["", "all"], ...values.filter((value) => value).map((value) => [value, value])];
      controls.append(choice(name, options, (value) => this.filter(name, value && ((row) => String(row[name]) === value))));
    }
    for (const name of RANGES) controls.append(this.range(name));
    controls.append(choice("Colour tokens by", COLOUR_NAMES, (value) => { this.colour = value; this.showChosen(); }));
    return [controls, this.count, this.list, this.chosen];
  }

  range(name) {
    const inputs = ["from", "to"].map((end) => element("input", { type: "number", step: "any", placeholder: end, "data-range": `${name}-${end}`, input: () => {
      const [low, high] = inputs.map((input) => input.value);
      const fits = (row) => typeof row[name] === "number" && (low === "" || row[name] >= low) && (high === "" || row[name] <= high);
      this.filter(name, low === "" && high === "" ? "" : fits);
    } }));
    return element("label", {}, name.replace("_", " ") + " ", ...inputs);
  }

  filter(name, fits) {
    if (fits) this.filters[name] = fits;
    else delete this.filters[name];
    this.show();
  }

  show(limit = PAGE) {
    const all = Object.values(this.filters);
    const found = this.rows.filter((row) => all.every((fits) => fits(row)) && this.hasText(row));
    this.count.textContent = `${found.length} of the ${this.rows.length} samples here; the runs wrote ${this.seen}.`;
    const head = ["run", "step", "kind", "domain", "reward", "tokens", "status", "prompt", "response"];
    const rows = found.slice(0, limit).map((row) => this.line(row));
    const more = element("button", { click: () => this.show(limit + PAGE) }, `${PAGE} more`);
    this.list.replaceChildren(element("table", {}, element("tr", {}, ...head.map((name) => element("th", {}, name))), ...rows),
      ...(found.length > limit ? [more] : []));
  }

  hasText(row) {
    if (!this.text) return true;
    row[SEARCHED] ??= [row.prompt, row.response, row.ground_truth, row.reason].join("\n").toLowerCase();
    return row[SEARCHED].includes(this.text);
  }

  line(row) {
    const short = (text) => element("td", { class: "cut" }, String(text ?? "").slice(0, 200));
    const values = [row.run, row.step, row.kind, row.domain, row.reward, row.response_tokens, row.status];
    const cells = values.map((value) => element("td", {}, figure(value)));
    return element("tr", { class: "choosable", click: () => { this.row = row; this.showChosen(); } }, ...cells, short(row.prompt), short(row.response));
  }

  showChosen(limit = SIDE_BY_SIDE) {
    if (!this.row) return;
    const others = this.rows.filter((row) => row.prompt === this.row.prompt && row !== this.row);
    const cards = [this.row, ...others].slice(0, limit).map((row) => this.card(row));
    const left = others.length + 1 - cards.length;
    this.chosen.replaceChildren(
      element("h3", {}, `Prompt, with its ${others.length + 1} samples that are here`),
      element("div", { class: "text" }, String(this.row.prompt ?? "")),
      element("p", { class: "quiet" }, `ground truth: ${this.row.ground_truth ?? "not written"}`),
      element("div", { class: "samples" }, ...cards),
      ...(left > 0 ? [element("button", { click: () => this.showChosen(limit + SIDE_BY_SIDE) }, `${left} more`)] : []));
  }

  card(row) {
    const parts = Object.entries(row.parts || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const title = `${row.run}, step ${row.step}, ${row.kind} ${row.sample_id}`;
    const said = [`reward ${figure(row.reward)}`, row.status, `${row.response_tokens} tokens`, Array.isArray(row.policy_versions) && `versions ${row.policy_versions.join(" to ")}`, parts, row.why];
    return element("div", { class: "sample" }, element("strong", {}, title),
      element("p", { class: "quiet" }, said.filter((each) => each).join(", ")),
      element("p", { class: "quiet" }, `verdict: ${[row.verdict, row.reason].filter((each) => each).join(", ")}`), ...this.response(row));
  }

  response(row) {
    const tokens = row.tokens;
    if (!tokens || !Array.isArray(tokens.text)) {
      const note = this.colour ? [element("p", { class: "quiet" }, "The run wrote no values of this sample's tokens.")] : [];
      return [...note, element("div", { class: "text" }, String(row.response ?? ""))];
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
  const browser = new SampleBrowser(data.runs);
  if (!browser.seen) return;
  section("Samples", ...browser.content());
  browser.show();
  const rows = data.runs.flatMap((run) => Object.entries(run.samples.counts).flatMap(([what, counts]) =>
    counts.map(([value, count]) => [run.name, what, value, count, figure(count / run.samples.seen)])));
  section("Counts over all samples", element("p", { class: "quiet" }, "The thirty commonest of each; in reasons, numbers and quotations are left out."),
    table(["run", "what", "value", "samples", "share"], rows));
}
