// Several runs over each other.
import { get } from "../lib/api.js";
import { Board } from "../lib/board.js";
import { h, runLink, state, took } from "../lib/dom.js";
import { number } from "../lib/format.js";
import { differences, table } from "./run_record.js";

const withoutSeed = (run) => JSON.stringify(Object.entries(run.fields).filter(([path]) => !/(^|\.)seed$/.test(path)));

export async function open(main, ids) {
  if (!ids.length) throw new Error("Choose runs in the list of runs first.");
  const runs = await Promise.all(ids.map((id) => get(`/api/runs/${encodeURIComponent(id)}`)));
  const statuses = new Map(runs.map((run) => [run.id, h("span", {}, state(run.status))]));
  const label = ({ id, name }) => (runs.filter((each) => each.name === name).length < 2 ? name : `${name} ${id}`);
  const board = new Board(runs.map((run) => ({ ...run, label: label(run), group: withoutSeed(run) })), {
    onstatus: (id, word) => statuses.get(id)?.replaceChildren(state(word)),
  });
  const rows = runs.map((run) => [runLink(run.id), run.name, statuses.get(run.id),
    run.best ? `${run.best.name} ${number(run.best.value)}` : "–", took(run)]);
  main.replaceChildren(h("h1", {}, `${runs.length} runs over each other`), table(["run", "name", "status", "best", "took"], rows),
    h("h2", {}, "Curves"), board.element, h("h2", {}, "In what their specs differ"), differences(runs));
  await board.open();
  return () => board.close();
}
