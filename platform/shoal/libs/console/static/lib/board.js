// The curves of one or several runs, as they come: one chart for each metric, drawn when it comes into sight.
import { follow, get, stored } from "./api.js";
import { Chart, average, interpolate, smooth } from "./charts.js";
import { h, say } from "./dom.js";
import { number } from "./format.js";

const POINTS = 1000;
const EPOCHS = ["train/epoch", "epoch"];

export const readCurves = (id, query) => get(`/api/runs/${encodeURIComponent(id)}/curves`, { points: POINTS, ...query });

/** `runs`: [{id, created_at, label, titles, hidden, criteria and folded metrics, targets, group, incarnation, early: their curves, on their way}]. */
export class Board {
  constructor(runs, { onstatus = () => {} } = {}) {
    this.runs = runs.map((run, index) => ({ ...run, index, curves: new Map() }));
    this.onstatus = onstatus;
    this.charts = new Map();
    this.range = null;
    this.dirty = new Set();
    const redraw = () => this.drawAll();
    this.words = h("input", { type: "search", placeholder: "Metrics", "aria-label": "Metrics with these words", oninput: () => this.filter() });
    this.smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: redraw });
    this.logarithmic = h("input", { type: "checkbox", onchange: redraw });
    this.axis = h("select", { onchange: () => this.zoom(null, null) }, ["step", "time"].map((each) => h("option", { value: each }, each)), this.epoch = h("option", { value: "epoch", disabled: true }, "epoch"));
    this.together = h("input", { type: "checkbox", onchange: redraw });
    this.whole = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null, null) }, "Show all");
    this.grid = h("div", { class: "grid" });
    this.rest = h("div", { class: "grid" });
    this.folded = h("details", { hidden: true }, h("summary", {}, "Rates, waits and counts"), this.rest);
    this.none = h("p", { class: "muted" }, "No metric has a curve yet.");
    this.element = h("div", {},
      h("div", { class: "row" }, this.words, h("label", {}, "smoothing ", this.smoothing), h("label", {}, this.logarithmic, " logarithmic"),
        h("label", {}, "x: ", this.axis), runs.length > 1 ? h("label", {}, this.together, " mean and spread") : null, this.whole),
      this.none, this.grid, this.folded);
    this.sight = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        target.chart.isVisible = isIntersecting;
        if (isIntersecting) this.mark(target.chart.name);
      }
    }, { rootMargin: "200px" });
    this.themed = new MutationObserver(redraw);
    this.themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  /** Draws what a sample shows at once, then all of it, and follows the runs. */
  async open() {
    await Promise.all(this.runs.map(async (run) => { run.sampled = await this.load(run, { quick: 1 }); }));
    for (const run of this.runs) if (run.sampled) this.load(run).catch((error) => say(error.message));
    const ids = this.runs.map((run) => run.id);
    this.unfollow = follow({ runs: ids }, (news) => this.take(news), () => this.loadAll());
  }

  async load(run, query = {}) {
    const early = query.quick ? run.early : null, { steps } = this;
    const seen = new Map([...run.curves].map(([name, curve]) => [name, curve.steps.at(-1)]));
    const answer = await (early ?? readCurves(run.id, { ...steps, ...query }));
    if (this.isClosed || steps !== this.steps) return false; // of another part of the x axis than is shown now
    run.incarnation = answer.incarnation;
    for (const [name, curve] of Object.entries(answer.curves)) {
      const before = run.curves.get(name);
      run.curves.set(name, curve);
      if (before) extend(curve, before, seen.get(name)); // what came while this was on its way
      this.mark(name);
    }
    return answer.sampled;
  }

  loadAll() {
    return Promise.all(this.runs.map((run) => this.load(run))).catch((error) => say(error.message));
  }

  take(news) {
    for (const run of this.runs) {
      const each = news[run.id];
      if (!each) continue;
      this.onstatus(run.id, each.status);
      if (run.incarnation !== each.incarnation && each.incarnation) {
        run.curves.clear();
        this.load(run).catch((error) => say(error.message));
        continue;
      }
      for (const [name, points] of Object.entries(each.curves)) {
        if (!run.curves.has(name)) run.curves.set(name, { steps: [], times: [], values: [] });
        if (extend(run.curves.get(name), points) > 4 * POINTS && !this.range) this.load(run);
        this.mark(name);
      }
    }
  }

  mark(name) {
    if (EPOCHS.includes(name)) this.epoch.disabled = false;
    if (this.runs.some((run) => run.hidden.some((prefix) => name.startsWith(prefix)))) return;
    if (!this.charts.has(name)) this.add(name);
    if (!this.dirty.size) requestAnimationFrame(() => {
      const names = [...this.dirty];
      this.dirty.clear();
      if (!this.isClosed) names.forEach((each) => this.draw(each));
    });
    this.dirty.add(name);
  }

  drawAll() {
    for (const name of this.charts.keys()) this.mark(name);
  }

  add(name) {
    const [{ titles, folded, criteria, targets }] = this.runs, begins = (prefix) => name.startsWith(prefix);
    const title = [name, titles[name], name in targets ? `target ${number(targets[name])}` : null].filter(Boolean).join(" · ");
    const chart = new Chart(title, { onzoom: (first, last) => this.zoom(first, last) });
    const isFolded = folded.some(begins), grid = isFolded ? this.rest : this.grid, place = criteria.findIndex(begins);
    Object.assign(chart, { name, order: place < 0 ? criteria.length : place });
    const isLater = ({ chart: each }) => each.order > chart.order || (each.order === chart.order && each.name > name);
    if (isFolded) this.folded.hidden = false;
    this.none.hidden = true;
    chart.element.chart = chart;
    chart.isVisible = Boolean(stored); // a report may be printed
    this.charts.set(name, chart);
    grid.insertBefore(chart.element, [...grid.children].find(isLater) ?? null);
    this.sight.observe(chart.element);
    this.filter();
  }

  filter() {
    const words = this.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [name, { element }] of this.charts) element.hidden = !words.every((word) => name.toLowerCase().includes(word));
    if (words.length) this.folded.open = true;
  }

  draw(name) {
    const chart = this.charts.get(name);
    if (!chart?.isVisible) return;
    chart.logarithmic = this.logarithmic.checked;
    const lines = this.runs.filter((run) => run.curves.has(name)).map((run) => this.place(run, run.curves.get(name)));
    const target = this.runs[0].targets[name], xs = lines.flatMap((line) => [line.xs[0], line.xs.at(-1)]).filter((x) => x !== undefined);
    const limit = target === undefined || !xs.length ? [] : [{ label: "target", tone: "target", xs: [Math.min(...xs), Math.max(...xs)], ys: [target, target] }];
    chart.draw([...(this.together.checked ? this.join(lines) : lines), ...limit]);
  }

  place({ id, label, index, group, created_at: begun, curves }, { steps, times, values }) {
    const epochs = curves.get(EPOCHS.find((each) => curves.has(each)));
    const xs = this.axis.value === "step" ? steps : this.axis.value === "time" ? times.map((time) => time - begun)
      : interpolate(epochs?.steps ?? [], epochs?.values ?? [], steps);
    const isLogarithmic = this.logarithmic.checked;
    const ys = smooth(values, Number(this.smoothing.value)).map((y) => (isLogarithmic && y <= 0 ? null : y));
    const known = xs.map((x, place) => place).filter((place) => xs[place] !== null);
    if (this.axis.value === "time") known.sort((a, b) => xs[a] - xs[b]);
    const pick = (column) => (this.axis.value === "step" ? column : known.map((place) => column[place]));
    return { label: label ?? id, index, group, xs: pick(xs), ys: pick(ys), steps: pick(steps) };
  }

  join(lines) {
    const groups = Map.groupBy(lines, (line) => line.group);
    return [...groups.values()].map((each) => (each.length < 2 ? each[0]
      : { label: `mean of ${each.length}: ${each[0].label} …`, index: each[0].index, ...average(each) }));
  }

  /** Shows a part of the x axis in all charts, with the points that are in it. */
  zoom(first, last) {
    if (this.range?.[0] === first && this.range?.[1] === last) return;
    this.range = first === null ? null : [first, last];
    this.whole.hidden = first === null;
    for (const chart of this.charts.values()) chart.zoom(this.range);
    this.steps = first === null ? {} : this.findSteps(first, last);
    this.loadAll();
    this.drawAll();
  }

  findSteps(first, last) {
    if (this.axis.value === "step") return { first, last };
    const steps = [];
    for (const run of this.runs) for (const curve of run.curves.values()) {
      const { xs, steps: own } = this.place(run, curve);
      const inside = own.map((_, place) => place).filter((place) => xs[place] >= first && xs[place] <= last);
      if (inside.length) steps.push(own[Math.max(0, inside[0] - 1)], own[Math.min(own.length - 1, inside.at(-1) + 1)]);
    }
    return steps.length ? { first: Math.min(...steps), last: Math.max(...steps) } : {};
  }

  close() {
    this.isClosed = true;
    this.unfollow?.();
    this.sight.disconnect();
    this.themed.disconnect();
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Adds the points that are later than a curve's last, and than those that were `seen` before; how many it has then. */
function extend(curve, { steps, times, values }, seen = -Infinity) {
  const last = Math.max(curve.steps.at(-1) ?? -Infinity, seen);
  steps.forEach((step, place) => {
    if (step <= last) return;
    curve.steps.push(step);
    curve.times.push(times[place]);
    curve.values.push(values[place]);
  });
  return curve.steps.length;
}
