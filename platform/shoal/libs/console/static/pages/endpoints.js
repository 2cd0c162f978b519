// Endpoints as they are now: all of them, or one with its models, their versions side by side, and what was changed.
import { get, send } from "../lib/api.js";
import { changing, complain } from "../lib/ask.js";
import { Chart } from "../lib/charts.js";
import { facts, h, runLink, state } from "../lib/dom.js";
import { age, duration, moment, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { Rows } from "../lib/rows.js";

const REFRESH_MS = 1000, MINUTE_S = 60, HOUR_S = 3600;
const HEADS = ["version", "share", "requests/s", "p50", "p99", "requests", "errors", "other answers"];
const TONES = { stable: "good", candidate: "warn", shadow: "busy" };
const isLive = (model) => model.phase === "live"; // its versions are the run's, not the registry's

const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${number(value * 1000)} ms` : duration(value));
const percent = (value) => `${number(100 * value)} %`;
const rate = (part, whole) => (whole ? percent(part / whole) : "–");
const word = (status) => (status.asleep ? state("asleep", "busy") : status.ready ? state("ready") : state("not ready", "warn"));
const path = (name) => `/api/endpoints/${encodeURIComponent(name)}`;
const pageOf = (name, model = "") => `#/endpoints/${encodeURIComponent(name)}${model && `/${encodeURIComponent(model)}`}`;
const ready = (status) => `${status.replicas.filter((each) => each.ready).length} of ${Math.max(status.replicas.length, status.num_replicas)}`;

function cells(model, version) {
  return [
    [isLive(model) ? `${version.version}` : h("a", { href: `#/models/${encodeURIComponent(model.name)}/${version.version}` }, `${version.version}`), " ", state(version.track || "loaded", TONES[version.track])],
    percent(version.share), number(version.requests_per_s), seconds(version.p50_s), seconds(version.p99_s), number(version.requests),
    version.errors ? `${number(version.errors)} (${rate(version.errors, version.requests)})` : "0", rate(version.disagreed, version.compared),
  ];
}

export async function open(main, [name, model]) {
  return name ? openOne(main, name, model) : openAll(main);
}

async function openAll(main) {
  const none = h("p", { class: "panel" }, "No endpoint is up here. ", h("code", {}, "shoal serve deploy MODEL"), " starts one on a cluster that is up.");
  const list = h("div"), parts = new Map();
  main.replaceChildren(h("h1", {}, "Endpoints"), list, none);
  return poll(async () => {
    const all = await get("/api/endpoints");
    none.hidden = all.length > 0;
    for (const name of parts.keys()) {
      if (all.every((each) => each.name !== name)) { parts.get(name).element.remove(); parts.delete(name); }
    }
    for (const { name, url, status, problem } of all) {
      if (!parts.has(name)) {
        const part = { word: h("span"), about: h("p", { class: "muted" }), problem: h("p", { class: "state bad" }), rows: new Rows(["model", ...HEADS], `Versions of ${name}`) };
        part.element = h("section", { class: "panel spaced" }, h("h2", {}, h("a", { href: pageOf(name) }, name), " ", part.word), part.about, part.problem, part.rows.element);
        parts.set(name, part);
        list.append(part.element);
      }
      const part = parts.get(name);
      part.word.replaceChildren(status && !problem ? word(status) : state("no answer", "bad"));
      part.about.textContent = [url, status?.owner, status && `${ready(status)} replicas`].filter(Boolean).join("  ·  ");
      part.problem.textContent = problem;
      part.rows.show((status?.models ?? []).flatMap((each) => each.versions.map((version) =>
        [h("a", { href: pageOf(name, each.name) }, each.name), ...cells(each, version)])));
    }
  }, REFRESH_MS);
}

/** The rows [time, version, requests/s, p99] of the last hour as a curve: what `read` makes of those of a minute, and `none` of
 * the minutes between them. x: minutes before now. */
function drawHour(rows, now, read, none) {
  const points = [];
  for (const [time, own] of Map.groupBy(rows, ([each]) => each)) {
    const last = points.at(-1)?.[0];
    if (time - last > 2 * MINUTE_S) points.push([last + MINUTE_S, none], [time - MINUTE_S, none]);
    points.push([time, read(own)]);
  }
  return { xs: points.map(([time]) => (time - now) / MINUTE_S), ys: points.map(([, value]) => value) };
}

/** What a library counts: a rate, or what half of the values and 99% of them are below. */
function describeMetric(metric) {
  if (metric.per_s !== null) return `${number(metric.per_s)} a second`;
  return metric.p50_s === null ? null : `${seconds(metric.p50_s)}, p99 ${seconds(metric.p99_s)}`;
}

class ModelPart {
  constructor(endpoint, name) {
    this.endpoint = endpoint;
    this.name = name;
    this.versions = new Rows(HEADS, `Versions of ${name}`);
    this.facts = h("div");
    this.evidence = new Rows(["since it was opened", "candidate", "stable", "limit"], `What the candidate of ${name} is judged by`);
    this.judged = h("div", { hidden: true }, h("h3", {}, "What the candidate is judged by"), this.evidence.element);
    this.rates = new Chart("Requests per second in the last hour, by minutes before now", { height: 150 });
    this.latencies = new Chart("p99 in milliseconds in the last hour", { height: 150 });
    this.version = h("select", { "aria-label": "Version" });
    this.choice = h("label", {}, "version ", this.version);
    this.percent = h("input", { type: "number", min: 0, max: 100, value: 10, "aria-label": "Percent", size: 4 });
    const target = () => (isLive(this.now) ? name : `${name}@${this.version.value}`);
    const change = (action, fields) => send("POST", `${path(endpoint)}/models/${encodeURIComponent(name)}/rollout`, { action, ...fields() })
      .then((now) => `${name}: ${now.versions.filter((v) => v.track).map((v) => `${percent(v.share)} by ${v.version} (${v.track})`).join(", ")}`);
    const chosen = () => (isLive(this.now) ? {} : { version: Number(this.version.value) });
    const shared = () => ({ ...chosen(), percent: Number(this.percent.value) });
    const leaving = () => ({ from_version: this.now.candidate || this.now.stable || undefined });
    this.controls = h("div", { class: "row" }, this.choice, h("label", {}, this.percent, " % of the requests"),
      changing("Canary", () => `Let ${target()} answer ${this.percent.value} % of the requests?`, "Canary", () => change("canary", shared)),
      changing("Shadow", () => `Compute ${this.percent.value} % of the requests by ${target()} as well, whose answers nobody gets?`, "Shadow", () => change("shadow", shared)),
      changing("Promote", () => `Let ${target()} answer all requests of ${name}?`, "Promote", () => change("promote", chosen)),
      changing("Roll back", () => this.now.candidate ? `End the canary or shadow of version ${this.now.candidate}?` : `Leave version ${this.now.stable} for the one before?`,
        "Roll back", () => change("rollback", leaving)));
    this.element = h("section", { class: "panel spaced", id: `model-${name}` }, h("h2", {}, h("a", { href: `#/models/${encodeURIComponent(name)}` }, name), " · ",
      h("a", { href: `#/try/${encodeURIComponent(endpoint)}/${encodeURIComponent(name)}` }, "Try it")),
      this.facts, this.versions.element, h("div", { class: "grid" }, this.rates.element, this.latencies.element), this.judged, this.controls);
    this.fill();
  }

  /** The registry's versions, of which one may be chosen. */
  async fill() {
    try {
      const { versions } = await get(`/api/models/${encodeURIComponent(this.name)}`);
      this.version.replaceChildren(...versions.reverse().map((each) => h("option", { value: each.version }, [each.version, ...each.aliases].join(" "))));
    } catch { /* it follows a run, or is of another registry */ }
  }

  update(model, time) {
    this.now = model;
    this.choice.hidden = isLive(model);
    this.versions.show(model.versions.map((version) => cells(model, version)));
    this.facts.replaceChildren(facts([
      ["state", model.state === "READY" ? null : `${model.state.toLowerCase()} ${model.reason}`], ["reason", model.state === "READY" ? model.reason : null],
      ["follows", model.source], ["phase", model.phase],
      ["batches", model.batch_rows === null ? null : `${number(model.batch_rows)} rows on average, ${model.max_batch_rows} at most`],
      ["a forward", model.latency.length ? [model.latency[0], model.latency.at(-1)].map(([rows, each]) => `${rows} rows: ${seconds(each)}`).join(", ") : null],
      ...Object.values(model.metrics).map((metric) => [metric.help.toLowerCase(), describeMetric(metric)]),
      ["queue", `${number(model.queued_rows)} of ${number(model.max_queued_rows)} rows`], ["refused", number(model.refused)],
      ["a request failed", model.last_failure],
      ["loaded on demand", model.residency && `on ${model.residency.replicas} replicas, ${model.residency.loads} loads, ${model.residency.evictions} evictions`],
    ]));
    const rows = [...model.history.filter(([at]) => time - at < HOUR_S), ...model.versions.map((each) => [time, each.version, each.requests_per_s, each.p99_s])];
    const label = isLive(model) ? () => "all versions" : ([, version]) => `version ${version}`;
    const curves = [...Map.groupBy(rows, label)].sort();
    const draw = (chart, read, none) => chart.draw(curves.map(([word, own]) => ({ label: word, ...drawHour(own, time, read, none) })));
    draw(this.rates, (own) => own.reduce((sum, [, , rate]) => sum + rate, 0), 0);
    draw(this.latencies, (own) => 1000 * Math.max(...own.map(([, , , p99]) => p99 ?? 0)) || null, null);
    this.judged.hidden = !model.evidence;
    if (model.evidence) this.evidence.show(listEvidence(model.evidence));
  }

  close() {
    this.rates.close();
    this.latencies.close();
  }
}

/** What the guard judges the candidate by, beside the stable version and the limit. */
function listEvidence(e) {
  return [
    ["requests", number(e.requests), number(e.stable_requests), `judged from ${number(e.min_requests)} on`],
    ["failed", rate(e.errors, e.requests), rate(e.stable_errors, e.stable_requests), e.max_error_rate === null ? "no more than by chance" : `at most ${percent(e.max_error_rate)}`],
    ["compute time", e.latency_ratio === null ? "–" : `${number(e.latency_ratio)} ×`, "1 ×", `at most ${number(e.max_latency_ratio)} ×`],
    ["other answers", rate(e.disagreed, e.compared), `${number(e.compared)} compared`, e.max_disagreement === null ? "recorded only" : `at most ${percent(e.max_disagreement)}`],
    ["replicas lost", number(e.lost_replicas), "", ""],
    ...(e.metric ? [[e.metric, e.value === null ? "–" : number(e.value), "", `at least ${number(e.min_value)}`]] : []),
  ];
}

async function openOne(main, name, wanted) {
  const heading = h("h1", {}, name), about = h("div", { class: "panel" }), problem = h("p", { class: "state bad", role: "status" });
  const models = h("div"), more = h("div");
  const replicas = new Rows(["replica", "host", "process", "state", "note"], "Replicas", "There is none now.");
  const events = new Rows(["time", "what", "version", "by", "reason"], "Decisions", "None yet.");
  const parts = new Map();
  const show = (read, draw) => async () => {
    try { more.replaceChildren(draw(await get(`${path(name)}/${read}`))); } catch (error) { complain(error); }
  };
  const audit = (entries) => {
    const rows = new Rows(["time", "what", "by", "from", "outcome"], "Audit log", "It has no entries of this endpoint.");
    rows.show(entries.map((each) => [moment(Date.parse(each.time) / 1000),
      [each.entry, each.action, each.change?.model ?? each.model, each.change?.version ?? each.version].filter(Boolean).join(" "),
      each.by, each.from ?? "", [each.result, each.status, each.error, each.reason, each.count && `${each.count} times`].filter(Boolean).join(" ")]));
    return rows.element;
  };
  main.replaceChildren(heading, problem, about, models, h("h2", {}, "Replicas"), replicas.element, h("h2", {}, "Decisions"), events.element,
    h("h2", {}, "Records"), h("div", { class: "row" }, h("button", { type: "button", onclick: show("audit", audit) }, "Audit log"),
      h("button", { type: "button", onclick: show("logs", (lines) => h("pre", { class: "panel", tabindex: 0 }, lines.map(([process, line]) => `${process} | ${line}\n`))) },
        "What its processes printed")), more);

  const end = await poll(async () => {
    const { url, run, status, problem: reason, read_at: at } = await get(path(name));
    problem.textContent = reason ? `${reason}${status ? ` (this is how it was ${age(at)} ago)` : ""}` : "";
    if (!status) return;
    heading.replaceChildren(name, " ", word(status));
    about.replaceChildren(facts([["address", url], ["gRPC", status.grpc], ["run", run && runLink(run)],
      ["up for", status.started_at && age(status.started_at)], ["owner", status.owner], ["lifetime", status.lifetime], ["waits for", status.wanted],
      ["certificate", status.certificate && `${number(status.certificate.days_remaining)} days left ${status.certificate.problem}`]]));
    for (const model of status.models) {
      if (!parts.has(model.name)) {
        parts.set(model.name, new ModelPart(name, model.name));
        models.append(parts.get(model.name).element);
        if (model.name === wanted) parts.get(wanted).element.scrollIntoView();
      }
      parts.get(model.name).update(model, status.time);
    }
    for (const [each, part] of parts) {
      if (status.models.every((model) => model.name !== each)) { part.close(); part.element.remove(); parts.delete(each); }
    }
    replicas.show(status.replicas.map((each) => [each.id, each.host, number(each.pid),
      each.ready ? state("ready") : state("not ready", "warn"), [each.generation < status.generation ? "behind the plan" : "", each.error].filter(Boolean).join("; ")]));
    events.show(status.events.toReversed().map((each) =>
      [moment(each.time), each.kind, each.version === null ? each.model : `${each.model}@${each.version}`, each.by, each.reason]));
  }, REFRESH_MS);
  return () => { end(); parts.forEach((part) => part.close()); };
}
