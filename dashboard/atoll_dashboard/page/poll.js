// Polling, with at most one request at a time, and none in a hidden tab.

/** ask(signal): returns a promise of the answer. done(answer), failed(error): called with the result. */
export function poller(ask, done, failed, everyMs) {
  let timer = 0;
  let running = false;
  let asking = null;

  async function round() {
    clearTimeout(timer);
    if (!running || document.hidden) return;
    const mine = new AbortController();
    asking?.abort();
    asking = mine;
    try {
      const answer = await ask(mine.signal);
      if (asking === mine) done(answer);
    } catch (error) {
      if (asking === mine && error.name !== "AbortError") failed(error);
    }
    if (asking !== mine) return; // a newer request has started
    asking = null;
    if (running && everyMs !== null) timer = setTimeout(round, everyMs);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && running) round();
  });
  return {
    start() {
      running = true;
      round();
    },
    stop() {
      running = false;
      clearTimeout(timer);
      asking?.abort();
      asking = null;
    },
    again: round,
  };
}
