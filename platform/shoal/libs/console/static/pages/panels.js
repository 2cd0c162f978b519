// The panels of a run, as the server makes them: lines, counts, a table, pictures, commands.
import { get, send } from "../lib/api.js";
import { changing } from "../lib/ask.js";
import { Chart } from "../lib/charts.js";
import { facts, h, runLink, state } from "../lib/dom.js";
import { poll } from "../lib/poll.js";
import { Table } from "../lib/table.js";
import { POLL_MS } from "./run_record.js";

const say = (cell) => (Array.isArray(cell) ? cell[0] : cell);
const read = (cell) => { const value = Number(say(cell).replace(/,/g, "").replace(/%$/, "")); return Number.isNaN(value) ? say(cell) : value; };

/** A table that a click on a heading sorts. */
function tabulate({ title, header, rows }) {
  const isNumber = header.map((_, index) => rows.every((row) => typeof read(row[index] ?? "-") === "number" || say(row[index] ?? "-") === "-"));
  const draw = ([text, tone]) => (tone === "run" ? runLink(text) : state(text, tone));
  const cell = (index) => (row) => (Array.isArray(row[index]) ? draw(row[index]) : row[index] ?? "");
  const shown = new Table(header.map((name, index) => ({ name, number: isNumber[index], value: (row) => read(row[index] ?? ""), cell: cell(index) })), { label: title });
  shown.show(rows);
  return shown;
}

/** Bars of counts: [[name, value, text, tone]]. */
function bars(counts) {
  const most = Math.max(...counts.map(([, value]) => value), 1e-12);
  return h("div", { class: "bars" }, counts.map(([name, value, text, tone]) => {
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * Math.max(0, value)) / most}%`;
    return [h("span", {}, name), h("span", { class: "track" }, bar), h("span", { class: `number ${tone && `state ${tone}`}` }, text)];
  }));
}

/** Lines over one axis; grey for one of many. */
function draw(panel) {
  const chart = new Chart(panel.x, { logarithmic: panel.scale.includes("y"), scale: panel.scale });
  const lines = panel.lines.map(([label, xs, ys, tone], index) => ({ label, xs, ys, index: tone === "busy" ? 0 : index + 1, tone }));
  requestAnimationFrame(() => chart.draw(lines)); // once it has a width
  return chart;
}

class PanelView {
  constructor(panel) {
    this.text = JSON.stringify(panel);
    this.rest = JSON.stringify({ ...panel, rows: [] });
    this.chart = panel.lines.length ? draw(panel) : null;
    this.table = panel.header.length && panel.rows.length ? tabulate(panel) : null;
    const isWide = panel.rows.length > 8 || panel.header.length > 3 || panel.lines.length > 2;
    this.element = h("section", { class: `panel ${isWide ? "wide" : ""}` }, h("h2", {}, panel.title),
      panel.note ? h("p", { class: "muted" }, panel.note) : null, panel.about ? h("p", { class: "about" }, panel.about) : null, this.chart?.element, panel.counts.length ? bars(panel.counts) : null,
      panel.pictures.map(([name, url]) => h("figure", {}, h("img", { class: "figure", src: url, alt: `${panel.title} ${name}` }), h("figcaption", {}, name))),
      this.table?.element ?? facts(panel.rows), panel.commands.length ? h("pre", {}, panel.commands.join("\n")) : null);
  }

  /** Takes a later state of the panel where only its rows are others: where one has scrolled to stays. */
  take(panel) {
    const text = JSON.stringify(panel);
    if (text === this.text) return true;
    if (!this.table || JSON.stringify({ ...panel, rows: [] }) !== this.rest) return false;
    this.text = text;
    this.table.show(panel.rows);
    return true;
  }
}

export async function openPanels(place, run, path) {
  let views = new Map(), accused = "";
  const shown = h("div", { class: "grid" }), quarantine = h("div");
  place.replaceChildren(quarantine, shown);
  const release = (actor) => changing(`Release ${actor}`, () => `Release ${actor}?`, "Release", async () => {
    await send("POST", `${path}/release`, { actor });
    return `${actor} is released`;
  });
  const end = await poll(async () => {
    const { panels, quarantined = {}, without_credit: without = [] } = await get(`${path}/panels`);
    const before = views;
    views = new Map(panels.map((panel) => [panel.title, before.get(panel.title)?.take(panel) ? before.get(panel.title) : new PanelView(panel)]));
    for (const [title, view] of before) if (views.get(title) !== view) view.chart?.close();
    const elements = [...views.values()].map((view) => view.element); // one that is as before stays as it is
    if (elements.length !== shown.children.length || elements.some((each, place) => shown.children[place] !== each)) shown.replaceChildren(...elements);
    const now = JSON.stringify([quarantined, without]);
    if (now !== accused) quarantine.replaceChildren(
      ...Object.entries(quarantined).map(([actor, reason]) => h("p", {}, h("strong", {}, actor), ` is in quarantine, so nothing is learnt from what it sends: it ${reason} `, release(actor))),
      ...(without.length ? [h("p", { class: "state warn" }, `These actors wait until the learner has caught up (they have no credit to send more): ${without.join(", ")}`)] : []));
    accused = now; // a button that one is about to press stays
  }, 2 * POLL_MS);
  return () => { end(); for (const { chart } of views.values()) chart?.close(); };
}
