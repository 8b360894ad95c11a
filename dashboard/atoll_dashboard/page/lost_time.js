// Goodput as one stacked bar: the useful part, and the lost time by cause.

import { h, keyed, set, text } from "./dom.js";
import { percent, span } from "./format.js";
import { causeWords, CAUSES } from "./labels.js";

/** Provisioned learner-seconds: the useful part, and the lost time by cause, with text. */
export function lostBar() {
  const bar = h("div", { class: "stack", role: "img" });
  const list = h("ul", { class: "causes" });
  const node = h("div", { class: "lost" }, bar, list);
  return {
    node,
    update(useful, provisioned, lost) {
      const newer = Object.keys(lost).filter((cause) => !CAUSES.includes(cause));
      const causes = [...CAUSES.filter((cause) => cause in lost), ...newer];
      const parts = causes.map((cause) => ({ cause, seconds: lost[cause], words: causeWords(cause) }));
      const all = [{ cause: "useful", seconds: useful, words: "useful" }, ...parts];
      keyed(bar, all, (part) => part.cause, piece, (node_, part) => {
        node_.style.flexGrow = Math.max(0, part.seconds);
        node_.hidden = !(part.seconds > 0);
      });
      const figures = ({ words, seconds }) => `${words} ${span(seconds)}, ${percent(seconds, provisioned)}`;
      set(bar, "aria-label", `${span(provisioned)} provisioned: ${all.map(figures).join("; ")}`);
      keyed(list, all, (part) => part.cause, causeRow, (row, part) => {
        text(row.children[1], part.words);
        text(row.children[2], span(part.seconds));
        text(row.children[3], percent(part.seconds, provisioned));
      });
    },
  };
}

function piece(part) {
  return h("span", { class: `part part-${part.cause}` });
}

function causeRow(part) {
  const swatch = h("i", { class: `swatch part-${part.cause}` });
  return h("li", null, swatch, h("span"), h("b"), h("span", { class: "share" }));
}
