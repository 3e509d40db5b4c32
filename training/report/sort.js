"use strict";
// Sorts a table by the column whose heading is pressed. Without this script the tables are as they are.
document.querySelectorAll("table.sort").forEach(function (table) {
  var body = table.tBodies[0];
  if (!table.tHead || !body) return;
  var heads = Array.prototype.slice.call(table.tHead.rows[0].cells);
  function value(row, column) {
    var cell = row.cells[column], text = cell ? cell.textContent.trim() : "";
    var plain = text.replace(/\u2212/g, "-").replace(/,/g, ""), number = parseFloat(plain);
    return { text: text, number: /^[-+]?[0-9.]/.test(plain) && isFinite(number) ? number : null };
  }
  heads.forEach(function (head, column) {
    var button = document.createElement("button");
    button.type = "button";
    while (head.firstChild) button.appendChild(head.firstChild);
    head.appendChild(button);
    button.addEventListener("click", function () {
      var down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      var groups = [];  // a row with its notes below it
      Array.prototype.slice.call(body.rows).forEach(function (row) {
        if (row.classList.contains("with") && groups.length) groups[groups.length - 1].push(row); else groups.push([row]);
      });
      groups.sort(function (a, b) {
        var x = value(a[0], column), y = value(b[0], column);
        var missing = function (v) { return v.text === "" || v.text === "\u2014"; };
        if (missing(x) !== missing(y)) return missing(x) ? 1 : -1;  // missing values stay last
        var order = x.number !== null && y.number !== null ? x.number - y.number : x.text.localeCompare(y.text);
        return down ? -order : order;
      });
      groups.forEach(function (rows) { rows.forEach(function (row) { body.appendChild(row); }); });
    });
  });
});
