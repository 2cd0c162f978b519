// One run, as it goes.
import { follow, get } from "../lib/api.js";
import { Chart, smooth } from "../lib/charts.js";
import { facts, h, say, state } from "../lib/dom.js";
import { duration, moment, number } from "../lib/format.js";

const POINTS = 1000;

export async function open(main, [id]) {
  const path = `/api/runs/${encodeURIComponent(id)}`;
  const run = await get(path);
  const charts = new Map(), curves = new Map();
  const grid = h("div", { class: "grid" });
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => drawAll() });
  const logarithmic = h("input", { type: "checkbox", onchange: () => drawAll() });
  const axis = h("select", { onchange: () => drawAll() }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"));
  const status = h("span", {}, state(run.status));

  const draw = (name) => {
    if (!charts.has(name)) {
      charts.set(name, new Chart(name, { onzoom: (first, last) => zoom(name, first, last) }));
      grid.append(charts.get(name).element);
    }
    const chart = charts.get(name), { steps, times, values } = curves.get(name);
    chart.logarithmic = logarithmic.checked;
    const xs = axis.value === "step" ? steps : times.map((time) => time - run.created_at);
    const ys = smooth(values, Number(smoothing.value)).map((y) => (logarithmic.checked && y <= 0 ? null : y));
    chart.draw([{ label: id, xs, ys }]);
  };
  const drawAll = () => [...curves.keys()].sort().forEach(draw);
  const load = async (query) => {
    const answer = await get(`${path}/curves`, { points: POINTS, ...query });
    for (const [name, curve] of Object.entries(answer.curves)) curves.set(name, curve);
    drawAll();
    return answer;
  };
  const zoom = async (name, first, last) => {
    if (axis.value !== "step") return;
    const range = first === null ? {} : { first, last };
    const answer = await get(`${path}/curves`, { points: POINTS, names: name, ...range });
    curves.set(name, answer.curves[name]);
    draw(name);
  };

  main.replaceChildren(
    h("h1", {}, run.title, " ", status), h("p", { class: "muted" }, run.id),
    h("div", { class: "panel" }, facts([
      ["command", h("code", {}, run.command)], ["started", moment(run.created_at)], ["took", duration(run.duration_s)],
      ["host", run.copied_from ?? run.host], ["best", run.best && `${run.best.name} ${number(run.best.value)}`],
      ["commit", run.git_revision && run.git_revision.slice(0, 12) + (run.git_dirty ? ", changed" : "")],
      ["models", run.models.length ? run.models.map((m) => `${m.name}@${m.version} ${m.aliases.join(" ")}`).join(", ") : null],
      ["error", run.error],
    ])),
    h("h2", {}, "Curves"),
    h("div", { class: "row" }, h("label", {}, "smoothing ", smoothing), h("label", {}, logarithmic, " logarithmic"), h("label", {}, "x: ", axis)),
    grid,
    h("h2", {}, "Spec"), h("pre", { class: "panel", tabindex: "0" }, run.spec),
  );
  const first = await load({ quick: 1 });
  if (first.sampled) load({}).catch((error) => say(error.message));

  return follow({ runs: id }, (news) => {
    const { status: word, metrics } = news[id] ?? {};
    if (word) status.replaceChildren(state(word));
    for (const { name, step, time, value } of metrics ?? []) {
      const curve = curves.get(name) ?? { steps: [], times: [], values: [] };
      curves.set(name, curve);
      if (!curve.steps.length || curve.steps.at(-1) < step) {
        curve.steps.push(step);
        curve.times.push(time);
        curve.values.push(value);
        draw(name);
      }
    }
  });
}
