// From what a model was made of to the requests that it answers, as a picture in which each node opens its page.
import { h } from "./dom.js";

const COLUMNS = [["run", "base"], ["checkpoint"], ["version"], ["alias"], ["endpoint"], ["requests"]];
const HEADINGS = ["Run", "Weights", "Version", "Alias", "Endpoint", "Requests"];
const WIDTH = 176, HEIGHT = 46, STEP_X = 212, STEP_Y = 60, TOP = 28, LETTERS = 23;

/** An element of SVG, as `h` makes those of HTML. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const shorten = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Places for the nodes of each column: versions one below the other, others beside what they belong to. */
export function arrange(nodes, edges) {
  const columns = COLUMNS.map((kinds) => nodes.filter((node) => kinds.includes(node.kind)));
  const rows = new Map(columns[2].map((node, index) => [node.id, index]));
  const place = (column, neighbours) => {
    const wanted = column.map((node, index) => {
      const near = neighbours(node.id).filter((id) => rows.has(id)).map((id) => rows.get(id));
      return [node.id, near.length ? mean(near) : index];
    }).sort(([, a], [, b]) => a - b);
    let least = 0;
    for (const [id, row] of wanted) {
      rows.set(id, Math.max(row, least));
      least = rows.get(id) + 1;
    }
  };
  const before = (id) => edges.filter((edge) => edge[1] === id).map((edge) => edge[0]);
  const after = (id) => edges.filter((edge) => edge[0] === id).map((edge) => edge[1]);
  [1, 0].forEach((index) => place(columns[index], after));
  [3, 4, 5].forEach((index) => place(columns[index], before));
  return { columns, rows };
}

/** The line between two boxes; below the boxes of the columns that it passes. */
function drawEdge(x0, y0, x1, y1) {
  const curve = (xa, ya, xb, yb) => `C${(xa + xb) / 2},${ya} ${(xa + xb) / 2},${yb} ${xb},${yb}`;
  const half = HEIGHT / 2, left = x0 + WIDTH, begin = `M${left},${y0 + half}`;
  if (x1 - x0 <= STEP_X) return `${begin} ${curve(left, y0 + half, x1, y1 + half)}`;
  const low = y0 + HEIGHT + (STEP_Y - HEIGHT) / 2, from = x0 + STEP_X, to = x1 - STEP_X + WIDTH;
  return `${begin} ${curve(left, y0 + half, from, low)} L${to},${low} ${curve(to, low, x1, y1 + half)}`;
}

/** The picture of `{nodes, edges}`. */
export function drawLineage({ nodes, edges }, label) {
  const { columns, rows } = arrange(nodes, edges);
  const used = columns.map((column, index) => [column, HEADINGS[index]]).filter(([column]) => column.length);
  const places = new Map(used.flatMap(([column], index) =>
    column.map((node) => [node.id, [4 + index * STEP_X, TOP + rows.get(node.id) * STEP_Y]])));
  const width = used.length * STEP_X, height = TOP + (1 + Math.max(...rows.values())) * STEP_Y;
  const lines = edges.filter((edge) => edge.every((id) => places.has(id)))
    .map(([from, to]) => s("path", { d: drawEdge(...places.get(from), ...places.get(to)) }));
  const boxes = nodes.map((node) => {
    const [x, y] = places.get(node.id);
    return s("a", { href: `#/${node.to}`, class: node.kind },
      s("title", {}, `${node.kind}: ${node.label} ${node.note}`.trim()),
      s("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 6 }),
      s("text", { x: x + 10, y: y + (node.note ? 19 : 28) }, shorten(node.label)),
      node.note ? s("text", { x: x + 10, y: y + 36, class: "about" }, shorten(node.note)) : null);
  });
  const headings = used.map(([, name], index) => s("text", { x: 4 + index * STEP_X, y: 16, class: "about" }, name));
  return h("div", { class: "scroll lineage", tabindex: 0, role: "region", "aria-label": label },
    s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label }, headings, lines, boxes));
}
