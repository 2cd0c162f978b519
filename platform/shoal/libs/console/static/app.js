// Pages by the part of the address behind #.
import { get } from "./lib/api.js";
import { h, say } from "./lib/dom.js";
import * as cluster from "./pages/cluster.js";
import * as compare from "./pages/compare.js";
import * as endpoints from "./pages/endpoints.js";
import * as models from "./pages/models.js";
import * as films from "./pages/films.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";
import * as tries from "./pages/try.js";

// Each page has open(main, parts, query), which draws it, and returns what ends it.
const PAGES = { runs, run, compare, films, models, endpoints, try: tries, cluster };
const LINKS = [["runs", "Runs"], ["models", "Models"], ["endpoints", "Endpoints"], ["cluster", "Cluster"]];
const BELONGS = { run: "runs", compare: "runs", films: "runs", try: "endpoints" };

const main = document.getElementById("main");
let close = () => {}, turn = 0;

async function show() {
  const [path, search] = (location.hash.slice(2) || "runs").split("?");
  const [name, ...parts] = path.split("/").map(decodeURIComponent);
  const page = PAGES[name] ?? runs, own = ++turn;
  close();
  close = () => {};
  document.querySelectorAll("#pages a").forEach((link) => {
    if (link.hash === `#/${BELONGS[name] ?? name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  document.title = `${parts[0] ?? LINKS.find(([word]) => word === name)?.[1] ?? name} · Shoal`;
  try {
    const place = { replaceChildren: (...all) => own === turn && main.replaceChildren(...all) }; // one that comes late draws nothing
    const closing = await page.open(place, parts, new URLSearchParams(search ?? ""));
    if (own === turn) close = closing ?? (() => {});
    else closing?.();
  } catch (error) {
    if (own === turn) main.replaceChildren(h("h1", {}, "This cannot be shown"), h("p", {}, error.message));
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

async function showSession() {
  const { may_write: mayWrite } = await get("/api/session");
  const button = document.getElementById("session"), login = document.getElementById("login");
  button.textContent = mayWrite ? "Log out" : "Log in";
  button.onclick = async () => {
    if (!mayWrite) return login.showModal();
    await fetch("/logout", { method: "POST" });
    return showSession();
  };
  document.getElementById("login-close").onclick = () => login.close();
  login.querySelector("form").onsubmit = (event) => {
    event.preventDefault(); // the page stays as it is
    logIn(login, event.target).catch((error) => say(error.message));
  };
}

async function logIn(login, form) {
  const answer = await fetch("/login", { method: "POST", body: new URLSearchParams(new FormData(form)) });
  form.reset();
  document.getElementById("login-problem").textContent = answer.ok ? "" : await answer.text();
  if (!answer.ok) return;
  login.close();
  await showSession();
}

document.getElementById("pages").append(...LINKS.map(([word, title]) => h("a", { href: `#/${word}` }, title)));
setTheme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
addEventListener("hashchange", show);
showSession().catch((error) => say(error.message));
show();
