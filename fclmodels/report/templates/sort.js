"use strict";
// A click on a column's head sorts the rows of each of the table's bodies: numbers from the largest, texts from A; then
// the other way round; then as they were. What has no value comes after what has one; a body's own head stays first, and
// the papers' rows stay last.
const { compare } = new Intl.Collator("en", { numeric: true });

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const bodies = [...table.tBodies].map((body) => [body, [...body.rows]]);
  heads.forEach((head, column) => {
    const hasValues = bodies.some(([, rows]) => rows.some((row) => row.cells[column]?.dataset.v));
    const numbers = hasValues || (column > 0 && !head.classList.contains("text"));
    const ways = numbers ? ["descending", "ascending"] : ["ascending", "descending"];
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = ways[ways.indexOf(head.getAttribute("aria-sort")) + 1];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (way) head.setAttribute("aria-sort", way);
      for (const [body, rows] of bodies) body.append(...(way ? sorted(rows, column, numbers, way) : rows));
    });
  });
}

function sorted(rows, column, numbers, way) {
  const sign = way === "ascending" ? 1 : -1;
  const keyed = rows.map((row) => {
    const cell = row.cells[column];
    const text = cell?.dataset.v ?? cell?.textContent.trim() ?? "";
    const value = numbers ? parseFloat(text.replaceAll(",", "").replace("−", "-")) : text;
    const place = row.matches(".reading") ? 0 : row.matches(".paper") ? 3 : Number.isNaN(value) ? 2 : 1;
    return { row, value, place };
  });
  const order = (a, b) => (numbers ? a.value - b.value : compare(a.value, b.value));
  keyed.sort((a, b) => a.place - b.place || (a.place === 1 ? sign * order(a, b) : 0));
  return keyed.map(({ row }) => row);
}
