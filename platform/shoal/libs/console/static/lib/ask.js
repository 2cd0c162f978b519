// Questions before a change.
import { h, say } from "./dom.js";

/** Asks once; resolves to whether the answer was yes. */
export function ask(question, action, detail = "") {
  return new Promise((resolve) => {
    const end = (answer) => { dialog.close(); dialog.remove(); resolve(answer); };
    const dialog = h("dialog", { "aria-label": question, oncancel: () => end(false) },
      h("h2", {}, question), detail ? h("p", {}, detail) : null,
      h("p", { class: "row" }, h("button", { type: "button", onclick: () => end(true) }, action),
        h("button", { type: "button", class: "quiet", onclick: () => end(false) }, "Cancel")));
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Says why something failed; asks one who has not logged in to do that. */
export function complain(error) {
  if (error.status === 401) document.getElementById("login").showModal();
  say(error.message);
}

/** A button that asks, and then does; says what came of it. `change()` returns the sentence. */
export function changing(label, question, action, change) {
  const button = h("button", { type: "button", onclick: async () => {
    if (!(await ask(question(), action))) return;
    button.disabled = true;
    try {
      say(await change());
    } catch (error) {
      complain(error);
    } finally {
      button.disabled = false;
    }
  } }, label);
  return button;
}
