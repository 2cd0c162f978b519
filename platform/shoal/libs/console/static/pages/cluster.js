// The clusters of this host: nodes, what waits, and who has what.
import { get } from "../lib/api.js";
import { facts, h, runLink, state } from "../lib/dom.js";
import { age, bytes, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { Rows } from "../lib/rows.js";

const REFRESH_MS = 1000;
const TONES = { RUNNING: "busy", SUCCEEDED: "good", FAILED: "bad", STOPPED: "warn", PENDING: "warn" };
const amounts = (needs) => Object.entries(needs).filter(([, amount]) => amount).map(([name, amount]) => `${number(amount)} ${name}`).join(", ");

export async function open(main) {
  const problem = h("p", { class: "state bad" }), list = h("div"), parts = new Map();
  const none = h("div", { class: "panel", hidden: true }, h("p", {}, "No cluster is up on this host. ", h("code", {}, "shoal up"), " starts one that stays, and ",
    h("code", {}, "shoal run JOB"), " starts one for a run. RAY_ADDRESS names one elsewhere, before the console starts."));
  const queue = new Rows(["position", "run", "owner", "priority", "needs", "waits for", "why"], "Queue", "No run waits.");
  const runs = new Rows(["run", "what", "serves", "progress"], "Runs in progress", "None is on.");
  main.replaceChildren(h("h1", {}, "Cluster"), problem, none, list, h("h2", {}, "Queue"), queue.element, h("h2", {}, "Runs in progress"), runs.element);
  return poll(async () => {
    const now = await get("/api/cluster"), clusters = now.clusters ?? [];
    problem.textContent = now.problem;
    none.hidden = !now.clusters || clusters.length > 0;
    for (const [url, part] of parts) {
      if (clusters.every((each) => each.dashboard_url !== url)) { part.element.remove(); parts.delete(url); }
    }
    for (const cluster of clusters) {
      if (!parts.has(cluster.dashboard_url)) {
        parts.set(cluster.dashboard_url, new ClusterPart(cluster));
        list.append(parts.get(cluster.dashboard_url).element);
      }
      parts.get(cluster.dashboard_url).update(cluster);
    }
    queue.show((now.queue ?? []).map((entry) =>
      [entry.position, runLink(entry.run), entry.owner, entry.priority, amounts(entry.needs), age(entry.since_s), entry.reason]));
    runs.show(listRuns(now.runs ?? [], now.detached ?? []));
  }, REFRESH_MS);
}

/** A part of a whole, as a bar and in words. */
function share(part, whole, words) {
  return h("span", {}, h("meter", { min: 0, max: whole || 1, value: part ?? 0, "aria-hidden": "true" }), ` ${words}`);
}

class ClusterPart {
  constructor(cluster) {
    this.problem = h("p", { class: "state bad" });
    this.facts = h("div");
    this.nodes = new Rows(["node", "CPUs reserved", "GPUs reserved", "load of the CPUs", "memory in use", "GPUs"], "Nodes");
    this.holders = new Rows(["run or job", "node", "reserved", "processes"], "Who has what", "Nothing is reserved.");
    this.jobs = new Rows(["job", "run", "state", "since", "command"], "Jobs", "There are none.");
    this.element = h("section", {}, h("h2", {}, cluster.address), this.problem, this.facts, h("h3", {}, "Nodes"), this.nodes.element,
      h("h3", {}, "Who has what"), this.holders.element, h("h3", {}, "Jobs"), this.jobs.element);
  }

  update(cluster) {
    this.problem.textContent = cluster.problem ? `It does not answer: ${cluster.problem}` : "";
    if (cluster.problem) return;
    const hosts = new Map(cluster.nodes.map((node) => [node.id, node.host]));
    const held = (node, name) => cluster.reservations.filter((each) => each.node === node).reduce((sum, each) => sum + each.resources[name], 0);
    const sum = (name) => number(cluster.nodes.reduce((total, node) => total + node[name], 0));
    this.facts.replaceChildren(facts([["up for", cluster.nodes.length && age(cluster.nodes[0].started_at)], ["nodes", String(cluster.nodes.length)],
      ["CPUs", sum("num_cpus")], ["GPUs", sum("num_gpus")], ["dashboard of Ray", cluster.dashboard_url]]));
    this.nodes.show(cluster.nodes.map((node) => [
      `${node.host} ${node.address}${node.is_head ? ", head" : ""}`,
      share(held(node.id, "CPU"), node.num_cpus, `${number(held(node.id, "CPU"))} of ${number(node.num_cpus)}`),
      node.num_gpus ? share(held(node.id, "GPU"), node.num_gpus, `${number(held(node.id, "GPU"))} of ${number(node.num_gpus)}`) : "none",
      node.cpu_percent === null ? "–" : share(node.cpu_percent, 100, `${number(node.cpu_percent)} %`),
      node.memory_bytes ? share(node.memory_used_bytes, node.memory_bytes, `${bytes(node.memory_used_bytes)} of ${bytes(node.memory_bytes)}`) : "–",
      node.gpus.map((gpu) => h("div", {}, `${gpu.name}: ${gpu.percent ?? "–"} %, ${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_bytes)}`)),
    ]));
    this.holders.show(cluster.reservations.filter((each) => amounts(each.resources) || each.run).map((each) => [
      each.run ? runLink(each.run) : each.job, hosts.get(each.node) ?? each.node, amounts(each.resources) || "nothing",
      Object.entries(each.processes).map(([kind, count]) => (count > 1 ? `${count} ${kind}` : kind)).join(", "),
    ]));
    this.jobs.show(cluster.jobs.map((job) => [
      job.id, job.run ? runLink(job.run) : "none is known", state(job.status.toLowerCase(), TONES[job.status]),
      age(job.started_at), h("code", {}, job.command.split(" && exec ").at(-1)),
    ]));
  }
}

function listRuns(runs, detached) {
  const endpoint = (each) => (each.kind === "inference" ? h("a", { href: `#/endpoints/${encodeURIComponent(each.name)}` }, each.name) : [...new Set([each.kind, each.name, each.address])].join(" "));
  return [
    ...runs.map((run) => [runLink(run.id), run.name, run.endpoints.map((each) => h("div", {}, endpoint(each))),
      [run.actors === undefined ? "" : `${number(run.actors)} actors, ${number(run.steps)} steps`, run.waiting].filter(Boolean).join("; ")]),
    ...detached.map((each) => ["without a run", "detached", h("a", { href: `#/endpoints/${encodeURIComponent(each.name)}` }, each.name), ""]),
  ];
}
