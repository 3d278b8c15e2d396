"use strict";
/* The curves of a report. Their values stand in the page as JSON. */

Charts.mount($("charts"));
Charts.show(Infinity);
Charts.take(JSON.parse($("rows").textContent), Infinity);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.restyle());
