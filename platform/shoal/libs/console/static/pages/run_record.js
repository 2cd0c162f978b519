// What the record and the folder of a run have: its events, what its processes printed, its spec.
import { get, stored } from "../lib/api.js";
import { h, say } from "../lib/dom.js";
import { duration } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { Rows } from "../lib/rows.js";

export const POLL_MS = 1000;

/** A table that stays as it is. */
export function table(heads, rows, label = heads.join(", ")) {
  const shown = new Rows(heads, label);
  shown.show(rows);
  return shown.table;
}

const show = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export async function openEvents(place, run, path) {
  const { body, table: scroll } = new Rows(["after", "event", "what"], "Events"), follow = h("input", { type: "checkbox", checked: true });
  let last = -1;
  place.replaceChildren(...(stored ? [] : [h("div", { class: "row" }, h("label", {}, follow, " follow"))]), scroll);
  return poll(async () => {
    const events = await get(`${path}/events`, { after: last });
    last = events.at(-1)?.number ?? last;
    body.append(...events.map((event) => h("tr", {}, h("td", { class: "number" }, duration(event.time - run.created_at)), h("td", {}, event.kind),
      h("td", { class: "words" }, event.message || Object.entries(event.details).map(([name, value]) => `${name} ${show(value)}`).join(", ")))));
    if (events.length && follow.checked) scroll.scrollTop = scroll.scrollHeight;
  }, POLL_MS);
}

export async function openLog(place, run, path) {
  const text = h("pre", { class: "panel log", tabindex: "0", "aria-label": "Output" });
  const follow = h("input", { type: "checkbox", checked: true });
  const choose = h("select", { "aria-label": "Process", onchange: () => { end = -1; text.replaceChildren(); step(); } });
  let end = -1;
  const step = async () => {
    const asked = choose.value;
    const answer = await get(`${path}/log`, { process: asked, after: end });
    if (choose.value !== asked) return; // another process was chosen meanwhile
    const known = [...choose.options].map((option) => option.value);
    choose.append(...answer.processes.filter((name) => !known.includes(name)).map((name) => h("option", { value: name }, name)));
    if (end < 0 && answer.begin > 0) text.append(`… the first ${answer.begin.toLocaleString("en")} bytes are in ${run.folder}\n`);
    if (end !== answer.end) text.append(answer.text);
    end = answer.end;
    if (!answer.processes.length) text.textContent = "Nothing that its processes printed is stored here.";
    if (follow.checked) text.scrollTop = text.scrollHeight;
  };
  place.replaceChildren(h("div", { class: "row" }, choose, h("label", {}, follow, " follow")), text);
  return poll(step, POLL_MS);
}

export async function openSpec(place, run) {
  const other = h("select", { "aria-label": "Another run", onchange: () => compare().catch((error) => say(error.message)) }, h("option", { value: "" }, "the difference from …"));
  const found = h("div"), text = h("pre", { class: "panel", tabindex: "0" }, run.spec);
  if (stored) return place.replaceChildren(text);
  const compare = async () => {
    if (!other.value) return found.replaceChildren();
    found.replaceChildren(differences([run, await get(`/api/runs/${encodeURIComponent(other.value)}`)]));
  };
  place.replaceChildren(h("div", { class: "row" }, other), found, text);
  const runs = await get("/api/runs", { limit: 300 });
  other.append(...runs.filter((each) => each.id !== run.id && each.job === run.job).map((each) => h("option", { value: each.id }, `${each.name} ${each.id}`)));
}

/** A table of the fields in which the specs of runs differ. */
export function differences(runs) {
  const paths = [...new Set(runs.flatMap((run) => Object.keys(run.fields)))].sort();
  const rows = paths.map((path) => [path, ...runs.map((run) => (path in run.fields ? show(run.fields[path]) : "–"))])
    .filter(([, ...values]) => new Set(values).size > 1);
  return rows.length ? table(["field", ...runs.map((run) => `${run.name} ${run.id}`)], rows) : h("p", {}, "Their specs are the same.");
}
