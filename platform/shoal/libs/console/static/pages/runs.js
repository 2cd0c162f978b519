// All runs, one row each: chosen by words, status, owner and tag; with metrics that one pins, notes and tags.
import { get, send } from "../lib/api.js";
import { ask, complain } from "../lib/ask.js";
import { h, runLink, say, state, took } from "../lib/dom.js";
import { age, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 3000;
const CHOICES = { status: (run) => [run.status], owner: (run) => [run.owner ?? run.host], tag: (run) => run.tags };

export async function open(main, parts, query) {
  const page = new RunsPage(main, query);
  return poll(() => page.refresh(), REFRESH_MS);
}

class RunsPage {
  constructor(main, query) {
    this.runs = [];
    this.selected = new Set();
    this.pinned = JSON.parse(localStorage.getItem("pinned") ?? "[]");
    this.words = h("input", { type: "search", placeholder: "Words, such as failed cartpole", "aria-label": "Filter", value: query.get("words") ?? "", oninput: () => this.choose() });
    this.choices = Object.fromEntries(Object.keys(CHOICES).map((name) => [name, h("select", { "aria-label": name, onchange: () => this.choose() }, h("option", { value: "" }, `any ${name}`))]));
    this.asked = query;
    this.archived = h("input", { type: "checkbox", checked: query.has("archived"), onchange: () => this.choose() });
    this.count = h("span", { class: "muted", role: "status" });
    this.actions = h("span", { class: "row" });
    this.pins = h("span", { class: "row" });
    this.names = h("datalist", { id: "metric-names" });
    const pin = h("input", { list: "metric-names", placeholder: "Pin a metric", "aria-label": "Pin a metric", onchange: () => { this.pin(pin.value); pin.value = ""; }, onfocus: () => this.loadNames() });
    this.place = h("div");
    main.replaceChildren(h("h1", {}, "Runs"),
      h("div", { class: "row" }, this.words, Object.values(this.choices), h("label", {}, this.archived, " archived"), this.count),
      h("div", { class: "row" }, this.actions, pin, this.names, this.pins), this.place);
    this.makeTable();
    this.showActions();
  }

  makeTable() {
    const check = (run) => h("input", { type: "checkbox", "aria-label": `Select ${run.id}`, checked: this.selected.has(run.id), onchange: (event) => this.select(run.id, event.target.checked) });
    this.table = new Table([
      { name: "✓", value: (run) => !this.selected.has(run.id), cell: check },
      { name: "run", value: (run) => run.id, cell: (run) => runLink(run.id) },
      { name: "name", value: (run) => run.name, cell: (run) => run.name },
      { name: "status", value: (run) => run.status, cell: (run) => state(run.status) },
      { name: "best", number: true, value: (run) => run.best?.[1], cell: (run) => (run.best ? `${run.best[0]} ${number(run.best[1])}` : "") },
      ...this.pinned.map((name) => ({ name, number: true, value: (run) => run.values[name], cell: (run) => (name in run.values ? number(run.values[name]) : "") })),
      { name: "tags", value: (run) => run.tags.join(), cell: (run) => run.tags.map((tag) => h("span", { class: "tag" }, tag)) },
      { name: "note", value: (run) => run.note, cell: (run) => run.note.split("\n")[0] },
      { name: "age", number: true, value: (run) => -run.created_at, cell: (run) => age(run.created_at) },
      { name: "took", number: true, value: (run) => run.duration_s ?? Infinity, cell: took },
      { name: "owner", value: (run) => run.owner ?? run.host, cell: (run) => run.owner ?? run.copied_from ?? run.host },
    ], { label: "Runs", key: (run) => run.id });
    this.place.replaceChildren(this.table.element);
    this.pins.replaceChildren(...this.pinned.map((name) => h("button", { type: "button", class: "tag", "aria-label": `Unpin ${name}`, onclick: () => this.pin(name) }, `${name} ✕`)));
  }

  async loadNames() {
    if (!this.names.children.length) this.names.append(...(await get("/api/metrics")).map((name) => h("option", { value: name })));
  }

  /** Pins a metric, or unpins it. */
  pin(name) {
    if (!name) return;
    this.pinned = this.pinned.includes(name) ? this.pinned.filter((each) => each !== name) : [...this.pinned, name];
    localStorage.setItem("pinned", JSON.stringify(this.pinned));
    this.makeTable();
    this.refresh().catch((error) => say(error.message));
  }

  async refresh() {
    const runs = await get("/api/runs", { metrics: this.pinned }), text = JSON.stringify(runs);
    if (text === this.text) return;
    this.text = text;
    this.runs = runs;
    for (const [name, select] of Object.entries(this.choices)) {
      const words = [...new Set(runs.flatMap(CHOICES[name]))].sort(), chosen = this.asked.get(name) ?? select.value;
      select.replaceChildren(h("option", { value: "" }, `any ${name}`), ...words.map((word) => h("option", { value: word }, word)));
      select.value = words.includes(chosen) ? chosen : "";
    }
    this.asked = new URLSearchParams();
    this.show();
  }

  show() {
    const words = this.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.id, run.name, run.status, run.kind, run.host, run.owner, run.note, ...run.tags].join(" ").toLowerCase();
    const chosen = Object.entries(this.choices).filter(([, select]) => select.value).map(([name, select]) => [CHOICES[name], select.value]);
    this.chosen = this.runs.filter((run) => (this.archived.checked || !run.archived) && chosen.every(([find, value]) => find(run).includes(value))
      && (!words.length || words.every((word) => text(run).includes(word))));
    this.count.textContent = `${this.chosen.length} of ${this.runs.length}`;
    this.table.show(this.chosen);
  }

  /** As the reader has chosen, and the address says so. */
  choose() {
    this.show();
    const query = new URLSearchParams([["words", this.words.value], ...Object.entries(this.choices).map(([name, select]) => [name, select.value]),
      ["archived", this.archived.checked ? "1" : ""]].filter(([, value]) => value)).toString();
    history.replaceState(null, "", `#/runs${query ? `?${query}` : ""}`);
  }

  select(id, isSelected) {
    if (isSelected) this.selected.add(id);
    else this.selected.delete(id);
    this.showActions();
  }

  showActions() {
    const ids = [...this.selected], rows = this.runs.filter((run) => this.selected.has(run.id)), button = (word, onclick) => h("button", { type: "button", onclick }, word);
    const isArchived = rows.length && rows.every((run) => run.archived);
    this.actions.replaceChildren(...(ids.length ? [
      h("a", { class: "button", href: `#/compare/${ids.map(encodeURIComponent).join("/")}` }, `Compare ${ids.length}`),
      h("input", { placeholder: "Tag", "aria-label": "Tag the selected runs", maxlength: 40, onchange: (event) => this.tag(rows, event.target.value.trim()) }),
      button(isArchived ? "Take back from the archive" : "Archive", () => this.change(ids, (id) => send("PATCH", runPath(id), { archived: !isArchived }))),
      button("Remove …", () => this.remove(ids)),
      button("Select none", () => { this.selected.clear(); this.redraw(); }),
    ] : [button("Select all shown", () => { for (const run of this.chosen) this.selected.add(run.id); this.redraw(); })]));
  }

  redraw() {
    this.showActions();
    this.table.show(this.chosen);
  }

  async change(ids, step) {
    try {
      for (const id of ids) await step(id);
      this.selected.clear();
    } catch (error) { complain(error); }
    await this.refresh();
    this.redraw();
  }

  /** Gives the runs a tag, or takes away one that all have. */
  async tag(rows, tag) {
    const isTaken = rows.every((run) => run.tags.includes(tag)), tags = new Map(rows.map((run) => [run.id, isTaken ? run.tags.filter((each) => each !== tag) : [...run.tags, tag]]));
    await this.change([...tags.keys()], (id) => send("PATCH", runPath(id), { tags: tags.get(id) }));
  }

  async remove(ids) {
    const detail = `Their records and files go, in the store too. Registered models stay. ${ids.join(", ")}`;
    if (await ask(`Remove ${ids.length} ${ids.length === 1 ? "run" : "runs"}?`, "Remove", detail)) await this.change(ids, (id) => send("DELETE", runPath(id)));
  }
}

const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;
