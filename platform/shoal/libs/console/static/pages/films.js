// How the policy of a run has played: its films, three of them side by side.
import { get } from "../lib/api.js";
import { h, runLink, say, state } from "../lib/dom.js";
import { Film } from "../lib/film.js";
import { age, number } from "../lib/format.js";
import { poll } from "../lib/poll.js";
import { table } from "./run_record.js";

const SHOWN = 3, REFRESH_MS = 5000;

export async function open(main, [id]) {
  const place = h("div");
  main.replaceChildren(h("h1", {}, "Films of ", runLink(id)), place);
  return openFilms(place, { id }, `/api/runs/${encodeURIComponent(id)}`);
}

/** A part of a run's page: films of a policy, or what a network predicts. */
export async function openFilms(place, run, path) {
  return (await get(`${path}/samples`)).length ? openSamples(place, path) : openEpisodes(place, path);
}

async function openEpisodes(place, path) {
  let films = [], chosen = [], follows = true;
  const shown = h("div", { class: "films" }), list = h("ul", { class: "film-list" });
  const players = new Map();
  const together = h("input", { type: "checkbox", checked: true });
  const move = (own, share) => { if (together.checked) for (const each of players.values()) if (each !== own) each.seek(share); };
  const all = h("button", { type: "button", onclick: () => players.forEach((each) => each.play()) }, "Play all");

  const draw = () => {
    for (const [name, player] of players) if (!chosen.includes(name)) { player.close(); players.delete(name); }
    shown.replaceChildren(...chosen.map((name) => {
      const film = films.find((each) => each.name === name), words = `version ${film.version}, episode ${film.episode}`;
      if (!players.has(name)) {
        const player = new Film(`${path}/films/${encodeURIComponent(name)}`, words, { onseek: (share) => move(player, share) });
        players.set(name, player);
        player.load().catch((error) => say(error.message));
      }
      return h("figure", {}, players.get(name).element, h("figcaption", {}, h("strong", {}, `version ${film.version}`), ` return ${number(Number(film.return))}`));
    }));
    const place = [...list.querySelectorAll("input")].indexOf(document.activeElement);
    list.replaceChildren(...films.map((film) => {
      const box = h("input", { type: "checkbox", checked: chosen.includes(film.name), onchange: () => choose(film.name, box.checked) });
      const words = ` version ${number(film.version)}, episode ${number(film.episode)}: return ${number(Number(film.return))}`;
      return h("li", {}, h("label", {}, box, words, h("span", { class: "muted" }, ` ${film.actor}, ${age(film.time)} ago`)));
    }));
    list.querySelectorAll("input")[place]?.focus({ preventScroll: true });
  };
  const choose = (name, isChosen) => {
    follows = false;
    const names = isChosen ? [...chosen, name].slice(-SHOWN) : chosen.filter((each) => each !== name);
    chosen = films.map((each) => each.name).filter((each) => names.includes(each));
    draw();
  };
  const refresh = async () => {
    const found = await get(`${path}/films`);
    if (found.length && JSON.stringify(found) === JSON.stringify(films)) return;
    films = found;
    if (follows) chosen = [...new Set([0, films.length >> 1, films.length - 1])].map((index) => films[index]?.name).filter(Boolean);
    else chosen = chosen.filter((name) => films.some((each) => each.name === name));
    if (!films.length) {
      place.replaceChildren(h("p", {}, "This run has no films and no predictions on this host. ", h("code", {}, "shoal run actor_learner --actors 4 record_every=50"),
        " films episodes of its first actor, ", h("code", {}, "shoal actor ... --record"), " those of another one. ",
        h("code", {}, "shoal run lenet evaluate.samples=16"), " shows what is predicted of the same samples."));
      return;
    }
    if (!shown.isConnected) place.replaceChildren(h("div", { class: "row" }, all, h("label", {}, together, " move together")), shown, list);
    draw();
  };
  const end = await poll(refresh, REFRESH_MS);
  return () => {
    end();
    players.forEach((each) => each.close());
  };
}

async function openSamples(place, path) {
  let sheets = [], turn = 0;
  const bar = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Evaluation", oninput: () => show() });
  const words = h("span", { role: "status" }), picture = h("div"), rows = h("div");
  const show = async () => {
    const sheet = sheets[bar.value], own = ++turn, url = `${path}/samples/${encodeURIComponent(sheet.name)}`;
    words.textContent = `epoch ${number(sheet.epoch)}, step ${number(sheet.step)}`;
    const content = await get(url);
    if (own !== turn) return;
    picture.replaceChildren(sheet.drawn ? h("img", { class: "sheet", src: `${url}.webp`, alt: `Predictions after ${words.textContent}; the same in the tables` }) : "");
    rows.replaceChildren(tabulate("The same samples", content.fixed), tabulate("The largest errors", content.worst));
  };
  const refresh = async () => {
    const found = await get(`${path}/samples`), follows = Number(bar.value) === sheets.length - 1 || !sheets.length;
    if (found.length === sheets.length) return;
    sheets = found;
    bar.max = sheets.length - 1;
    if (follows) bar.value = bar.max;
    await show();
  };
  place.replaceChildren(h("div", { class: "row" }, bar, words), picture, rows);
  return poll(refresh, REFRESH_MS);
}

function tabulate(title, samples) {
  const answer = (row) => (row.right === null ? row.answer : state(`${row.answer}${row.right ? "" : " (wrong)"}`, row.right ? "good" : "bad"));
  const shown = samples.some((row) => row.shown);
  return h("details", {}, h("summary", {}, title), table([...(shown ? ["input"] : []), "label", "answer", "loss"],
    samples.map((row) => [...(shown ? [row.shown] : []), row.label, answer(row), number(row.loss)]), title));
}
