// Nodes are made once and updated. Data becomes text, never markup, because names come from untrusted processes.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else set(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. Attributes that begin with "on" are listeners. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets an attribute if it changed; null, undefined and false remove it. */
export function set(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Sets the text if it changed, so that an unchanged text node keeps the user's selection. */
export function text(node, value) {
  const wanted = value === null || value === undefined ? "" : String(value);
  if (node.textContent === wanted) return node;
  const only = node.childNodes.length === 1 ? node.firstChild : null;
  if (only?.nodeType === Node.TEXT_NODE) only.data = wanted;
  else node.textContent = wanted;
  return node;
}

export function show(node, wanted) {
  if (node.hidden === Boolean(wanted)) node.hidden = !wanted;
}

/** Shows one of two nodes. If the hidden node had the focus, the other node gets the focus. */
export function swap(one, other, first) {
  const [wanted, gone] = first ? [one, other] : [other, one];
  const focused = document.activeElement === gone;
  show(wanted, true);
  if (focused) wanted.focus({ preventScroll: true });
  show(gone, false);
}

/** A symbol of index.html, hidden from screen readers, because the text next to the symbol has the same meaning. */
export function sign(name) {
  const use = s("use", { href: `#sign-${name}` });
  return s("svg", { class: `sign sign-${name}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, use);
}

export function setSign(svg, name) {
  set(svg, "class", `sign sign-${name}`);
  set(svg.firstChild, "href", `#sign-${name}`);
}

const kept = new WeakMap();

/** Makes the children of parent match items, in order. Nodes with the same key are kept, and keep the focus. */
export function keyed(parent, items, key, make, update) {
  const old = kept.get(parent) ?? new Map();
  const next = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  for (const item of items) {
    const id = key(item);
    const node = old.get(id) ?? make(item);
    next.set(id, node);
    old.delete(id);
  }
  for (const node of old.values()) node.remove();
  let place = parent.firstChild;
  for (const item of items) {
    const node = next.get(key(item));
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
  kept.set(parent, next);
  if (focused !== null && focused !== document.activeElement && parent.contains(focused)) {
    focused.focus({ preventScroll: true }); // a moved node loses the focus
  }
}

/** One Tab stop for a group of nodes. Arrow keys, Home and End move within the group. */
export function roving(group, selector) {
  const all = () => [...group.querySelectorAll(selector)];
  group.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    const nodes = all();
    const at = nodes.indexOf(event.target.closest(selector));
    if (step === undefined || at < 0) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(nodes.length - 1, at + step))].focus();
  });
  group.addEventListener("focusin", (event) => {
    const chosen = event.target.closest(selector);
    if (chosen !== null) for (const node of all()) set(node, "tabindex", node === chosen ? 0 : -1);
  });
  return () => {
    const nodes = all(); // after an update, one node must still be reachable with Tab
    if (nodes.length > 0 && !nodes.some((node) => node.getAttribute("tabindex") === "0")) {
      set(nodes[0], "tabindex", 0);
    }
  };
}
