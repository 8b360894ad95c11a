// Calls to the dashboard. Paths are relative: a proxy may have put the dashboard under a prefix.

export class Refused extends Error {}

const path = (parts) => parts.map((part) => encodeURIComponent(part)).join("/");

/** The line that says what is wrong: the server's own if it sent one. */
async function complaint(reply) {
  try {
    const { detail } = await reply.json();
    if (typeof detail === "string" && detail !== "") return detail;
  } catch {
    // no JSON: a proxy's page
  }
  return `the dashboard answered ${reply.status} ${reply.statusText}`.trim();
}

async function ask(url, options) {
  let reply;
  try {
    reply = await fetch(url, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the dashboard does not answer");
  }
  if (!reply.ok) throw new Refused(await complaint(reply));
  try {
    return await reply.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the answer is no JSON: does a proxy ask for a sign-on?");
  }
}

/** get(["learners", name], {limit: 50}); what is "" or null is left out. */
export function get(parts, query = {}, signal = undefined) {
  const asked = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = new URLSearchParams(asked).toString();
  return ask(`api/${path(parts)}${tail ? `?${tail}` : ""}`, { signal });
}

/** An operator's action. The token goes into this one header and nowhere else. */
export function action(name, token, body) {
  return ask(`api/actions/${path([name])}`, {
    method: "POST",
    headers: { "X-Atoll-Token": token, "Content-Type": "application/json" }, // Authorization may be a proxy's
    body: JSON.stringify(body),
  });
}
