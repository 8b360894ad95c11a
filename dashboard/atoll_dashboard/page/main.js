// The page: stream, header, and the current view.

import { makeActions } from "./actions.js";
import { set, show } from "./dom.js";
import { startFeed } from "./live_stream.js";
import { makeHeader } from "./header.js";
import { startRouter } from "./router.js";
import { checkpointsView } from "./views/checkpoints.js";
import { eventsView } from "./views/events.js";
import { fragmentsView } from "./views/fragments.js";
import { learnerView } from "./views/learner.js";
import { learnersView } from "./views/learners.js";
import { overviewView } from "./views/overview.js";
import { receiptsView } from "./views/receipts.js";
import { roundsView } from "./views/rounds.js";

const MAKERS = {
  overview: overviewView,
  learners: learnersView,
  learner: learnerView,
  rounds: roundsView,
  receipts: receiptsView,
  fragments: fragmentsView,
  checkpoints: checkpointsView,
  events: eventsView,
};

const sectionOf = (name) => document.getElementById(`view-${name}`);
const actions = makeActions(() => shown?.view.refresh());
const updateHeader = makeHeader();
const made = {};
let feed = null;
let shown = null;

/** A view is {arrive(place), leave(), update(feed), refresh(), optional reset()}, created on first use. */
function arrive(place, first) {
  const view = (made[place.view] ??= MAKERS[place.view](sectionOf(place.view), actions));
  const moved = shown?.name !== place.view || shown?.place.name !== place.name;
  if (moved) {
    shown?.view.leave();
    for (const name of Object.keys(MAKERS)) show(sectionOf(name), name === place.view);
  }
  shown = { name: place.view, place, view };
  view.arrive(place);
  if (feed?.now) view.update(feed);
  const current = place.view === "learner" ? "learners" : place.view;
  for (const link of document.querySelectorAll("#nav a")) {
    const here = link.getAttribute("href") === `#${current}`;
    set(link, "aria-current", here ? "page" : null);
    if (here && moved) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  title();
  if (moved && !first) {
    scrollTo(0, 0);
    sectionOf(place.view).querySelector("h2").focus({ preventScroll: true });
  }
}

function title() {
  const { name, place } = shown;
  const words = name === "learner" ? place.name : name.charAt(0).toUpperCase() + name.slice(1);
  const wanted = [words, feed?.now?.run.run, "Atoll"].filter(Boolean).join(" · ");
  if (document.title !== wanted) document.title = wanted;
}

function heard(current) {
  feed = current;
  updateHeader(current);
  if (current.now === null || document.hidden) return; // a hidden page is not drawn
  actions.update(current.now.run);
  shown?.view.update(current);
  title();
}

function newCore(run) {
  actions.say(`The core restarted: generation ${run.generation}, epoch ${run.epoch}.`);
  for (const view of Object.values(made)) view.reset?.();
  shown?.view.refresh();
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // keeps the address, which names the view
  document.getElementById("main").focus();
});
startRouter(arrive);
startFeed(heard, newCore);
