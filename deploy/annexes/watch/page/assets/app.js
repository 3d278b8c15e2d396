"use strict";
/* The page of a fleet. /events sends the newest state about once a second, and this shows it. Every text of it goes in
   as text, never as markup. No number is computed here: all of them come ready in the state. */

let state = null;
let sorting = { column: "slot", falls: false };
const slotShown = /^\/worker\/(\d+)$/.test(location.pathname) ? Number(location.pathname.split("/")[2]) : null;

/* Tiles are [key, label, value, note]. */
function showTiles(parent, list) {
  keyed(parent, list, ([key]) => key,
    ([key, label]) => make("div", { "data-of": key }, make("dt", { text: label }), make("dd"), make("dd", { class: "note" })),
    (element, [, , value, note]) => { say(element.children[1], value); say(element.children[2], note || ""); });
}

function showPairs(parent, list) {
  keyed(parent, list.filter((pair) => pair), ([label]) => label,
    ([label]) => make("div", { "data-of": label }, make("dt", { text: label }), make("dd")),
    (element, [, value, isBad]) => {
      say(element.children[1], value);
      element.children[1].classList.toggle("bad", Boolean(isBad));
    });
}

function showFindings(list) {
  $("findings").hidden = !list.length;
  keyed($("findings"), list, (one) => `${one.kind}/${one.whom}`, () => {
    const copy = make("button", { type: "button", text: "Copy" });
    const code = make("code");
    copy.addEventListener("click", () => copyText(code.textContent, copy));
    return make("li", {}, make("p", {}, make("b"), make("span")), make("p", { class: "quiet" }),
      make("div", { class: "run" }, code, copy));
  }, (element, one) => {
    element.dataset.severity = one.severity;
    element.dataset.kind = one.kind;
    const [first, second, run] = element.children;
    say(first.children[0], one.severity === "error" ? "Error" : "Warning");
    say(first.children[1], one.sentence);
    say(second, filled([
      isNumber(one.since_unix_s) && `for ${duration(one.for_s)}, since ${clock(one.since_unix_s)}`,
      one.limit && `limit: ${one.limit}`, !one.command && one.remedy && `try: ${one.remedy}`]));
    second.hidden = !second.textContent;
    run.hidden = !one.command;
    say(run.children[0], one.command);
    run.children[1].setAttribute("aria-label", `Copy the command: ${one.command}`);
  });
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    say(button, "Copied");
  } catch (_) { /* The clipboard is for secure pages only: select the text, so that Ctrl-C copies it. */
    getSelection().selectAllChildren(button.previousElementSibling);
    say(button, "Press Ctrl-C");
  }
  setTimeout(() => say(button, "Copy"), 2000);
}

function showLedger(parent, books) {
  if (!parent.firstChild) {
    const stage = (title) => make("div", {}, make("span", { text: title }), make("strong"), make("ul"));
    parent.append(make("div", { class: "flow" }, stage("Stepped"), stage("Not delivered"), stage("On their way"),
      stage("Committed")), make("p", { class: "quiet" }));
  }
  const [stepped, undelivered, queued, committed] = parent.firstChild.children;
  const fill = (element, key, value, lines) => {
    element.dataset.of = key;
    say(element.children[1], whole(value));
    keyed(element.children[2], lines, (line) => line.key, () => make("li"), (item, line) => say(item, line.text));
  };
  fill(stepped, "stepped", books.stepped, []);
  fill(undelivered, "undelivered", books.undelivered, books.losses.map((loss) => ({
    key: `${loss.kind}/${loss.reason}`,
    text: `${whole(loss.agent_steps)} ${loss.kind}: ${loss.reason}${loss.meaning ? ` (${loss.meaning})` : ""}` })));
  fill(queued, "queued", books.queued, [
    { key: "workers", text: `${whole(books.with_workers)} with workers` },
    { key: "broker", text: `${whole(books.with_broker_or_learner)} with broker or learner` } ]);
  fill(committed, "committed", books.committed, isNumber(books.committed_share) && books.stepped
    ? [{ key: "share", text: `${percent(books.committed_share)} of all` }] : []);
  say(parent.lastChild, books.balance === 0
    ? "The books balance: stepped = not delivered + on their way + committed, in agent steps."
    : `The books are off by ${whole(books.balance)} agent steps: headrace audit names the row.`);
  parent.lastChild.classList.toggle("bad", books.balance !== 0);
}

function showErrors(groups) {
  $("errors-box").hidden = !groups.length;
  keyed($("errors"), groups, (group) => group.fingerprint, () => make("article", {}, make("p", {}, make("strong"), " ",
    make("span")), make("p", { class: "quiet" }), make("details", {}, make("summary", { text: "Traceback" }), make("pre"))),
  (element, group) => {
    const [head, times, details] = element.children;
    say(head.children[0], `${group.exception || group.kind}, ${plural(group.count, "time")}`);
    say(head.children[1], group.message);
    say(times, filled([`${group.kind} in ${group.env}`, group.where && `at ${group.where}`,
      `first ${moment(group.first_unix_s)}`, `last ${clock(group.last_unix_s)} (${duration(group.last_age_s)} ago)`,
      group.slots.length && `workers ${group.slots.join(", ")}`, group.tasks && `tasks ${group.tasks.join(", ")}`]));
    say(details.children[1], group.traceback);
    details.hidden = !group.traceback;
  });
}

/* A figure of a worker as text, by its unit. Others are plain numbers. */
const TEXTS = { "": (value) => String(value || "-"), "1": percent, bytes, s: duration,
  "env steps/s": (value) => value > 0 && value < 1 ? some(value) : whole(value),
  versions: (value) => value < 0 ? "older epoch" : whole(value) };
const textOf = (w, column) => column.key === "slot" ? w.name : (TEXTS[column.unit] || some)(w[column.key]);
const isText = (column) => !column.unit && column.key !== "slot";
const MOST_ROWS = 200;

function showWorkers(s) {
  const table = $("workers");
  const head = table.tHead.rows[0];
  const columns = s.columns;
  const names = columns.map((column) => column.key).join();
  if (table.dataset.columns !== names) { /* a worker tells a figure that none has told before */
    table.dataset.columns = names;
    keyed(table.tBodies[0], [], null);
    head.replaceChildren(...columns.map((column) => {
      const button = make("button", { type: "button", text: column.title });
      button.addEventListener("click", () => {
        const { key } = column;
        sorting = { column: key, falls: sorting.column === key ? !sorting.falls : !isText(column) && key !== "slot" };
        showWorkers(state);
      });
      return make("th", { scope: "col", class: isText(column) ? "text" : null }, button);
    }));
  }
  columns.forEach(({ key }, i) => {
    if (key === sorting.column) head.cells[i].setAttribute("aria-sort", sorting.falls ? "descending" : "ascending");
    else head.cells[i].removeAttribute("aria-sort");
  });
  const wanted = $("filter").value.toLowerCase();
  const found = s.workers.filter((w) => !wanted
    || [w.name, w.status, w.host, w.env_failure].join(" ").toLowerCase().includes(wanted));
  const value = (w) => w[sorting.column] ?? "";
  found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.slot - b.slot) * (sorting.falls ? -1 : 1));
  const worst = new Map();
  for (const one of s.findings) {
    for (const whom of one.slots.length ? one.slots.map((slot) => `worker-${slot}`) : [one.whom]) {
      if (worst.get(whom) !== "error") worst.set(whom, one.severity);
    }
  }
  keyed(table.tBodies[0], found.slice(0, MOST_ROWS), (w) => w.slot, (w) => make("tr", {},
    make("th", { scope: "row" }, make("a", { href: `/worker/${w.slot}`, text: w.name })),
    ...columns.slice(1).map((column) => make("td", { "data-of": column.key, class: isText(column) ? "text" : null }))),
  (row, w) => {
    row.dataset.severity = worst.get(w.name) || "";
    columns.forEach((column, i) => { if (i) say(row.cells[i], textOf(w, column)); });
  });
  say($("workers-note"), found.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${whole(found.length)} are shown.`
    : found.length ? "" : wanted ? "No worker matches the filter." : "No worker has joined yet.");
}

/* A plain table: columns are [heading, text of a row's value, is text]. */
function showTable(table, columns, rows, keyOf) {
  if (!table.tHead) {
    table.append(make("thead", {}, make("tr", {}, ...columns.map(([title, , isText]) =>
      make("th", { scope: "col", text: title, class: isText ? "text" : null })))), make("tbody"));
  }
  keyed(table.tBodies[0], rows, keyOf, () => make("tr", {}, make("th", { scope: "row" }),
    ...columns.slice(1).map(([, , isText]) => make("td", { class: isText ? "text" : null }))),
  (row, item) => columns.forEach(([, text], i) => {
    say(row.cells[i], text(item));
    if (columns[i][2]) row.cells[i].title = text(item);
  }));
}

const PROCESS_COLUMNS = [
  ["Process", (p) => p.name],
  ["State", (p) => filled([p.is_stopped ? "stopped by a signal" : p.state, p.doing]), true],
  ["pid", (p) => p.pid ? String(p.pid) : "-"],
  ["Age", (p) => duration(p.age_s)],
  ["Restarts", (p) => whole(p.restarts)],
  ["CPU", (p) => percent(p.cpu_share)],
  ["Memory", (p) => p.rss_bytes ? bytes(p.rss_bytes) : "-"],
  ["Host", (p) => p.host || "-", true],
  ["Last end", (p) => p.last_words || "-", true],
];
const POLICY_COLUMNS = [
  ["Policy", (p) => p.module],
  ["Mean return", (p) => some(p.return_mean)],
  ["Least", (p) => some(p.return_min)],
  ["Most", (p) => some(p.return_max)],
  ["Mean length", (p) => some(p.len_mean)],
  ["Agents", (p) => whole(p.agents)],
];
const TASK_COLUMNS = [
  ["Task", (t) => t.task],
  ["Mean return", (t) => some(t.return_mean)],
  ["Mean length", (t) => some(t.len_mean)],
  ["Episodes", (t) => whole(t.episodes)],
  ["Env failures", (t) => whole(t.env_failures)],
  ["Last", (t) => `${duration(t.last_age_s)} ago`],
];
const GROUP_COLUMNS = [
  ["Group", (g) => g.group],
  ["Reader", (g) => filled([g.connected ? "connected" : "none", g.reader]), true],
  ["If slow", (g) => g.on_slow === "wait" ? "workers wait" : "loses batches", true],
  ["Lag, steps", (g) => whole(g.lag_steps)],
  ["Oldest", (g) => g.lag_steps ? duration(g.oldest_s) : "-"],
  ["Committed", (g) => whole(g.committed[0])],
  ["Lost", (g) => whole(g.lost)],
  ["Last commit", (g) => isNumber(g.committed_age_s) ? `${duration(g.committed_age_s)} ago` : "-"],
];
const PEER_COLUMNS = [
  ["Worker", (w) => w.name],
  ["Env hosts", (w) => w.env_hosts ? `${whole(w.env_hosts.connected)} of ${whole(w.env_hosts.wanted)}` : "-"],
  ["Clients", (w) => w.serving ? whole(w.serving.clients) : "-"],
  ["Requests/s", (w) => w.serving ? some(w.serving.requests_per_s) : "-"],
  ["Median", (w) => w.serving ? duration(w.serving.latency_p50_s) : "-"],
  ["95 %", (w) => w.serving ? duration(w.serving.latency_p95_s) : "-"],
];

function showLearner(s) {
  const learner = s.learner;
  const share = Object.entries(s.labelled.learner_time_share || {});
  showTiles($("learner"), [
    ["connected", "Connected", learner.is_connected === null ? "-" : learner.is_connected ? "yes" : "no"],
    ["epoch", "Epoch", whole(learner.epoch)],
    ["since", "Known since", moment(learner.since_unix_s)],
    ["commit", "Last commit", isNumber(learner.committed_age_s) ? `${duration(learner.committed_age_s)} ago` : "-"],
    ...share.map(([part, value]) => [`share/${part}`, `Time: ${part}`, percent(value)]),
    ...Object.entries(learner.logged).map(([name, value]) => [`logged/${name}`, name, some(value)]),
  ]);
}

function showRedis(s) {
  const own = s.redis.server;
  const has = (name) => own[name] !== undefined;
  showPairs($("redis"), [
    ["Answers", s.redis.error ? `no, since ${moment(s.redis.away_since_unix_s)}` : "yes", s.redis.error],
    !s.redis.may_ask && ["Its health", "not known: this user may not ask (INFO)"],
    has("redis_version") && ["Version", filled([own.server_name, own.valkey_version || own.redis_version])],
    has("used_memory") && ["Memory", own.maxmemory ? `${bytes(own.used_memory)} of ${bytes(own.maxmemory)}`
      : bytes(own.used_memory)],
    has("maxmemory_policy") && ["Policy when full", own.maxmemory_policy, own.maxmemory_policy !== "noeviction"],
    has("aof_enabled") && ["Append-only file", own.aof_enabled ? `on, last write ${own.aof_last_write_status}` : "off",
      own.aof_enabled && own.aof_last_write_status !== "ok"],
    has("rdb_last_bgsave_status") && ["Last snapshot", own.rdb_last_bgsave_status, own.rdb_last_bgsave_status !== "ok"],
    has("evicted_keys") && ["Evicted keys", whole(own.evicted_keys), own.evicted_keys],
    has("connected_clients") && ["Connections", whole(own.connected_clients)],
    has("instantaneous_ops_per_sec") && ["Commands/s", whole(own.instantaneous_ops_per_sec)],
    has("uptime_in_seconds") && ["Up for", duration(own.uptime_in_seconds)],
    s.garbage.length && ["Unreadable values", s.garbage.join("; "), true],
  ]);
}

function showWorker(s) {
  const w = s.workers.find((one) => one.slot === slotShown);
  say($("worker-name"), `worker-${slotShown}`);
  if (!w) return say($("worker-words"), "No such worker is known.");
  showTiles($("worker-facts"), s.columns.slice(1).map((column) => [column.key, column.title, textOf(w, column)]));
  keyed($("worker-share"), w.time_share ? ["share"] : [], (one) => one,
    () => make("div", {}, make("h3", { text: "Its time" }), make("div", { class: "bar", role: "img" }),
      make("div", { class: "legend" })), (element) => showShare(element, w.time_share));
  say($("worker-words"), filled([w.env_failure && `Newest failure of an env: ${w.env_failure}`,
    w.last_words && `Its last life ended with ${w.last_words}`]));
  showLedger($("worker-ledger"), w.ledger);
  const shown = Object.entries(w).filter(([key]) => key !== "ledger");
  keyed($("worker-told"), shown, ([key]) => key, ([key]) => make("tr", {}, make("th", { scope: "row", text: key }),
    make("td", { class: "text" })), (row, [, value]) => say(row.cells[1],
    value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "-")));
}

function showShare(element, share) {
  const [, bar, legend] = element.children;
  const parts = Object.entries(share).filter(([, value]) => isNumber(value) && value > 0);
  bar.setAttribute("aria-label", parts.map(([part, value]) => `${part} ${percent(value)}`).join(", "));
  const hue = (part) => `var(--c${Math.max(0, Object.keys(share).indexOf(part)) % 6})`;
  keyed(bar, parts, ([part]) => part, () => make("span"), (piece, [part, value]) => {
    piece.style.width = `${100 * value}%`;
    piece.style.background = hue(part);
  });
  keyed(legend, parts, ([part]) => part, () => make("span", {}, make("span", { class: "swatch" }), make("span")),
    (piece, [part, value]) => {
      piece.children[0].style.background = hue(part);
      say(piece.children[1], `${part} ${percent(value)}`);
    });
}

function showMarks() {
  const marks = Charts.marks().slice(-50).reverse();
  $("marks-box").hidden = !marks.length;
  say($("marks-count"), plural(Charts.marks().length, "event"));
  keyed($("marks"), marks, (mark) => `${mark.unix_s}/${mark.kind}`, () => make("li"),
    (item, mark) => say(item, `${moment(mark.unix_s)}: ${mark.sentence}`));
}

function show(s) {
  state = s;
  document.body.classList.toggle("is-old", s.redis.is_old);
  $("verdict-box").dataset.severity = s.severity;
  say($("verdict"), s.verdict);
  say($("bottleneck"), s.bottleneck);
  document.title = `${s.findings.length ? `(${s.findings.length}) ` : ""}${s.verdict} ${s.fleet.id}`;
  say($("fleet"), filled([s.fleet.id, s.fleet.env]));
  say($("about"), filled([s.fleet.started_unix_s && `started ${moment(s.fleet.started_unix_s)}`,
    isNumber(s.fleet.ended_unix_s) && `ended ${moment(s.fleet.ended_unix_s)}`,
    s.fleet.version && `Headrace ${s.fleet.version}`, s.fleet.run_dir]));
  showFindings(s.findings.filter((one) => slotShown === null || one.whom === `worker-${slotShown}`
    || one.slots.includes(slotShown)));
  if (slotShown !== null) return showWorker(s);
  showTiles($("tiles"), s.tiles.map((tile) => [tile.key, tile.title, tile.text, tile.note]));
  showLedger($("fleet-ledger"), s.ledger);
  showErrors(s.errors);
  showWorkers(s);
  $("policies-box").hidden = !s.policies.length;
  showTable($("policies"), POLICY_COLUMNS, s.policies, (p) => p.module);
  $("tasks-box").hidden = !s.tasks.length;
  showTable($("tasks"), TASK_COLUMNS, s.tasks, (t) => t.task);
  $("groups-box").hidden = !s.groups.length;
  showTable($("groups"), GROUP_COLUMNS, s.groups, (g) => g.group);
  showLearner(s);
  const peers = s.workers.filter((w) => w.env_hosts || w.serving);
  $("peers-box").hidden = !peers.length;
  showTable($("peers"), PEER_COLUMNS, peers, (w) => w.slot);
  showRedis(s);
  showTable($("processes"), PROCESS_COLUMNS, s.processes, (p) => p.name);
  $("processes-box").hidden = !s.processes.length;
  $("logged-box").hidden = !Object.keys(s.logged).length;
  showPairs($("logged"), Object.entries(s.logged).map(([name, value]) => [name, some(value)]));
}

/* Staying up to date */

let heard = 0;
let isOver = false;
let ring = 5;
let loading = false;

function showFreshness() {
  const silent_s = heard ? (performance.now() - heard) / 1000 : 0;
  const isCut = !isOver && silent_s > 20;
  say($("fresh"), isOver ? "final state" : !heard ? "" : silent_s < 8 ? "live" : `${duration(silent_s)} old`);
  const redis = state && state.redis;
  const notice = isCut ? `The dashboard has not answered for ${duration(silent_s)}. The numbers are old.`
    : redis && redis.is_old ? `Redis has been away since ${clock(redis.away_since_unix_s)} (${duration(redis.age_s)}). The numbers are old.`
    : isOver && state && state.severity !== "ended" ? "The dashboard has stopped. These are its last numbers." : "";
  say($("notice"), notice);
  $("notice").hidden = !notice;
}

function listen() {
  const events = new EventSource("/events");
  events.onmessage = (message) => {
    heard = performance.now();
    isOver = false;
    show(JSON.parse(message.data));
    showFreshness();
    if (slotShown === null && state.unix_s - Charts.newest() >= ring + 1) loadSeries();
  };
  events.addEventListener("end", () => {
    events.close();
    isOver = true;
    showFreshness();
    setTimeout(listen, 10000); /* the dashboard may come back at the same address */
  });
  events.onerror = () => { /* the browser tries again by itself, but not after a refusal, such as too many connections */
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 10000);
  };
}

async function loadSeries() {
  if (loading) return;
  loading = true;
  const asked = ring;
  try {
    const newest = Charts.newest();
    const answer = await fetch(`/series.json?interval_s=${asked}&after=${Math.max(0, newest - 2.5 * asked)}`);
    const series = answer.ok ? await answer.json() : null;
    if (series && ring === asked) {
      Charts.take(series, asked === 5 ? 3600 : 86400);
      showMarks();
    }
  } catch (_) { /* the next state tries again */ } finally { loading = false; }
  if (ring !== asked) loadSeries(); /* another range was chosen meanwhile */
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  say($("theme"), name === "dark" ? "Light" : "Dark");
  $("theme").setAttribute("aria-label", `Use ${name === "dark" ? "light" : "dark"} colours`);
  Charts.restyle();
}

function begin() {
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => localStorage.getItem("headrace-theme") || (prefers.matches ? "dark" : "light");
  setTheme(preferred());
  prefers.addEventListener("change", () => setTheme(preferred()));
  $("theme").addEventListener("click", () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("headrace-theme", name);
    setTheme(name);
  });
  for (const element of document.querySelectorAll(".overview, #tiles")) element.hidden = slotShown !== null;
  $("worker").hidden = slotShown === null;
  $("filter").addEventListener("input", () => state && showWorkers(state));
  const buttons = document.querySelectorAll("[data-range]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      const wanted = Number(button.dataset.range) > 3600 ? 60 : 5;
      if (wanted !== ring) { ring = wanted; Charts.clear(); }
      Charts.show(Number(button.dataset.range));
      loadSeries();
    });
  }
  $("learner-details").open = innerWidth > 700;
  Charts.mount($("charts"), $("learner-charts"));
  listen();
  setInterval(showFreshness, 1000);
}

begin();
