// The clusters of this host: nodes, what waits, and who has what.
import { get } from "../lib/api.js";
import { facts, h, state } from "../lib/dom.js";
import { age, bytes, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";

const REFRESH_MS = 1000;
const TONES = { RUNNING: "busy", SUCCEEDED: "good", FAILED: "bad", STOPPED: "warn", PENDING: "warn" };
const runLink = (id) => h("a", { href: `#/run/${encodeURIComponent(id)}` }, id);
const amounts = (needs) => Object.entries(needs).filter(([, amount]) => amount).map(([name, amount]) => `${number(amount)} ${name}`).join(", ");

export async function open(main) {
  const body = h("div");
  main.replaceChildren(h("h1", {}, "Cluster"), body);
  let drawn = "";
  return poll(async () => {
    const now = await get("/api/cluster");
    const key = JSON.stringify({ ...now, read_at: 0 });
    if (key === drawn) return;
    drawn = key;
    body.replaceChildren(...[
      now.problem ? h("p", { class: "state bad" }, now.problem) : null,
      ...(now.clusters ?? []).map(drawCluster),
      now.clusters && !now.clusters.length ? h("div", { class: "panel" },
        h("p", {}, "No cluster is up on this host. ", h("code", {}, "shoal up"), " starts one that stays, and ", h("code", {}, "shoal run JOB"),
          " starts one for a run. RAY_ADDRESS names one elsewhere, before the console starts.")) : null,
      drawQueue(now.queue ?? []), drawRuns(now.runs ?? [], now.detached ?? []),
    ].filter(Boolean));
  }, REFRESH_MS);
}

function table(heads, rows, label) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((word) => h("th", { scope: "col" }, word)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}

/** A part of a whole, as a bar and in words. */
function share(part, whole, words) {
  return h("span", {}, h("meter", { min: 0, max: whole || 1, value: part ?? 0, "aria-hidden": "true" }), ` ${words}`);
}

function drawCluster(cluster) {
  if (cluster.problem) {
    return h("section", {}, h("h2", {}, cluster.address), h("p", { class: "state bad" }, `It does not answer: ${cluster.problem}`));
  }
  const runOf = new Map(cluster.reservations.filter((each) => each.run).map((each) => [each.job, each.run]));
  const held = (node, name) => cluster.reservations.filter((each) => each.node === node).reduce((sum, each) => sum + each.resources[name], 0);
  const nodes = cluster.nodes.map((node) => [
    `${node.host} ${node.address}${node.is_head ? ", head" : ""}`,
    share(held(node.id, "CPU"), node.num_cpus, `${number(held(node.id, "CPU"))} of ${number(node.num_cpus)}`),
    node.num_gpus ? share(held(node.id, "GPU"), node.num_gpus, `${number(held(node.id, "GPU"))} of ${number(node.num_gpus)}`) : "none",
    node.cpu_percent === null ? "–" : share(node.cpu_percent, 100, `${number(node.cpu_percent)} %`),
    node.memory_bytes ? share(node.memory_used_bytes, node.memory_bytes, `${bytes(node.memory_used_bytes)} of ${bytes(node.memory_bytes)}`) : "–",
    node.gpus.map((gpu) => h("div", {}, `${gpu.name}: ${gpu.percent ?? "–"} %, ${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_bytes)}`)),
  ]);
  const hosts = new Map(cluster.nodes.map((node) => [node.id, node.host]));
  const holders = cluster.reservations.filter((each) => amounts(each.resources) || each.run).map((each) => [
    each.run ? runLink(each.run) : each.job, hosts.get(each.node) ?? each.node, amounts(each.resources) || "nothing",
    Object.entries(each.processes).map(([kind, count]) => (count > 1 ? `${count} ${kind}` : kind)).join(", "),
  ]);
  const jobs = cluster.jobs.map((job) => [
    runOf.has(job.submission_id) ? runLink(runOf.get(job.submission_id)) : job.submission_id, state(job.status.toLowerCase(), TONES[job.status]),
    age(job.started_at_s), h("code", {}, job.entrypoint.split(" && exec ").at(-1)),
  ]);
  return h("section", {}, h("h2", {}, cluster.address),
    facts([["up for", age(cluster.started_at)], ["nodes", String(cluster.nodes.length)], ["CPUs", number(cluster.num_cpus)],
      ["GPUs", cluster.num_gpus ? number(cluster.num_gpus) : "none"], ["dashboard of Ray", cluster.dashboard_url]]),
    h("h3", {}, "Nodes"),
    table(["node", "CPUs reserved", "GPUs reserved", "load of the CPUs", "memory in use", "GPUs"], nodes, "Nodes"),
    h("h3", {}, "Who has what"),
    holders.length ? table(["run or job", "node", "reserved", "processes"], holders, "Who has what") : h("p", { class: "muted" }, "Nothing is reserved."),
    h("h3", {}, "Jobs"), jobs.length ? table(["job", "state", "since", "command"], jobs, "Jobs") : h("p", { class: "muted" }, "There are none."));
}

function drawQueue(queue) {
  const rows = queue.map((entry) => [entry.position, runLink(entry.run), entry.owner, entry.priority, amounts(entry.needs), age(entry.since_s), entry.reason]);
  return h("section", {}, h("h2", {}, "Queue"),
    rows.length ? table(["place", "run", "owner", "priority", "needs", "waits for", "why"], rows, "Queue") : h("p", { class: "muted" }, "No run waits."));
}

function drawRuns(runs, detached) {
  const endpoint = (each) => (each.kind === "inference" ? h("a", { href: `#/endpoints/${encodeURIComponent(each.name)}` }, each.name) : `${each.kind} ${each.name} ${each.address}`);
  const rows = [
    ...runs.map((run) => [runLink(run.id), run.title, run.endpoints.map((each) => h("div", {}, endpoint(each))),
      [run.actors === undefined ? "" : `${number(run.actors)} actors, ${number(run.steps)} steps`, run.waiting].filter(Boolean).join("; ")]),
    ...detached.map((each) => ["without a run", "detached", h("a", { href: `#/endpoints/${encodeURIComponent(each.name)}` }, each.name), ""]),
  ];
  return h("section", {}, h("h2", {}, "Runs in progress"),
    rows.length ? table(["run", "what", "serves", ""], rows, "Runs in progress") : h("p", { class: "muted" }, "None is on."));
}
