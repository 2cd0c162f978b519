// Curves, drawn by uPlot: several over each other, zoomed by dragging, which stays when points arrive.
import { h } from "./dom.js";
import { number } from "./format.js";

// Okabe and Ito's colours, which people with any colour vision tell apart, a dash for each further eight.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7b00", "#6b6b6b"];
const ON_DARK = ["#4fb0ee", "#e69f00", "#1fc99a", "#ff8a3d", "#e39ac4", "#a5dcff", "#d9c84a", "#b0b0b0"];
export const colour = (index) => (document.documentElement.dataset.theme === "dark" ? ON_DARK : COLOURS)[index % COLOURS.length];
const dash = (index) => (index < COLOURS.length ? undefined : [4 + 2 * Math.floor(index / COLOURS.length), 3]);
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const UNNAMED = ["muted", "target"]; // tones of lines that the legend leaves out: one of many, and where a run ends
const newest = (ys) => ys.findLast((y) => y !== null && y !== undefined) ?? null;

/** A chart of curves. `draw([{label, xs, ys}])` draws or replaces them; `index` of a colour, `low` and `high` of a
 * band may be with each. `onzoom(first, last)`, `null` when undone. */
export class Chart {
  constructor(title, { logarithmic = false, scale = "", height = 220, onzoom = () => {} } = {}) {
    Object.assign(this, { title, logarithmic, scale, height, onzoom, zoomed: null });
    this.place = h("div", { role: "img", "aria-label": title, tabindex: 0, onkeydown: (event) => this.press(event) });
    this.legend = h("ul", { class: "legend" });
    this.element = h("section", { class: "panel chart" }, h("h3", {}, title), this.place, this.legend);
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: this.height }));
    this.resized.observe(this.place);
  }

  draw(curves) {
    const theme = document.documentElement.dataset.theme;
    const key = JSON.stringify([theme, this.logarithmic, curves.map((each) => [each.label, each.index, Boolean(each.low)])]);
    const columns = curves.flatMap(({ xs, ys, low, high }) => (low ? [[xs, ys], [xs, low], [xs, high]] : [[xs, ys]]));
    const data = columns.length === 1 ? columns[0] : uPlot.join(columns);
    this.curves = curves;
    if (key !== this.key) {
      this.plot?.destroy();
      this.key = key;
      this.values = curves.map(() => document.createTextNode(""));
      this.legend.replaceChildren(...curves.flatMap((each, place) => {
        const mark = h("span", { "aria-hidden": "true" }, "■ ");
        mark.style.color = colour(each.index ?? place);
        return UNNAMED.includes(each.tone) ? [] : h("li", {}, mark, `${each.label} `, this.values[place]);
      }));
      this.plot = new uPlot(this.options(curves), data, this.place);
    } else this.plot.setData(data, this.zoomed === null);
    if (this.zoomed) this.plot.setScale("x", { min: this.zoomed[0], max: this.zoomed[1] });
    this.read(null);
    this.place.setAttribute("aria-label", `${this.title}. ${this.legend.textContent}`);
  }

  /** Writes the values at a place of the pointer, or the newest, into the legend. */
  read(index) {
    let column = 1;
    this.curves.forEach((each, place) => {
      const value = index === null ? newest(each.ys) : this.plot.data[column][index];
      this.values[place].data = number(value);
      column += each.low ? 3 : 1;
    });
  }

  /** Shows a part of the x axis; `null`: all of it. */
  zoom(range) {
    this.zoomed = range;
    if (range && this.plot) this.plot.setScale("x", { min: range[0], max: range[1] });
  }

  /** By keyboard: + and - zoom, arrows move, Escape shows all. */
  press(event) {
    const { min, max } = this.plot?.scales.x ?? {}, quarter = (max - min) / 4;
    const range = { "+": [min + quarter, max - quarter], "-": [min - quarter, max + quarter], ArrowLeft: [min - quarter, max - quarter],
      ArrowRight: [min + quarter, max + quarter], Escape: null }[event.key];
    if (range === undefined || !(quarter > 0)) return;
    event.preventDefault();
    this.zoom(range);
    this.onzoom(...(range ?? [null, null]));
  }

  options(curves) {
    const axis = { stroke: ink("--muted"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { show: false } };
    const series = [{}], bands = [];
    curves.forEach((each, place) => {
      const index = each.index ?? place;
      series.push({
        label: each.label, stroke: { muted: ink("--rule"), target: ink("--muted") }[each.tone] ?? colour(index), spanGaps: true,
        dash: { muted: [], target: [6, 4] }[each.tone] ?? dash(index), width: each.tone === "points" ? 0 : 1.5,
        points: { show: each.tone === "points" || (each.tone !== "target" && each.xs.length < 3) },
      });
      if (!each.low) return;
      const edge = { stroke: "transparent", spanGaps: true, points: { show: false } };
      bands.push({ series: [series.length + 1, series.length], fill: `${colour(index)}33` });
      series.push(edge, edge);
    });
    return {
      width: this.place.clientWidth || 400, height: this.height, legend: { show: false }, series, bands,
      scales: { x: { time: false, distr: this.scale.includes("x") ? 3 : 1 }, y: this.logarithmic ? { distr: 3 } : { range: (_, least, most) => findRange(least, most) } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 60, values: (_, values) => values.map((each) => (each === null ? "" : number(each))) }],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "curves", setSeries: false, scales: ["x", null] } },
      hooks: {
        setCursor: [(plot) => { if (this.plot === plot) this.read(plot.cursor.idx ?? null); }],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (!width) return;
          const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.zoom(range);
          this.onzoom(...range);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => { this.zoom(null); this.onzoom(null, null); })],
      },
    };
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

/** The part of the axis for values. Of zeros alone it is from -1 to 1: from 0 to 100 it would promise others. */
export function findRange(least, most) {
  if (least === null) return [null, null];
  return least === 0 && most === 0 ? [-1, 1] : uPlot.rangeNum(least, most, 0.1, true);
}

/** Exponentially weighted means, without the bias of the beginning; `weight` of the past in [0, 1). */
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    count = weight * count + (1 - weight);
    return sum / count;
  });
}

/** The values of a curve at other places, between its points; null outside. All places grow. */
export function interpolate(xs, ys, places) {
  let after = 0;
  return places.map((x) => {
    while (after < xs.length && xs[after] < x) after += 1;
    if (after === xs.length) return null;
    if (xs[after] === x) return ys[after];
    if (!after || ys[after] === null || ys[after - 1] === null) return null;
    return ys[after - 1] + (ys[after] - ys[after - 1]) * (x - xs[after - 1]) / (xs[after] - xs[after - 1]);
  });
}

/** The mean of several curves at each place that any of them has, and one standard deviation to both sides. */
export function average(curves) {
  const xs = [...new Set(curves.flatMap((each) => each.xs))].sort((a, b) => a - b);
  const rows = curves.map((each) => interpolate(each.xs, each.ys, xs));
  const ys = [], low = [], high = [];
  xs.forEach((_, place) => {
    const values = rows.map((row) => row[place]).filter((value) => value !== null);
    const mean = values.length ? values.reduce((a, b) => a + b) / values.length : null;
    const spread = values.length ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length) : null;
    ys.push(mean);
    low.push(mean === null ? null : mean - spread);
    high.push(mean === null ? null : mean + spread);
  });
  return { xs, ys, low, high };
}
