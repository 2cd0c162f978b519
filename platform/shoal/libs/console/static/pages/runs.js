// All runs, one row each.
import { get } from "../lib/api.js";
import { h, state } from "../lib/dom.js";
import { age, duration, number } from "../lib/format.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 3000;

export async function open(main) {
  const filter = h("input", { type: "search", placeholder: "Words, such as failed cartpole", "aria-label": "Filter", oninput: () => show() });
  const count = h("span", { class: "muted", role: "status" });
  const table = new Table([
    { name: "run", value: (run) => run.id, cell: (run) => h("a", { href: `#/run/${encodeURIComponent(run.id)}` }, run.id) },
    { name: "what", value: (run) => run.title, cell: (run) => run.title },
    { name: "status", value: (run) => run.status, cell: (run) => state(run.status) },
    { name: "best", number: true, value: (run) => run.best?.[1], cell: (run) => (run.best ? `${run.best[0]} ${number(run.best[1])}` : "") },
    { name: "age", number: true, value: (run) => -run.created_at, cell: (run) => age(run.created_at) },
    { name: "took", number: true, value: (run) => run.duration_s, cell: (run) => duration(run.duration_s) },
    { name: "host", value: (run) => run.host, cell: (run) => run.copied_from ?? run.host },
  ], { label: "Runs" });
  let runs = [];
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => `${run.id} ${run.title} ${run.status} ${run.kind} ${run.host}`.toLowerCase();
    const chosen = words.length ? runs.filter((run) => words.every((word) => text(run).includes(word))) : runs;
    count.textContent = `${chosen.length} of ${runs.length}`;
    table.show(chosen);
  };
  const refresh = async () => {
    runs = await get("/api/runs");
    show();
  };
  main.replaceChildren(h("h1", {}, "Runs"), h("div", { class: "row" }, filter, count), table.element);
  await refresh();
  const timer = setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, REFRESH_MS);
  return () => clearInterval(timer);
}
