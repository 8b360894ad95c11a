// The stream of the run's current state. It reconnects automatically and records the age of its data.

const QUIET_S = 10; // messages arrive every second; without one for this long, the stream is dead
const AGAIN_S = 3;

const seconds = () => performance.now() / 1000;

/** Calls listener(feed) for each message and every second, and onCore() when the run, generation or epoch changed. */
export function startFeed(listener, onCore) {
  const feed = { now: null, brokenAt: null, why: "", age, coreNow };
  let source = null;
  let heardAt = seconds();
  let openedAt = seconds();

  /** The age of the displayed data, in seconds. */
  function age() {
    return feed.now === null ? seconds() - openedAt : feed.now.run.age_s + seconds() - heardAt;
  }

  /** The estimated time on the core's clock. All displayed ages are relative to this time. */
  function coreNow() {
    const { at } = feed.now?.run ?? { at: 0 };
    return at > 0 ? at + age() : Date.now() / 1000;
  }

  function open() {
    source?.close();
    openedAt = seconds();
    source = new EventSource("api/live");
    source.onmessage = heard;
    source.onerror = () => broken("the connection to the dashboard was lost");
  }

  function heard(event) {
    let now;
    try {
      now = JSON.parse(event.data);
    } catch {
      broken("the dashboard sent invalid JSON");
      return;
    }
    const before = feed.now?.run;
    feed.now = now;
    feed.brokenAt = null;
    heardAt = seconds();
    const changed = ["run", "generation", "epoch"].some((name) => before && before[name] !== now.run[name]);
    if (changed) onCore(now.run);
    listener(feed);
  }

  function broken(why) {
    feed.brokenAt ??= Date.now() / 1000;
    feed.why = why;
    listener(feed);
  }

  function tick() {
    if (document.hidden) return;
    const quiet = seconds() - Math.max(heardAt, openedAt);
    if (quiet > QUIET_S) {
      broken("the dashboard has stopped sending data");
      open();
    } else if (source.readyState === EventSource.CLOSED && seconds() - openedAt > AGAIN_S) {
      open(); // browsers do not reconnect after other answers, such as a proxy's 502
    }
    listener(feed);
  }

  open();
  setInterval(tick, 1000);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    else source.close(); // frees the connection: browsers allow few per host
  });
  return feed;
}
