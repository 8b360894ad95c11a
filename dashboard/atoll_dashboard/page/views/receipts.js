// The receipts view: the fate of each contribution, newest first.

import { get } from "../api.js";
import { h, set } from "../dom.js";
import { choice, search } from "../fields.js";
import { poller } from "../poll.js";
import { receiptColumns } from "../receipts.js";
import { keepQuery } from "../router.js";
import { makeTable } from "../table.js";
import { FATES } from "../labels.js";

const LIMIT = 50;
const EVERY_MS = 2000;

export function receiptsView(section) {
  let asked = { learner: "", fate: "", before: null };
  let older = null;
  const learner = search("Learner's name", (words) => change({ learner: words }));
  const fate = choice("Fate", "All fates", FATES, (value) => change({ fate: value }));
  const table = makeTable({
    caption: "Receipts", columns: receiptColumns(true), key: (receipt) => `${receipt.shard}:${receipt.number}`,
    stacked: true,
  });
  const newest = h("button", { type: "button", onclick: () => change({}) }, "Newest receipts");
  const back = h("button", { type: "button", onclick: () => change({ before: older }) }, "Older receipts");
  section.append(
    h("div", { class: "filters" }, learner.node, fate.node), table.node,
    h("div", { class: "pager" }, newest, back),
  );
  const page = poller((signal) => get(["receipts"], { ...asked, limit: LIMIT }, signal), (answer) => {
    table.update(answer.items, "No matching receipts.");
    older = answer.before;
    showAsked();
  }, (error) => table.fail(error.message), EVERY_MS);

  function change(part) {
    asked = { ...asked, before: null, ...part };
    keepQuery("receipts", asked);
    showAsked();
    page.again();
  }

  function showAsked() {
    learner.set(asked.learner);
    fate.set(asked.fate);
    newest.disabled = asked.before === null;
    back.disabled = older === null;
    set(newest, "title", asked.before === null ? "These are the newest receipts" : null);
  }

  return {
    arrive({ query }) {
      asked = {
        learner: query.learner ?? "", fate: FATES.includes(query.fate) ? query.fate : "",
        before: /^[\d:,]+$/.test(query.before) ? query.before : null,
      };
      showAsked();
      page.start();
    },
    leave: () => page.stop(),
    update: () => {},
    refresh: () => page.again(),
  };
}
