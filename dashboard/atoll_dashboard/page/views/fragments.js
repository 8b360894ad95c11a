// The fragments view: versions, and what each fragment waits for.

import { get } from "../api.js";
import { bytes, clipped, count, short, span } from "../format.js";
import { poller } from "../poll.js";
import { figures, makePager, makeTable, words } from "../table.js";

const LIMIT = 100;
const EVERY_MS = 2000;

const columns = [
  figures("Fragment", (each) => each.fragment),
  figures("Shard", (each) => each.shard, { minor: true }),
  figures("Version", (each) => count(each.version)),
  figures("Cycle", (each) => count(each.cycle), { minor: true }),
  figures("Parameters", (each) => short(each.parameters)),
  figures("Size in float32", (each) => bytes(each.size_bytes)),
  figures("Age of the version", (each) => span(each.published_age_s)),
  words("Waiting for", (each) => clipped(each.state), { wide: true }),
];

export function fragmentsView(section) {
  let offset = 0;
  const table = makeTable({ caption: "Fragments", columns, key: (each) => each.fragment });
  const pager = makePager("fragments", LIMIT, (wanted) => {
    offset = wanted;
    page.again();
  });
  section.append(table.node, pager.node);
  const page = poller((signal) => get(["fragments"], { offset, limit: LIMIT }, signal), (answer) => {
    table.update(answer.items, "The run has no parameters yet. The first learner uploads them.");
    pager.update(answer);
  }, (error) => table.fail(error.message), EVERY_MS);
  return { arrive: () => page.start(), leave: () => page.stop(), update: () => {}, refresh: () => page.again() };
}
