// Calls to the dashboard. Paths are relative, so that a proxy can serve the dashboard under a prefix.

export class Refused extends Error {}

const path = (parts) => parts.map((part) => encodeURIComponent(part)).join("/");

/** The error as one line: the server's message, if there is one. */
async function complaint(reply) {
  try {
    const { detail } = await reply.json();
    if (typeof detail === "string" && detail !== "") return detail;
  } catch {
    // The answer is not JSON, for example a proxy's error page.
  }
  const status = `${reply.status} ${reply.statusText}`.trim();
  return `the dashboard answered ${status}: reload the page`;
}

async function ask(url, options) {
  let reply;
  try {
    reply = await fetch(url, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the dashboard does not answer: check that it is running");
  }
  if (!reply.ok) throw new Refused(await complaint(reply));
  try {
    return await reply.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the answer is not JSON: a proxy may require a login; reload the page");
  }
}

/** Example: get(["learners", name], {limit: 50}). Omits parameters that are "" or null. */
export function get(parts, query = {}, signal = undefined) {
  const asked = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = new URLSearchParams(asked).toString();
  return ask(`api/${path(parts)}${tail ? `?${tail}` : ""}`, { signal });
}

/** An operator action. The token is sent only in its own header. */
export function action(name, token, body) {
  return ask(`api/actions/${path([name])}`, {
    method: "POST",
    headers: { "X-Atoll-Token": token, "Content-Type": "application/json" }, // a proxy may use Authorization
    body: JSON.stringify(body),
  });
}
