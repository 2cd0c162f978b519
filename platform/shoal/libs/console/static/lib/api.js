// Calls of the console's own server; in a report the answers are in the page.

const inside = document.getElementById("stored");
/** The answers of a report by their paths, and the `runs` that it is of; null in the console. */
export const stored = inside && JSON.parse(inside.textContent);

async function answer(response) {
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : null;
  let problem = text;
  try { problem = JSON.parse(text).error; } catch { /* plain text */ }
  throw Object.assign(new Error(problem), { status: response.status });
}

function write(query) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const each of [value].flat()) parameters.append(name, each);
  return parameters.size ? `?${parameters}` : "";
}

/** What a path answers. `query`: names with a value or a list of values. */
export async function get(path, query = {}) {
  return stored ? stored[decodeURIComponent(path)] : answer(await fetch(path + write(query)));
}

/** Asks for a change; needs a session. */
export async function send(method, path, content = {}) {
  return answer(await fetch(path, { method, body: JSON.stringify(content), headers: { "content-type": "application/json" } }));
}

/** Sends a text or a file as it is; needs a session. */
export async function post(path, body) {
  return answer(await fetch(path, { method: "POST", body }));
}

/** Calls `take(news)` for each event of a stream, while the page is in sight: a browser opens few connections. Calls
 * `again()` when it is in sight again, and every three seconds where the server has no stream left. Returns what ends it. */
export function follow(query, take, again = () => {}) {
  if (stored) return () => {};
  let source, timer;
  const open = () => {
    source = new EventSource(`/api/stream${write(query)}`);
    source.addEventListener("news", (event) => take(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      clearInterval(timer);
      if (source.readyState === EventSource.CLOSED) timer = setInterval(again, 3000);
    });
  };
  const close = () => { source?.close(); clearInterval(timer); };
  const turn = () => {
    close();
    if (document.hidden) return;
    open();
    again();
  };
  document.addEventListener("visibilitychange", turn);
  if (!document.hidden) open();
  return () => { close(); document.removeEventListener("visibilitychange", turn); };
}
