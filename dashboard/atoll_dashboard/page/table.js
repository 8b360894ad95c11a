// An HTML table whose rows are kept while their values change.

import { h, keyed, set, sign, setSign, text } from "./dom.js";

/**
 * Columns: {title, show(cell, item, row), make(cell), sort, number, minor, wide}. By default, show does nothing.
 * stacked: on a narrow screen, a row becomes a list of titles and values. Roles keep the table for screen readers.
 */
export function makeTable({ caption, columns, key, sort, onsort, stacked = false }) {
  const role = (name) => (stacked ? name : null);
  const heads = columns.map((column) => head(column, onsort, role("columnheader")));
  const body = h("tbody", { role: role("rowgroup") });
  const table = h(
    "table", { class: role("stacked"), role: role("table") }, h("caption", { class: "unseen" }, caption),
    h("thead", { role: role("rowgroup") }, h("tr", { role: role("row") }, ...heads)), body,
  );
  const empty = h("p", { class: "empty", hidden: true });
  const scroller = h(
    "div", { class: "scroller", role: "group", "aria-label": `${caption}, scrollable`, tabindex: 0 }, table,
  );
  const node = h("div", { class: "table" }, scroller, empty);
  if (sort) showSort(sort);

  function make(item) {
    const row = h("tr", { role: role("row") });
    columns.forEach((column, index) => {
      const [tag, kind] = index === 0 ? ["th", "rowheader"] : ["td", "cell"];
      const cell = h(tag, { class: classOf(column), scope: index === 0 ? "row" : null, role: role(kind) });
      set(cell, "data-title", role(column.title));
      column.make?.(cell, item);
      row.append(cell);
    });
    return row;
  }

  function showSort({ by, descending }) {
    columns.forEach((column, index) => {
      const order = column.sort === by && by !== undefined ? (descending ? "descending" : "ascending") : null;
      set(heads[index], "aria-sort", order);
    });
  }

  return {
    node,
    showSort,
    /** nothing: the text for an empty table. */
    update(items, nothing = "No entries.") {
      keyed(body, items, key, make, (row, item) => {
        columns.forEach((column, index) => column.show?.(row.cells[index], item, row));
      });
      empty.hidden = items.length > 0;
      scroller.hidden = items.length === 0;
      text(empty, items.length > 0 ? "" : nothing);
    },
    fail(line) {
      empty.hidden = false;
      text(empty, line);
    },
  };
}

function classOf(column) {
  const names = [column.number && "number", column.minor && "minor", column.wide && "wide"].filter(Boolean);
  return names.length > 0 ? names.join(" ") : null;
}

function head(column, onsort, role) {
  const inside = column.sort
    ? h("button", { type: "button", class: "sort", onclick: () => onsort(column.sort) }, column.title)
    : column.title;
  return h("th", { scope: "col", class: classOf(column), role }, inside);
}

/** A column of plain text. */
export function words(title, value, options = {}) {
  return { title, show: (cell, item) => text(cell, value(item)), ...options };
}

export function figures(title, value, options = {}) {
  return words(title, value, { number: true, ...options });
}

/** A column with a link; href(item) and value(item). */
export function linked(title, value, href, options = {}) {
  return {
    title,
    make: (cell) => cell.append(h("a")),
    show(cell, item) {
      const target = href(item);
      set(cell.firstChild, "href", target === "" ? null : target);
      text(cell.firstChild, value(item));
    },
    ...options,
  };
}

/** A column with a sign and its label. label(item) defaults to the sign's name. */
export function signed(title, value, { label = (item) => value(item).replaceAll("_", " "), ...options } = {}) {
  return {
    title,
    make: (cell, item) => cell.append(h("span", { class: "signed" }, sign(value(item)), h("span"))),
    show(cell, item) {
      const [icon, word] = cell.firstChild.children;
      setSign(icon, value(item));
      text(word, label(item));
    },
    ...options,
  };
}

/** Buttons for the previous and next page of a list, and the current position. */
export function makePager(what, limit, go) {
  const where = h("p", { class: "where" });
  const back = h("button", { type: "button", onclick: () => go(Math.max(0, offset - limit)) }, `Previous ${what}`);
  const on = h("button", { type: "button", onclick: () => go(offset + limit) }, `Next ${what}`);
  const node = h("div", { class: "pager" }, where, back, on);
  let offset = 0;
  return {
    node,
    update(page) {
      offset = page.offset;
      const last = page.offset + page.items.length;
      const some = page.items.length > 0;
      text(where, some ? `${page.offset + 1} to ${last} of ${page.total}` : `0 of ${page.total}`);
      back.disabled = page.offset === 0;
      on.disabled = last >= page.total;
      back.hidden = on.hidden = page.total <= limit;
    },
  };
}
