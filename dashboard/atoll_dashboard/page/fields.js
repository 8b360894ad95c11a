// Filter fields with labels.

import { h, keyed, set, text } from "./dom.js";

const PATIENCE_MS = 250; // after the last keystroke
let made = 0;

function field(label, input) {
  made += 1;
  set(input, "id", `field-${made}`);
  return h("div", { class: "field" }, h("label", { for: `field-${made}` }, label), input);
}

/** A drop-down list; "" means all. label(value): the text of a value. */
export function choice(title, all, values, chosen, label = String) {
  const select = h("select", { onchange: () => chosen(select.value) });
  let wanted = "";
  function options(names) {
    const shown = ["", ...names];
    if (!shown.includes(wanted)) shown.push(wanted); // the value in the address may no longer exist
    keyed(select, shown, String, (name) => h("option", { value: name }), (node, name) => {
      text(node, name === "" ? all : label(name));
    });
    if (select.value !== wanted) select.value = wanted;
  }
  options(values);
  let known = values;
  return {
    node: field(title, select),
    options(names) {
      known = names;
      options(names);
    },
    set(value) {
      wanted = value;
      options(known);
    },
  };
}

/** A search field. It calls changed(words) after a pause in typing. */
export function search(label, changed) {
  const input = h("input", { type: "search", maxlength: 64, autocomplete: "off", spellcheck: "false" });
  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => changed(input.value.trim()), PATIENCE_MS);
  });
  return {
    node: field(label, input),
    set(value) {
      if (document.activeElement !== input && input.value !== value) input.value = value;
    },
  };
}
