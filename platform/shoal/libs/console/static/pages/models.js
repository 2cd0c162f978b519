// Registered models: all of them, or one with its lineage, its aliases and one of its versions.
import { get, send } from "../lib/api.js";
import { changing } from "../lib/ask.js";
import { facts, h, runLink } from "../lib/dom.js";
import { age, bytes, moment, number } from "../lib/format.js";
import { drawLineage } from "../lib/lineage.js";
import { poll } from "../lib/poll.js";
import { Rows } from "../lib/rows.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 3000;
const link = (name, version, text = `${name}@${version}`) => h("a", { href: `#/models/${encodeURIComponent(name)}/${version}` }, text);
const metricsOf = (metrics) => Object.entries(metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ");
const COLUMNS = [
  { name: "model", value: (v) => `${v.name}@${String(v.version).padStart(9, "0")}`, cell: (v) => link(v.name, v.version) },
  { name: "aliases", value: (v) => v.aliases.join(), cell: (v) => (v.aliases.length ? h("span", { class: "state good" }, v.aliases.join(", ")) : "") },
  { name: "age", number: true, value: (v) => -v.created_at, cell: (v) => age(v.created_at) },
  { name: "size", number: true, value: (v) => v.size_bytes, cell: (v) => bytes(v.size_bytes) },
  { name: "run", value: (v) => v.run_id ?? "", cell: (v) => (v.run_id ? runLink(v.run_id) : "") },
  { name: "metrics", value: (v) => metricsOf(v.metrics), cell: (v) => metricsOf(v.metrics) },
  { name: "format", value: (v) => v.format, cell: (v) => v.format },
];

export async function open(main, [name, version], query) {
  return name ? openModel(main, name, version, query.get("alias")) : openAll(main);
}

async function openAll(main) {
  let versions = [];
  const filter = h("input", { type: "search", placeholder: "Words, such as champion", "aria-label": "Filter", oninput: () => show() });
  const count = h("span", { class: "muted", role: "status" });
  const table = new Table(COLUMNS, { label: "Models" });
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (v) => `${v.name}@${v.version} ${v.aliases.join(" ")} ${v.run_id} ${v.format}`.toLowerCase();
    const chosen = versions.filter((v) => words.every((word) => text(v).includes(word)));
    count.textContent = versions.length ? `${chosen.length} of ${versions.length} versions` : "No model is registered yet: a run registers what it trained.";
    table.show(chosen);
  };
  main.replaceChildren(h("h1", {}, "Models"), h("div", { class: "row" }, filter, count), table.element);
  return poll(async () => { versions = (await get("/api/models")).reverse(); show(); }, REFRESH_MS);
}

async function openModel(main, name, chosen, alias) {
  const path = `/api/models/${encodeURIComponent(name)}`;
  const picture = h("div"), aliases = new Rows(["alias", "version", "moved", "change"], "Aliases", "No alias names a version."), versions = new Table(COLUMNS, { label: "Versions" });
  let drawn = "";
  const { versions: all } = await get(path);
  const shown = Number(chosen) || (all.findLast((v) => v.aliases.includes("champion")) ?? all.at(-1)).version;
  const detail = await get(`${path}/${shown}`);

  const refresh = async () => {
    const [lineage, model] = await Promise.all([get(`${path}/lineage`), get(path)]);
    const now = JSON.stringify([lineage, model]);
    if (now === drawn || picture.contains(document.activeElement)) return;
    drawn = now;
    const older = lineage.left_out ? h("p", { class: "muted" }, `${lineage.left_out} older versions are not drawn.`) : null;
    picture.replaceChildren(drawLineage(lineage, `Lineage of ${name}`), ...(older ? [older] : []));
    aliases.show(listAliases(model.moves));
    versions.show(model.versions.reverse());
  };
  const move = async () => {
    const moved = await send("POST", `${path}/${shown}/promote`, { alias: input.value });
    await refresh();
    return `${name}@${shown} is ${moved.aliases.join(" and ")} now.`;
  };
  const listAliases = (moves) => Object.entries(moves).sort().map(([word, list]) => {
    const last = list.at(-1);
    const back = list.length > 1 ? changing("Roll back", () => `Move ${name}@${word} back by one promotion?`, "Roll back", async () => {
      const { version } = await send("POST", `${path}/aliases/${encodeURIComponent(word)}/rollback`);
      await refresh();
      return `${name}@${word} is version ${version} now.`;
    }) : "";
    return [word, link(name, last.version), `${moment(last.time)}, ${last.kind === "promote" ? "promoted" : "rolled back"}`, back];
  });
  const input = h("input", { value: alias ?? "champion", "aria-label": "Alias", size: 14 });
  const button = changing("Promote", () => `Point ${name}@${input.value} at version ${shown}?`, "Promote", move);

  main.replaceChildren(h("h1", {}, name), picture, h("h2", {}, "Aliases"), aliases.element,
    h("h2", {}, `Version ${shown}`),
    h("div", { class: "row" }, h("label", {}, "Move the alias ", input, " to this version "), button),
    h("div", { class: "panel" }, describe(detail)), h("h2", {}, "Versions"), versions.element);
  return poll(refresh, REFRESH_MS);
}

const words = (fields) => Object.entries(fields).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("; ");

/** What a version was made from, by its name in the lineage: a run's id is a link. */
function sayOrigin(name, value) {
  if (name === "run" || name === "sweep") return runLink(value);
  if (typeof value === "object") return Array.isArray(value) ? value.join(", ") : words(value ?? {});
  return typeof value === "number" ? number(value) : value;
}

const LINEAGE = { file: "trained from", rows: "rows of the file", base: "needs", source: "made from" };
const tensor = (spec) => `${spec.name}: ${spec.datatype} [${spec.shape.map((each) => (each === -1 ? "any" : each)).join(", ")}]`
  + (spec.columns.length ? ` of ${spec.columns.join(", ")}` : "") + (spec.kind ? `, a column of ${spec.kind.split(":")[0]}s` : "");

function describe(version) {
  const { model, signature } = version;
  return facts([
    ["registered", moment(version.created_at)],
    ["made by", version.run_id && h("span", {}, runLink(version.run_id), ` ${[version.run?.name, version.run?.owner].filter(Boolean).join(", ")}`)], ["weights", version.run_id && `version ${version.weights_version} of the run`],
    ["aliases", version.aliases.join(", ")],
    ...Object.entries(version.lineage).map(([name, value]) => [LINEAGE[name] ?? name, sayOrigin(name, value)]),
    ...signature.inputs.map((spec) => ["input", tensor(spec)]), ...signature.outputs.map((spec) => ["output", tensor(spec)]),
    ["size", bytes(version.size_bytes) + (version.parts.length ? ` in ${version.parts.length} files` : "")],
    ["built by", model.factory ? `${model.factory} ${JSON.stringify(model.kwargs).slice(0, 500)}` : `a file of the format ${model.format}`],
    ["preprocess", model.preprocess], ["postprocess", model.postprocess], ["code", version.code.join(", ")],
    ["metrics", metricsOf(version.metrics)], ["fingerprints of the data", words(version.data)],
    ["sha256", version.sha256], ["files", version.location],
  ]);
}
