// Try a model: a form made from its inputs, the answer, and the code that sends the same request.
import { get, post } from "../lib/api.js";
import { complain } from "../lib/ask.js";
import { facts, h, say } from "../lib/dom.js";
import { duration, number } from "../lib/format.js";

const MAX_CELLS = 48, CODE_AFTER_MS = 400;
const WORDS = { python: "Python", javascript: "JavaScript", curl: "curl" };
const isFloat = (spec) => /^(FP|BF)/.test(spec.datatype);

export async function open(main, [endpoint, name]) {
  const path = `/api/endpoints/${encodeURIComponent(endpoint)}/models/${encodeURIComponent(name)}`;
  const model = await get(`${path}/request`);
  const version = h("select", { onchange: () => changed() }, h("option", { value: "" }, "the one that answers"), model.versions.map((each) => h("option", { value: each }, each)));
  const text = h("textarea", { rows: 6, spellcheck: "false", "aria-label": "Request", oninput: () => changed() });
  const answer = h("div", { role: "status" }), code = h("div");
  const form = model.action === "rows" ? makeForm(model, path, () => { text.value = JSON.stringify(form.read()); changed(); }) : null;
  const query = () => `?action=${model.action}&version=${version.value}`;
  let timer;
  const changed = () => { clearTimeout(timer); timer = setTimeout(() => writeCode().catch((error) => {
    if (error.status === 401) code.replaceChildren(h("p", {}, "Log in for the code of this request."));
    else say(error.message);
  }), CODE_AFTER_MS); };
  const writeCode = async () => showCode(await post(`${path}/code${query()}`, text.value));
  const showCode = (written) => code.replaceChildren(
    written.file ? h("p", {}, `The code reads the file ${written.file}: `, h("button", { type: "button", onclick: () => save(written.file, text.value) }, "Save it")) : null ?? "",
    ...Object.entries(WORDS).map(([key, word]) => h("section", {}, h("h3", {}, word, " ",
      h("button", { type: "button", class: "quiet", onclick: () => navigator.clipboard.writeText(written[key]).then(() => say("Copied.")) }, "Copy")),
    h("pre", { class: "panel", tabindex: 0 }, written[key]))));
  const ask = h("button", { type: "submit" }, "Send");
  const submit = async (event) => {
    event.preventDefault();
    ask.disabled = true;
    try {
      answer.replaceChildren(drawAnswer(await post(`${path}/try${query()}`, text.value), model));
    } catch (error) {
      answer.replaceChildren(h("p", { class: "state bad" }, error.message));
      if (error.status === 401) complain(error);
    } finally {
      ask.disabled = false;
    }
  };

  text.value = JSON.stringify(model.request);
  form?.write(model.request);
  showCode(model.code);
  main.replaceChildren(h("h1", {}, "Try ", h("a", { href: `#/models/${encodeURIComponent(name)}` }, name)),
    h("p", { class: "muted" }, "at the endpoint ", h("a", { href: `#/endpoints/${encodeURIComponent(endpoint)}/${encodeURIComponent(name)}` }, endpoint), `, ${model.url}`),
    h("div", { class: "halves" },
      h("form", { onsubmit: submit }, form?.element ?? null, h("details", { open: !form }, h("summary", {}, "The request"), text),
        h("div", { class: "row" }, h("label", {}, "version ", version), ask), answer),
      h("section", {}, h("h2", {}, "In a program"), code)));
  return () => clearTimeout(timer);
}

function save(name, content) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type: "application/json" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

// -- the form ---------------------------------------------------------------------------------------------------------

/** The fields of one input: each has `label`, `element`, `read()` and `write(value)`. Those of a picture or a list are one. */
function makeFields(spec, isPicture, path, changed) {
  const sizes = spec.shape.slice(1);
  if (spec.columns.length && spec.shape.length === 2) return spec.columns.map((column) => makeField(spec, column, [column], changed));
  if (!sizes.length) return [makeField(spec, spec.name, [spec.name], changed)];
  if (isPicture) return [makePicture(spec, path, changed)];
  if (sizes.length === 1 && sizes[0] > 0 && sizes[0] <= MAX_CELLS) {
    return Array.from({ length: sizes[0] }, (_, index) => makeField(spec, `${spec.name} ${index}`, [spec.name, index], changed));
  }
  return [makeList(spec, changed)];
}

/** One value: a number, a text, a truth, a date as text; an empty one is a gap where the input may have gaps. */
function makeField(spec, label, path, changed) {
  const kind = spec.kind?.split(":")[0] || (spec.datatype === "BOOL" ? "truth" : spec.datatype === "BYTES" ? "text" : "number");
  const point = kind === "number" && spec.kind?.split(":")[1]; // such texts are sent as they are: the endpoint reads them
  const options = { "aria-label": label, oninput: changed };
  const element = kind === "truth"
    ? h("select", options, spec.kind ? h("option", { value: "null" }, "not known") : null, h("option", { value: "false" }, "no"), h("option", { value: "true" }, "yes"))
    : h("input", { ...options, placeholder: spec.kind ? "not known" : "", size: kind === "number" ? 9 : 16,
      type: "text", inputmode: kind === "number" ? "decimal" : null });
  const isNumber = kind === "number" && !point;
  const read = () => {
    if (kind === "truth") return JSON.parse(element.value);
    if (element.value === "" && spec.kind) return null;
    return isNumber && element.value.trim() !== "" && Number.isFinite(Number(element.value)) ? Number(element.value) : element.value;
  };
  const write = (value) => { element.value = kind === "truth" ? String(value ?? null) : typeof value === "number" && point ? String(value).replace(".", point) : String(value ?? ""); };
  return { label, note: spec.kind || (isNumber ? (isFloat(spec) ? "number" : "integer") : kind), path, element, read, write, isSmall: true };
}

/** Values of a shape as JSON. */
function makeList(spec, changed) {
  const element = h("textarea", { rows: 4, spellcheck: "false", "aria-label": spec.name, oninput: changed });
  const read = () => { try { return JSON.parse(element.value); } catch { return element.value; } };
  return { label: spec.name, note: `a list of ${spec.datatype} ${JSON.stringify(spec.shape.slice(1))}`, path: [spec.name], element, read, write: (value) => { element.value = JSON.stringify(value); } };
}

/** A picture, dropped or chosen, whose values the console reads as the command line does. */
function makePicture(spec, path, changed) {
  let values = null;
  const white = h("input", { type: "number", step: "any", value: /INT/.test(spec.datatype) ? 255 : 1, "aria-label": "White is", size: 5, onchange: () => chosen && take(chosen) });
  const seen = h("img", { alt: "", hidden: true }), note = h("span", {}, "Drop a picture here, or choose one.");
  const file = h("input", { type: "file", accept: "image/*", "aria-label": `${spec.name}: a picture`, onchange: () => file.files[0] && take(file.files[0]) });
  let chosen = null;
  const take = async (picture) => {
    chosen = picture;
    const query = new URLSearchParams({ input: spec.name, white: white.value, name: picture.name });
    try {
      values = await post(`${path}/picture?${query}`, picture);
      URL.revokeObjectURL(seen.src);
      seen.src = URL.createObjectURL(picture);
      seen.hidden = false;
      note.textContent = picture.name;
      changed();
    } catch (error) {
      complain(error);
    }
  };
  const element = h("div", { class: "drop",
    ondragover: (event) => { event.preventDefault(); element.classList.add("over"); },
    ondragleave: () => element.classList.remove("over"),
    ondrop: (event) => { event.preventDefault(); element.classList.remove("over"); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); },
  }, seen, note, file, h("label", {}, "a white pixel is ", white));
  return { label: spec.name, note: `a picture, ${spec.datatype} ${JSON.stringify(spec.shape.slice(1))}`, path: [spec.name], element, read: () => values, write: (value) => { values = value; } };
}

/** The form of a model that takes rows: a table of rows where all fields are small. */
function makeForm(model, path, changed) {
  const make = () => model.inputs.map((spec) => ({ columns: [], kind: "", ...spec }))
    .flatMap((spec) => makeFields(spec, model.pictures.includes(spec.name), path, changed));
  const rows = [make()];
  const isTable = rows[0].every((field) => field.isSmall);
  const element = h("div"), more = h("button", { type: "button", onclick: () => { const before = readRow(rows.at(-1)); rows.push(make()); writeRow(rows.at(-1), before); draw(); changed(); } }, "Another row");
  const remove = (index) => { rows.splice(index, 1); draw(); changed(); };
  const head = (field) => [field.label, " ", h("span", { class: "muted" }, field.note)];
  const draw = () => element.replaceChildren(...((isTable && rows[0].length <= 4) || rows.length > 1
    ? [h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, rows[0].map((field) => h("th", { scope: "col" }, head(field))), rows.length > 1 ? h("th") : null)),
      h("tbody", {}, rows.map((fields, index) => h("tr", {}, fields.map((field) => h("td", {}, field.element)),
        rows.length > 1 ? h("td", {}, h("button", { type: "button", class: "quiet", "aria-label": "Remove the row", onclick: () => remove(index) }, "✕")) : null)))))]
    : rows[0].map((field) => h("div", { class: field.isSmall ? "field small" : "field" }, h("div", {}, head(field)), field.element))), h("div", { class: "row" }, more));
  draw();
  return { element, read: () => (rows.length === 1 ? readRow(rows[0]) : rows.map(readRow)), write: (row) => writeRow(rows[0], row) };
}

function readRow(fields) {
  const row = {};
  for (const { path: [name, index], read } of fields) {
    if (index === undefined) row[name] = read();
    else (row[name] ??= [])[index] = read();
  }
  return row;
}

function writeRow(fields, row) {
  for (const { path: [name, index], write } of fields) write(index === undefined ? row[name] : row[name]?.[index]);
}

// -- the answer -------------------------------------------------------------------------------------------------------

function drawAnswer({ answer, version, took_s: took }, model) {
  const rows = model.action === "rows" ? [answer].flat() : [Object.fromEntries(answer.outputs.map((each) => [each.name, each.data]))];
  return h("div", {}, h("p", {}, h("span", { class: "state good" }, "answered"), ` by version ${version} in ${duration(took)}`),
    rows.map((row, index) => h("div", { class: "panel spaced" }, rows.length > 1 ? h("h3", {}, `Row ${index}`) : null,
      facts(Object.entries(row).map(([name, value]) => [name, drawValue(value)])))));
}

/** A number or a text; several numbers as bars, of which the largest is marked. */
function drawValue(value) {
  const named = value !== null && typeof value === "object" && !Array.isArray(value);
  const entries = named ? Object.entries(value) : Array.isArray(value) ? value.map((each, index) => [index, each]) : null;
  if (!entries) return typeof value === "number" ? number(value) : String(value);
  if (entries.length > MAX_CELLS || !entries.every(([, each]) => typeof each === "number")) return h("code", {}, JSON.stringify(value).slice(0, 2000));
  const values = entries.map(([, each]) => each), most = Math.max(...values), least = Math.min(0, ...values);
  const largest = values.every((each) => each === most) ? -1 : values.indexOf(most);
  return h("table", { class: "outputs" }, h("tbody", {}, entries.map(([name, each], index) => h("tr", {}, h("th", { scope: "row" }, String(name)),
    h("td", { class: "number" }, number(each)),
    h("td", {}, h("meter", { min: least, max: most > least ? most : least + 1, value: each, "aria-hidden": "true" }), index === largest ? " largest" : "")))));
}
