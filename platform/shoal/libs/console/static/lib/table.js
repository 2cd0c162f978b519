// A table of many rows: only those in sight are elements. Sorted by a click on a heading.
import { h } from "./dom.js";

const ROW_PIXELS = 30, MARGIN_ROWS = 20;

/** `columns`: [{name, value(row) to sort by, cell(row) an element or a text, number: whether it stands to the right}].
 * `key(row)`: a text that names a row: the focus stays in it when rows are replaced. */
export class Table {
  constructor(columns, { label = "", onsort = () => {}, key = () => "" } = {}) {
    this.columns = columns;
    this.key = key;
    this.rows = [];
    this.sorted = null;
    this.onsort = onsort;
    this.body = h("tbody");
    this.heads = columns.map((column, index) => h("th", { scope: "col", class: column.number ? "number" : null },
      h("button", { type: "button", onclick: () => this.sort(index) }, column.name)));
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, onscroll: () => this.draw() },
      h("table", {}, h("thead", {}, h("tr", {}, this.heads)), this.body));
  }

  show(rows) {
    this.rows = rows;
    this.arrange();
  }

  sort(index) {
    this.sorted = { index, descending: this.sorted?.index === index ? !this.sorted.descending : Boolean(this.columns[index].number) };
    this.arrange();
    this.onsort(this.sorted);
  }

  arrange() {
    this.shown = this.rows;
    this.heads.forEach((head, index) => head.setAttribute("aria-sort",
      this.sorted?.index !== index ? "none" : this.sorted.descending ? "descending" : "ascending"));
    if (this.sorted) {
      const value = this.columns[this.sorted.index].value, sign = this.sorted.descending ? -1 : 1;
      const keyed = this.rows.map((row) => [value(row), row]);
      keyed.sort(([a], [b]) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : a < b ? -sign : sign));
      this.shown = keyed.map(([, row]) => row);
    }
    this.drawn = null;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_PIXELS) - MARGIN_ROWS);
    const count = Math.ceil((this.element.clientHeight || 800) / ROW_PIXELS) + 2 * MARGIN_ROWS;
    if (this.drawn === first) return;
    this.drawn = first;
    const gap = (rows) => {
      const row = h("tr", { "aria-hidden": "true" });
      row.style.height = `${rows * ROW_PIXELS}px`;
      return row;
    };
    const visible = this.shown.slice(first, first + count).map((row) => {
      const element = h("tr", {}, this.columns.map((column) => h("td", { class: column.number ? "number" : null }, column.cell(row))));
      element.style.height = `${ROW_PIXELS}px`;
      element.dataset.key = this.key(row);
      return element;
    });
    const held = document.activeElement?.closest("tr[data-key]"), controls = (row) => [...row.querySelectorAll("a, button, input")];
    const place = held && this.body.contains(held) ? controls(held).indexOf(document.activeElement) : -1;
    this.body.replaceChildren(gap(first), ...visible, gap(Math.max(0, this.shown.length - first - count)));
    const again = place < 0 ? null : visible.find((row) => row.dataset.key === held.dataset.key);
    if (again) controls(again)[place]?.focus({ preventScroll: true });
  }
}
