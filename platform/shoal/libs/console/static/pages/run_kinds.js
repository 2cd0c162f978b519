// What runs of one kind have: actors and their queue, the parts of a training step, the results of a library.
import { get, send } from "../lib/api.js";
import { changing } from "../lib/ask.js";
import { Chart } from "../lib/charts.js";
import { facts, h } from "../lib/dom.js";
import { bytes, duration, moment, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { POLL_MS, table } from "./run_record.js";

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const tone = (lag) => (lag <= 2 ? "good" : lag <= 10 ? "warn" : "bad");

/** Bars of shares or counts: [[name, value, text]]. */
function bars(rows, most = Math.max(...rows.map(([, value]) => value), 1e-12)) {
  return h("div", { class: "bars" }, rows.map(([name, value, text]) => {
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * Math.max(0, value)) / most}%`;
    return [h("span", {}, name), h("span", { class: "track" }, bar), h("span", { class: "number" }, text ?? number(value))];
  }));
}

export async function openLoop(place, run, path) {
  const shown = h("div", { class: "grid" }), quarantine = h("section", { class: "panel spaced" }), versions = new Chart("weight versions, by seconds");
  place.replaceChildren(shown, quarantine, versions.element);
  let drawn;
  const release = (actor) => changing(`Release ${actor}`, () => `Release ${actor}?`, "Release", async () => {
    await send("POST", `${path}/release`, { actor });
    return `${actor} is released`;
  });
  const end = await poll(async () => {
    const loop = await get(`${path}/loop`), { queue } = loop, accused = Object.entries(loop.quarantined);
    const lags = Object.entries(loop.actor_lag).sort(), drops = Object.entries(loop.drops).filter(([, count]) => count);
    const rejected = Object.entries(loop.rejected);
    shown.replaceChildren(
      h("section", { class: "panel" }, h("h2", {}, `${number(loop.connected)} actors`),
        lags.length ? bars(lags.map(([name, lag]) => [name, lag, h("span", { class: `state ${tone(lag)}` }, `${number(lag)} behind`)]), Math.max(10, ...lags.map(([, lag]) => lag)))
          : h("p", {}, "None has joined.")),
      h("section", { class: "panel" }, h("h2", {}, "Queue"),
        "capacity" in queue ? bars([["segments", queue.depth], ["credit given", queue.credit]].map(([name, value]) => [name, value, `${number(value)} of ${number(queue.capacity)}`]), queue.capacity)
          : facts([["segments", number(queue.depth)]]),
        loop.shortage ? h("p", { class: "state warn" }, `Without credit: ${loop.shortage.actors?.join(", ")}`) : null,
        h("h3", {}, "Segments"), bars(["received", "consumed", "dropped"].map((name) => [name, loop.segments[name] ?? 0]))),
      h("section", { class: "panel" }, h("h2", {}, "Drops, by reason"), drops.length ? bars(drops) : h("p", {}, "None."),
        rejected.length ? [h("h3", {}, "Rejected, by actor and reason"), bars(rejected)] : null));
    const now = JSON.stringify(accused);
    if (now !== drawn) quarantine.replaceChildren(h("h2", {}, "Quarantine"), ...(accused.length
      ? accused.map(([actor, reason]) => h("p", {}, h("strong", {}, actor), ` ${reason} `, release(actor))) : [h("p", {}, "No actor is in quarantine.")]));
    drawn = now; // a button that one is about to press stays
    const xs = loop.versions.map(([, , time]) => time);
    if (xs.length) versions.draw([{ label: "version", xs, ys: loop.versions.map(([version]) => version) }]);
  }, POLL_MS);
  return () => { end(); versions.close(); };
}

const UNITS = { bytes, seconds: (s) => (s === null ? "–" : `${number(1000 * s)} ms`), share: percent, count: number, operations: number };

export async function openTraining(place, run, path) {
  return poll(async () => {
    const { costs, step_s: stepS, shares, began, checkpoints } = await get(`${path}/training`);
    const waits = Object.entries(shares), computing = 1 - waits.reduce((sum, [, value]) => sum + value, 0);
    const cell = (row, word) => (row[word] === null ? "–" : UNITS[row.unit](row[word]));
    place.replaceChildren(h("div", { class: "grid" },
      h("section", { class: "panel" }, h("h2", {}, "A step"),
        facts([["takes", stepS === null ? null : `${number(1000 * stepS)} ms`], ["workers", began?.workers], ["plan", began?.plan]]),
        waits.length ? bars([["computing", computing, percent(computing)], ...waits.map(([name, value]) => [`waits for ${name}`, value, percent(value)])], 1) : h("p", {}, "Its parts have not been reported.")),
      h("section", { class: "panel" }, h("h2", {}, "Checkpoints"),
        checkpoints.length ? table(["step", "written", "size"], checkpoints.map((each) => [number(each.step), moment(each.time), bytes(each.size_bytes)])) : h("p", {}, "None on this host."))),
    h("h2", {}, "Cost and memory"),
    costs.length ? table(["quantity", "measured", "predicted"], costs.map((row) => [row.meaning, cell(row, "measured"), cell(row, "predicted")])) : h("p", {}, "Not measured."));
  }, 5 * POLL_MS);
}

export async function openSections(place, run, path) {
  place.replaceChildren(h("p", { class: "muted", role: "status" }, "Drawing …"));
  const sections = await get(`${path}/sections`);
  place.replaceChildren(h("div", {}, sections.length ? sections.map((each) => h("section", {}, h("h2", {}, each.title), h("p", { class: "muted" }, each.note),
    each.figures.map((figure) => h("img", { class: "figure", src: `data:image/svg+xml;base64,${figure}`, alt: `${each.title}. ${each.note}` })),
    each.rows.length ? table(each.header, each.rows) : null,
    each.commands.map((command) => h("pre", { class: "panel" }, command)))) : h("p", {}, `There are none yet, ${duration(run.duration_s)} after the start.`)));
}
