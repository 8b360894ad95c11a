// The checkpoints on the core's disk, and buttons to take a checkpoint and to download the model.

import { get } from "../api.js";
import { h } from "../dom.js";
import { bytes, clock, count, span } from "../format.js";
import { poller } from "../poll.js";
import { figures, makeTable, words } from "../table.js";
import * as dialogs from "../action_dialogs.js";

const EVERY_MS = 5000;

export function checkpointsView(section, actions) {
  let coreNow = () => Date.now() / 1000;
  const table = makeTable({
    caption: "Checkpoints",
    key: (each) => each.id,
    columns: [
      figures("Checkpoint", (each) => each.id),
      words("Taken (UTC)", (each) => clock(each.taken_at)),
      figures("Age", (each) => span(coreNow() - each.taken_at)),
      figures("Merges", (each) => count(each.merges)),
      figures("Size", (each) => bytes(each.size_bytes)),
      figures("Generation", (each) => each.generation),
    ],
  });
  const take = actions.button("Take a checkpoint", dialogs.checkpoint);
  const download = actions.button("Download the model", dialogs.model);
  const hint = "A checkpoint is a saved state of the run on the core's disk. The model contains only the published parameters.";
  section.append(
    h("div", { class: "bar" }, h("p", { class: "hint" }, hint), h("p", { class: "choices" }, take, download)),
    actions.problemLine(), table.node,
  );
  const page = poller(
    (signal) => get(["checkpoints"], {}, signal),
    (answer) => table.update(answer, "No checkpoint yet."),
    (error) => table.fail(error.message), EVERY_MS,
  );
  return {
    arrive: () => page.start(),
    leave: () => page.stop(),
    update: (feed) => {
      coreNow = feed.coreNow;
    },
    refresh: () => page.again(),
  };
}
