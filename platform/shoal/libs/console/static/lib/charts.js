// Curves, drawn by uPlot: several runs over each other, zoomed by dragging, which stays when points arrive.
import { h } from "./dom.js";
import { number } from "./format.js";

// Okabe and Ito's colours, which people with any colour vision tell apart, a dash for each further eight.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7b00", "#6b6b6b"];
export const colour = (index) => COLOURS[index % COLOURS.length];
const dash = (index) => (index < COLOURS.length ? undefined : [4 + 2 * Math.floor(index / COLOURS.length), 3]);
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A chart of curves. `draw([{label, xs, ys}])` draws or replaces them. `onzoom(first, last)`, `null` when undone. */
export class Chart {
  constructor(title, { logarithmic = false, height = 220, onzoom = () => {} } = {}) {
    this.logarithmic = logarithmic;
    this.height = height;
    this.onzoom = onzoom;
    this.place = h("div", { role: "img", "aria-label": title });
    this.legend = h("ul", { class: "legend" });
    this.element = h("section", { class: "panel chart" }, h("h3", {}, title), this.place, this.legend);
    this.title = title;
    this.zoomed = null;
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: this.height }));
    this.resized.observe(this.place);
  }

  draw(curves) {
    const key = curves.map((curve) => curve.label).join("\n") + this.logarithmic;
    const data = curves.length === 1 ? [curves[0].xs, curves[0].ys] : uPlot.join(curves.map((c) => [c.xs, c.ys]));
    this.legend.replaceChildren(...curves.map((curve, index) => {
      const mark = h("span", { "aria-hidden": "true" }, "■ ");
      mark.style.color = colour(index);
      return h("li", {}, mark, `${curve.label}: ${number(curve.ys.findLast((y) => y !== null) ?? null)}`);
    }));
    this.place.setAttribute("aria-label", `${this.title}. ${this.legend.textContent}`);
    if (key !== this.key) {
      this.plot?.destroy();
      this.key = key;
      this.plot = new uPlot(this.options(curves), data, this.place);
    } else {
      this.plot.setData(data, this.zoomed === null);
      if (this.zoomed) this.plot.setScale("x", { min: this.zoomed[0], max: this.zoomed[1] });
    }
  }

  options(curves) {
    const axis = { stroke: ink("--muted"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { show: false } };
    return {
      width: this.place.clientWidth || 400, height: this.height, legend: { show: false },
      scales: { x: { time: false }, y: { distr: this.logarithmic ? 3 : 1 } },
      axes: [axis, { ...axis, size: 60, values: (_, values) => values.map((each) => (each === null ? "" : number(each))) }],
      cursor: { drag: { x: true, y: false }, sync: { key: "curves" } },
      series: [{}, ...curves.map((curve, index) => (
        { label: curve.label, stroke: colour(index), dash: dash(index), width: 1.5, spanGaps: true, points: { show: curve.xs.length < 3 } }))],
      hooks: {
        setSelect: [(plot) => {
          if (!plot.select.width) return;
          const [first, last] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          this.zoomed = [first, last];
          this.onzoom(first, last);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => { this.zoomed = null; this.onzoom(null, null); })],
      },
    };
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
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
