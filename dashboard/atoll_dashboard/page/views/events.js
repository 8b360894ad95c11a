// The events view, newest first.

import { get } from "../api.js";
import { h, keyed, set, setSign, show, sign, text } from "../dom.js";
import { choice } from "../fields.js";
import { clipped, moment } from "../format.js";
import { poller } from "../poll.js";
import { keepQuery } from "../router.js";
import { KINDS, kindSign, learnerLink } from "../labels.js";

const MOST = 500;
const LIMIT = 200;

export function eventsView(section) {
  let events = [];
  let kind = "";
  let newest = 0; // number of the newest event in the stream
  const kinds = choice("Kind", "All kinds", KINDS, (value) => {
    kind = value;
    keepQuery("events", { kind });
    draw();
  });
  const list = h("ol", { class: "events", reversed: true, "aria-label": "Events, newest first" });
  const empty = h("p", { class: "empty" });
  section.append(h("div", { class: "filters" }, kinds.node), list, empty);
  const asked = () => events[0]?.number ?? 0;
  const page = poller(
    (signal) => get(["events"], { after: asked(), limit: LIMIT }, signal), take,
    (error) => {
      show(empty, true);
      text(empty, error.message);
    }, null,
  );

  function take(answer) {
    const last = asked();
    events = [...answer.filter((event) => event.number > last), ...events].slice(0, MOST);
    draw();
  }

  function draw() {
    const wanted = events.filter((event) => kind === "" || event.kind === kind);
    keyed(list, wanted, (event) => event.number, makeRow, updateRow);
    show(list, wanted.length > 0);
    show(empty, wanted.length === 0);
    text(empty, events.length > 0 ? "No event of this kind." : "No events yet.");
  }

  function reset() {
    events = [];
  }

  return {
    arrive({ query }) {
      kind = KINDS.includes(query.kind) ? query.kind : "";
      kinds.set(kind);
      draw();
      page.start();
    },
    leave: () => page.stop(),
    update(feed) {
      if (feed.now.last_event < newest) reset(); // a restarted dashboard counts from 1
      if (feed.now.last_event !== newest) {
        newest = feed.now.last_event;
        page.again();
      }
    },
    refresh: () => page.again(),
    reset,
  };
}

function makeRow() {
  const kind = h("span", { class: "signed" }, sign("core"), h("span"));
  return h("li", null, h("time"), kind, h("span", { class: "event-words" }, h("a"), h("span")));
}

function updateRow(row, event) {
  const [at, kind, said] = row.children;
  text(at, moment(event.at));
  set(at, "datetime", new Date(event.at * 1000).toISOString());
  setSign(kind.firstChild, kindSign(event.kind));
  text(kind.lastChild, event.kind);
  show(said.firstChild, event.learner !== "");
  text(said.firstChild, event.learner);
  set(said.firstChild, "href", event.learner === "" ? null : learnerLink(event.learner));
  text(said.lastChild, `${event.learner === "" ? "" : " "}${clipped(event.text, 400)}`);
}
