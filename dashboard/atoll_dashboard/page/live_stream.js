// The stream of what is now. It comes back by itself, and always says how old what it has is.

const QUIET_S = 10; // the stream says something each second: after this long it is dead, whatever the browser thinks
const AGAIN_S = 3;

const seconds = () => performance.now() / 1000;

/** listener(feed) is called with each message and each second. onCore: another core process answers. */
export function startFeed(listener, onCore) {
  const feed = { now: null, brokenAt: null, why: "", age, coreNow };
  let source = null;
  let heardAt = seconds();
  let openedAt = seconds();

  /** How old what is shown is, in seconds. */
  function age() {
    return feed.now === null ? seconds() - openedAt : feed.now.run.age_s + seconds() - heardAt;
  }

  /** The core's clock, as far as it is known here: ages of its times are counted from it. */
  function coreNow() {
    const { at } = feed.now?.run ?? { at: 0 };
    return at > 0 ? at + age() : Date.now() / 1000;
  }

  function open() {
    source?.close();
    openedAt = seconds();
    source = new EventSource("api/live");
    source.onmessage = heard;
    source.onerror = () => broken("the stream from the dashboard is cut");
  }

  function heard(event) {
    let now;
    try {
      now = JSON.parse(event.data);
    } catch {
      broken("the dashboard sent what is not JSON");
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
      broken("the dashboard says nothing");
      open();
    } else if (source.readyState === EventSource.CLOSED && seconds() - openedAt > AGAIN_S) {
      open(); // the browser gives up after an answer that is no stream, such as a proxy's 502
    }
    listener(feed);
  }

  open();
  setInterval(tick, 1000);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    else source.close(); // a browser has few connections to a host, and nobody looks
  });
  return feed;
}
