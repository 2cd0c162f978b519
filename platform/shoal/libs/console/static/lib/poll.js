// Readings that are repeated while a page is in sight.
import { stored } from "./api.js";
import { say } from "./dom.js";

/** Calls `read()` now, and again `ms` after each end while the page is in sight; returns what ends it. */
export async function poll(read, ms) {
  let timer, ended = false;
  const again = async () => {
    if (!document.hidden) await read().catch((error) => say(error.message));
    if (!ended) timer = setTimeout(again, ms);
  };
  await read();
  if (stored) return () => {};
  timer = setTimeout(again, ms);
  return () => { ended = true; clearTimeout(timer); };
}
