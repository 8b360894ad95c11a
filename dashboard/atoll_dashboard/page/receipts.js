// The columns of receipts, for the receipts view and the learner view.

import { bytes, clock, count, decimal, short } from "./format.js";
import { figures, linked, signed, words } from "./table.js";
import { learnerLink } from "./labels.js";

const pendingOr = (receipt, value) => (receipt.fate === "merged" ? value : "");

/** whose: whether to include the learner's name. */
export function receiptColumns(whose) {
  return [
    figures("Number", (receipt) => count(receipt.number)),
    words("Accepted (UTC)", (receipt) => clock(receipt.accepted_at)),
    whose && linked("Learner", (receipt) => receipt.learner, (receipt) => learnerLink(receipt.learner)),
    figures("Fragment", (receipt) => receipt.fragment),
    signed("Fate", (receipt) => receipt.fate),
    figures("Version", (receipt) => pendingOr(receipt, receipt.version)),
    figures("Staleness", (receipt) => pendingOr(receipt, decimal(receipt.staleness, 2))),
    figures("Weight", (receipt) => pendingOr(receipt, decimal(receipt.weight, 3))),
    figures("Tokens", (receipt) => short(receipt.tokens)),
    figures("Steps", (receipt) => count(receipt.steps), { minor: true }),
    figures("Size", (receipt) => bytes(receipt.size_bytes)),
    figures("Norm", (receipt) => decimal(receipt.norm, 3), { minor: true }),
    figures("Clipped to", (receipt) => (receipt.clipped < 1 ? decimal(receipt.clipped, 2) : ""), { minor: true }),
    words("Reason", (receipt) => receipt.reason, { wide: true }),
  ].filter(Boolean);
}
