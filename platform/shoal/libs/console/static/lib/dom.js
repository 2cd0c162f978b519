// Elements from data. Text is always text: nothing of a record is ever read as HTML.
import { stored } from "./api.js";
import { age, duration } from "./format.js";

/** An element: `h("a", {href: "#/runs", onclick: f}, "Runs")`. Children are elements, texts, lists of them, or null. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Shows a sentence for some seconds, and to those who hear the page. */
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { said.textContent = ""; }, 6000);
}

/** A word of state, with its colour. */
export function state(word, tone = word) {
  return h("span", { class: `state ${tone}` }, word);
}

/** How long a run took; of one that is still going it counts on while it is shown. */
export function took(run) {
  const going = () => run.status === "running" && !stored, word = () => (going() ? age(run.created_at) : duration(run.duration_s));
  const element = h("span", {}, word());
  const timer = going() ? setInterval(() => {
    if (element.isConnected && going()) element.textContent = word();
    else clearInterval(timer);
  }, 1000) : null;
  return element;
}

/** A list of names and values. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** A link to the page of a run. */
export const runLink = (id) => (stored ? id : h("a", { href: `#/run/${encodeURIComponent(id)}` }, id));
