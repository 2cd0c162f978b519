// A small table whose rows are replaced as they change: where one has scrolled to, and the link with the focus, stay.
import { h } from "./dom.js";

export class Rows {
  /** `heads`: words; `label`: what it is, for those who hear the page; `none`: the sentence in place of no rows. */
  constructor(heads, label, none = "") {
    this.body = h("tbody");
    this.none = h("p", { class: "muted" }, none);
    this.table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), this.body));
    this.element = h("div", { class: "spaced" }, this.table, this.none);
  }

  /** `rows`: lists of cells, which are elements, texts, or lists of them. */
  show(rows) {
    if (this.body.matches(":active")) return; // a click has begun there
    const focused = this.body.contains(document.activeElement) ? document.activeElement.hash : null;
    this.body.replaceChildren(...rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))));
    this.table.hidden = !rows.length && Boolean(this.none.textContent);
    this.none.hidden = !this.table.hidden;
    if (focused) [...this.body.querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
  }
}
