"use strict";
/* Elements of a page, and values as text. Absent values are a dash. */

const $ = (id) => document.getElementById(id);

function make(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* Show `items` as children of `parent`, and keep the elements of those that were there, with their focus. */
function keyed(parent, items, keyOf, create, update) {
  const known = parent.known || (parent.known = new Map());
  const wanted = new Map(items.map((item) => [String(keyOf(item)), item]));
  for (const [key, element] of known) if (!wanted.has(key)) { element.remove(); known.delete(key); }
  let place = parent.firstElementChild;
  for (const [key, item] of wanted) {
    if (!known.has(key)) known.set(key, create(item));
    const element = known.get(key);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const whole = (value) => isNumber(value) ? Math.round(value).toLocaleString("en-US") : "-";
const some = (value) => !isNumber(value) ? "-" : value !== 0 && Math.abs(value) < 1e-4 ? String(Number(value.toPrecision(4)))
  : value.toLocaleString("en-US", Math.abs(value) >= 100 ? { maximumFractionDigits: 1 } : { maximumSignificantDigits: 4 });
const percent = (value) => isNumber(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : "-";
function bytes(value) {
  if (!isNumber(value)) return "-";
  const power = Math.min(4, value < 1 ? 0 : Math.floor(Math.log2(value) / 10));
  return `${(value / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
function duration(seconds) {
  if (!isNumber(seconds)) return "-";
  if (seconds < 60) return `${seconds < 10 ? Math.round(seconds * 10) / 10 : Math.round(seconds)} s`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = units.findIndex(([size]) => seconds >= size);
  const [size, unit] = units[i];
  const rest = i + 1 < units.length ? Math.floor((seconds % size) / units[i + 1][0]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${units[i + 1][1]}` : ""}`;
}
const clock = (unix_s) => isNumber(unix_s) && unix_s > 0
  ? new Date(unix_s * 1000).toLocaleTimeString("en-GB") : "-";
const moment = (unix_s) => isNumber(unix_s) && unix_s > 0
  ? new Date(unix_s * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "-";
const plural = (count, one, many) => `${whole(count)} ${count === 1 ? one : many || `${one}s`}`;
const filled = (parts) => parts.filter((part) => part).join("; ");
