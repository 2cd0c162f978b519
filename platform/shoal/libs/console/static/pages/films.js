// How the policy of a run has played: its films, three of them side by side.
import { get } from "../lib/api.js";
import { h, say } from "../lib/dom.js";
import { Film } from "../lib/film.js";
import { age, number } from "../lib/format.js";

const SHOWN = 3, REFRESH_MS = 5000;

export async function open(main, [id]) {
  const place = h("div"), link = h("a", { href: `#/run/${encodeURIComponent(id)}` }, id);
  main.replaceChildren(h("h1", {}, "Films of ", link), place);
  return openFilms(place, { id }, `/api/runs/${encodeURIComponent(id)}`);
}

/** A part of a run's page. */
export async function openFilms(place, run, path) {
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
    list.replaceChildren(...films.map((film) => {
      const box = h("input", { type: "checkbox", checked: chosen.includes(film.name), onchange: () => choose(film.name, box.checked) });
      const words = ` version ${number(film.version)}, episode ${number(film.episode)}: return ${number(Number(film.return))}`;
      return h("li", {}, h("label", {}, box, words, h("span", { class: "muted" }, ` ${film.actor}, ${age(film.time)} ago`)));
    }));
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
      place.replaceChildren(h("p", {}, "This run has no films on this host. ", h("code", {}, "shoal run actor_learner --actors 4 record_every=50"),
        " films episodes of its first actor, and ", h("code", {}, "shoal actor ... --record"), " those of another one."));
      return;
    }
    if (!shown.isConnected) place.replaceChildren(h("div", { class: "row" }, all, h("label", {}, together, " move together")), shown, list);
    draw();
  };
  await refresh();
  const timer = setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, REFRESH_MS);
  return () => {
    clearInterval(timer);
    players.forEach((each) => each.close());
  };
}
