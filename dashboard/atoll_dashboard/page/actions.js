// Operator actions. Each action asks for confirmation and needs a token, which the page keeps only in memory.

import { action, Refused } from "./api.js";
import { h, set, show, text } from "./dom.js";

const SAID_MS = 15000;

/** done(): refreshes the view after an action. */
export function makeActions(done) {
  const dialog = document.getElementById("confirm");
  const said = document.getElementById("said");
  const buttons = new Map(); // button -> null; line with the reason why buttons are disabled -> "line"
  let run = null;
  let token = ""; // stored nowhere else
  let asked = null;
  let quiet = 0;

  const title = h("h2", { id: "confirm-title" });
  const words = h("div", { id: "confirm-words" });
  const reason = h("input", { id: "confirm-reason", type: "text", maxlength: 200, autocomplete: "off" });
  const reasonRow = h("div", { class: "field" }, h("label", { for: "confirm-reason" }, "Reason"), reason);
  const field = h("input", {
    id: "confirm-token", type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": "token-words",
  });
  const tokenWords = "Create a token with `atoll token NAME`. The page keeps the token until you close or reload the page.";
  const tokenRow = h(
    "div", { class: "field" }, h("label", { for: "confirm-token" }, "Operator's token"), field,
    h("p", { class: "hint", id: "token-words" }, tokenWords),
  );
  const wrong = h("p", { class: "wrong", role: "alert" });
  const yes = h("button", { type: "button", class: "chief", onclick: send });
  const no = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  dialog.append(title, words, reasonRow, tokenRow, wrong, h("div", { class: "choices" }, no, yes));
  for (const input of [reason, field]) {
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") send();
    });
  }
  dialog.addEventListener("close", () => {
    if (asked !== null) field.value = "";
    asked = null;
  });

  function open(request) {
    asked = request;
    text(title, request.title);
    words.replaceChildren(...request.words.map((line) => h("p", null, line)));
    show(reasonRow, request.reason);
    reason.value = "";
    field.value = token;
    text(wrong, "");
    text(yes, request.yes);
    yes.classList.toggle("danger", Boolean(request.danger));
    yes.disabled = false;
    dialog.showModal();
    (request.reason ? reason : token === "" ? field : no).focus();
  }

  function complaint() {
    if (asked.reason && reason.value.trim() === "") return [reason, "Give a reason. It is recorded with the run."];
    return field.value === "" ? [field, "Enter an operator's token."] : null;
  }

  async function send() {
    if (yes.disabled) return; // the request is running
    const missing = complaint();
    if (missing !== null) {
      text(wrong, missing[1]);
      missing[0].focus();
      return;
    }
    const request = asked;
    token = field.value;
    yes.disabled = true;
    text(wrong, "");
    try {
      const answer = await action(request.action, token, request.body(reason.value.trim()));
      if (asked === request) dialog.close();
      request.then ? request.then(answer) : say(answer.said);
      done();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (asked === request) text(wrong, error.message);
      else say(error.message);
    } finally {
      if (asked === request || asked === null) yes.disabled = false;
    }
  }

  function say(line) {
    clearTimeout(quiet);
    text(said, line);
    quiet = setTimeout(() => text(said, ""), SAID_MS);
  }

  /** A button for an action. request() returns the dialog when the button is pressed. */
  function button(label, request, kind = "") {
    const made = h("button", { type: "button", class: kind, onclick: () => open(request()) }, label);
    buttons.set(made, null);
    refresh(made);
    return made;
  }

  /** A line with the reason why actions are not possible, or an empty line. */
  function problemLine() {
    const line = h("p", { class: "hint actions-problem", hidden: true });
    buttons.set(line, "line");
    refresh(line);
    return line;
  }

  function refresh(node) {
    const able = run !== null && run.actions;
    if (buttons.get(node) === null) {
      set(node, "disabled", !able);
      return;
    }
    show(node, run !== null && !able);
    if (run !== null) text(node, able ? "" : run.actions_problem);
  }

  function update(current) {
    run = current;
    for (const node of buttons.keys()) refresh(node);
  }

  return { button, problemLine, update, say };
}
