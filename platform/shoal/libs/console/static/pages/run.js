// One run, as it goes: what it is, and one of its parts.
import { get, send, stored } from "../lib/api.js";
import { complain } from "../lib/ask.js";
import { Board, readCurves } from "../lib/board.js";
import { facts, h, say, state, took } from "../lib/dom.js";
import { moment, number } from "../lib/format.js";
import { openFilms } from "./films.js";
import { openPanels } from "./panels.js";
import { openEvents, openLog, openSpec } from "./run_record.js";

const PARTS = {
  curves: ["Curves", openCurves], panels: ["Panels", openPanels], films: ["Films and predictions", openFilms],
  events: ["Events", openEvents], log: ["Output", openLog], spec: ["Spec", openSpec],
};
const STORED = ["curves", "panels", "events", "spec"]; // one after another in a report
const LISTENS = { gateway: "for actors", inference: "for requests", grpc: "for requests by gRPC" };

export async function open(main, [id, part]) {
  const path = `/api/runs/${encodeURIComponent(id)}`;
  const early = !part || part === "curves" ? readCurves(id, { quick: 1 }) : null; // while the run itself is read
  early?.catch(() => {}); // the run's own error is shown
  const run = await get(path);
  const status = h("span", {}, state(run.status)), place = h("div");
  const opensFirst = (names) => [run.opens_on, ...names.filter((name) => name !== run.opens_on)];
  const names = opensFirst(Object.keys(PARTS).filter((name) => name !== "films" || ["loop", "training"].includes(run.kind)));
  const chosen = names.includes(part) ? part : run.opens_on;
  const command = run.commands.at(-1);
  const link = (name) => h("a", { href: `#/run/${encodeURIComponent(run.id)}/${name}`, "aria-current": name === chosen ? "page" : null }, PARTS[name][0]);
  main.replaceChildren(
    h("h1", {}, run.name, " ", status), h("p", { class: "muted" }, run.id, run.queue ? `, waits: place ${run.queue.position}` : ""),
    h("div", { class: "panel" }, facts([
      ["command", h("code", {}, command)], ["first started by", command === run.command ? null : h("code", {}, run.command)], ["started", `${moment(run.created_at)}${run.owner ? ` by ${run.owner}` : ""}`],
      ["took", took(run)], ["host", run.copied_from ? `${run.copied_from}, from the store` : run.host],
      ["target", Object.entries(run.targets).map(([name, value]) => `${name} ${number(value)}`).join(", ")],
      ["best", run.best && `${run.best.name} ${number(run.best.value)}`],
      ["commit", run.git_revision && run.git_revision.slice(0, 12) + (run.git_dirty ? ", changed" : "")],
      ["models", run.models.length ? run.models.map((m) => h("div", {}, stored ? `${m.name}@${m.version}` : h("a", { href: `#/models/${encodeURIComponent(m.name)}/${m.version}` }, `${m.name}@${m.version}`), ` ${m.aliases.join(" ")}`)) : null],
      ["endpoints", run.endpoints.length ? run.endpoints.map((e) => h("div", {}, `${LISTENS[e.kind] ?? e.name}: ${e.address} ${e.state}`)) : null],
      ["files", run.copied_from ? null : h("code", {}, run.folder)], ["error", run.error],
      ["written", stored && `${moment(run.read_at)}${run.status === "running" ? ", while the run goes on" : ""}`],
      ["last sign of life", run.status === "lost" ? `${moment(run.heartbeat_at)}: up to then everything is here, and the run can be resumed` : null],
    ]), stored ? null : writeNote(path, run)),
    ...(stored ? [] : [h("nav", { class: "parts", "aria-label": "Parts of the run" }, names.map(link))]), place,
  );
  if (stored) {
    document.title = `${run.name} · ${run.id}`;
    for (const name of opensFirst(STORED)) {
      const part = h("div");
      place.append(h("h2", {}, PARTS[name][0]), part);
      await PARTS[name][1](part, run, path, () => {});
    }
    return () => {};
  }
  const onstatus = (word) => { run.status = word; status.replaceChildren(state(word)); };
  return PARTS[chosen][1](place, { ...run, early }, path, onstatus);
}

function writeNote(path, run) {
  const note = h("textarea", { rows: 2, "aria-label": "Note", placeholder: "Note" });
  const tags = h("input", { "aria-label": "Tags, with commas between them", placeholder: "tags, with commas", value: run.note.tags.join(", ") });
  note.value = run.note.note;
  const write = async (changes) => {
    try { await send("PATCH", path, changes); say("Written"); } catch (error) { complain(error); }
  };
  note.addEventListener("change", () => write({ note: note.value }));
  tags.addEventListener("change", () => write({ tags: tags.value.split(",").map((each) => each.trim()).filter(Boolean) }));
  return h("div", { class: "row note" }, note, tags);
}

async function openCurves(place, run, path, onstatus) {
  const board = new Board([{ ...run, label: "" }], { onstatus: (_, word) => onstatus(word) });
  place.replaceChildren(h("h2", { class: "unseen" }, "Curves"), board.element);
  await board.open();
  return () => board.close();
}
