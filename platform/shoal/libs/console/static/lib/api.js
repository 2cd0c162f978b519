// Calls of the console's own server.

async function answer(response) {
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : null;
  let problem = text;
  try { problem = JSON.parse(text).error; } catch { /* plain text */ }
  throw Object.assign(new Error(problem), { status: response.status });
}

/** What a path answers. `query`: names with a value or a list of values. */
export async function get(path, query = {}, signal = undefined) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const each of [value].flat()) parameters.append(name, each);
  const search = parameters.toString();
  return answer(await fetch(path + (search ? `?${search}` : ""), { signal }));
}

/** Asks for a change; needs a session. */
export async function send(method, path, content = {}) {
  const body = JSON.stringify(content);
  return answer(await fetch(path, { method, body, headers: { "content-type": "application/json" } }));
}

/** Calls `take(news)` for each event of a stream, while the page is in sight: a browser opens few connections. Calls
 * `again()` when it is in sight again, and every three seconds where the server has no stream left. Returns what ends it. */
export function follow(query, take, again = () => {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const each of [value].flat()) parameters.append(name, each);
  let source, timer;
  const open = () => {
    source = new EventSource(`/api/stream?${parameters}`);
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
