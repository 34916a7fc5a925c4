"use strict";
// The samples that the page contains, and their search.

const PAGE = 100;
const SEARCHED = Symbol("what the search looks at");

class HeldSamples {
  constructor(runs) {
    this.rows = runs.flatMap((run) => run.samples.rows.map((row) => ({ ...row, run: run.name })));
    this.seen = runs.reduce((sum, run) => sum + run.samples.seen, 0);
  }

  values(name) {
    return [...new Set(this.rows.map((row) => String(row[name] ?? "")))].sort();
  }

  async find(query, next) {
    const found = this.rows.filter((row) => this.fits(row, query)), end = (next || 0) + PAGE;
    return {
      rows: found.slice(end - PAGE, end), next: found.length > end ? end : null, nextLabel: `${PAGE} more`,
      summary:
        `${found.length} of the ${this.rows.length} samples in this page match; the runs wrote ${this.seen}.`,
    };
  }

  async ofPrompt(row, limit) {
    const others = this.rows.filter((other) => other.prompt === row.prompt && other !== row);
    return { rows: [row, ...others].slice(0, limit), total: others.length + 1 };
  }

  fits(row, query) {
    const names = Object.entries(query.names).every(([name, value]) => !value || String(row[name]) === value);
    return names && Object.entries(query.ranges).every(([name, ends]) => within(row[name], ends)) && this.hasText(row, query.text);
  }

  hasText(row, text) {
    if (!text) return true;
    row[SEARCHED] ??= [row.prompt, row.response, row.ground_truth, row.reason].join("\n").toLowerCase();
    return row[SEARCHED].includes(text);
  }
}

function within(value, [low, high]) {
  if (low === "" && high === "") return true;
  return typeof value === "number" && (low === "" || value >= low) && (high === "" || value <= high);
}
