"use strict";
/* Charts over time or env steps. uPlot draws; the curves come ready, and null is where nothing is known.
   The page gets them from /series.json, a report has them in itself; its times are seconds since the run began
   (`isElapsed`). Both have `charts`: `lines`, with `dots` for values of single moments, and `bands`: lower and upper edge
   of a shaded band, and its label. A chart without data is not shown. */

const MOST_LEARNER_CHARTS = 24;
const ELAPSED_TICKS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
  172800, 432000, 864000, 2592000];
const WHOLE_TICKS = Array.from({ length: 46 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const FLAT = 1e-3; /* A curve that varies by less of its size is drawn as a constant one. */

const Charts = (() => {
  const plots = new Map();
  let data = { unix_s: [], curves: {}, marks: [], interval_s: 5 };
  let shown = 3600;
  let bySteps = false;
  let boxes = [];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hasData = (name) => (data.curves[name] || []).some((value) => value !== null);

  function specs() {
    if (data.isElapsed) return data.charts;
    const own = Object.keys(data.curves).filter((name) => name.startsWith("learner/")).slice(0, MOST_LEARNER_CHARTS);
    return [...(data.charts || []), ...own.map((name) => (
      { title: name.replace("learner/", ""), unit: "", isOfLearner: true, lines: [{ name, label: "logged" }] }))];
  }

  /* Take curves after a time: what is known from the first of them on is replaced. */
  function take(fresh, limit_s) {
    const first = fresh.unix_s.length ? fresh.unix_s[0] : Infinity;
    let kept = data.unix_s.findIndex((time) => time >= first);
    if (kept < 0) kept = data.unix_s.length;
    const oldest = (fresh.unix_s[fresh.unix_s.length - 1] || 0) - limit_s;
    let cut = data.unix_s.findIndex((time) => time > oldest);
    cut = cut < 0 ? 0 : Math.min(cut, kept);
    const curves = {};
    for (const name of new Set([...Object.keys(data.curves), ...Object.keys(fresh.curves)])) {
      const before = (data.curves[name] || new Array(data.unix_s.length).fill(null)).slice(cut, kept);
      curves[name] = before.concat(fresh.curves[name] || new Array(fresh.unix_s.length).fill(null));
    }
    data = { ...fresh, unix_s: data.unix_s.slice(cut, kept).concat(fresh.unix_s), curves };
    draw();
  }

  function clear() {
    data = { unix_s: [], curves: {}, marks: [], interval_s: 5 };
  }

  /* One column for each curve of the chart, in the order in which uPlot gets them. */
  function columns(spec) {
    const found = [];
    for (const [low, high, label] of spec.bands || []) {
      if (hasData(low) && hasData(high)) {
        found.push({ name: low, edge: true }, { name: high, edge: true, label, isBand: true });
      }
    }
    for (const line of spec.lines) if (hasData(line.name)) found.push(line);
    return found;
  }

  function valuesOf(spec, column) {
    const told = data.curves[column.name];
    const values = spec.scale ? told.map((value) => value === null ? null : value * spec.scale) : told;
    return data.isElapsed ? interrupted(values) : values;
  }

  /* A report has rows of several kinds. Null in one interrupts no curve: undefined, for uPlot. A row without any value
     stands between two starts of the fleet, and interrupts all from their value before it to that behind it. */
  function interrupted(values) {
    const drawn = values.map((value) => value === null ? undefined : value);
    for (const start of values.keys()) {
      if (Object.values(data.curves).some((curve) => curve[start] !== null)) continue;
      for (let k = start; values[k] === null; k--) drawn[k] = null;
      for (let k = start; values[k] === null; k++) drawn[k] = null;
    }
    return drawn;
  }

  /* The values without a neighbour to draw a line to: each is a dot. */
  function alone(values) {
    const known = [...values.keys()].filter((k) => values[k] !== undefined);
    const at = (n) => values[known[n]] ?? null;
    return known.filter((_, n) => at(n) !== null && at(n - 1) === null && at(n + 1) === null);
  }

  /* The env steps until each row, which never fall; null where they are not known. */
  function stepsUntil() {
    if (!hasData("env_steps_total")) return null;
    const told = data.curves.env_steps_total;
    const isStart = (data.curves.env_steps_per_s || [null])[0] !== null; /* a report without the counter: no step yet */
    let steps = (isStart ? told[0] : told.find((value) => value !== null)) || 0;
    return told.map((value) => (steps = Math.max(steps, value || 0)));
  }

  /* The horizontal place of each row: its time, or the env steps until then. */
  const places = () => (bySteps && stepsUntil()) || data.unix_s;
  const timeOf = (at) => data.isElapsed ? duration(at) : clock(at);

  function drawMarks(plot) {
    const { left, top, width, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.setLineDash([4, 4]);
    for (const mark of data.marks) {
      const row = data.unix_s.findIndex((time) => time >= mark.unix_s);
      if (bySteps && row < 0) continue;
      const x = plot.valToPos(bySteps ? plot.data[0][row] : mark.unix_s, "x", true);
      if (x < left || x > left + width) continue;
      plot.ctx.strokeStyle = color(["joined", "again", "learner", "broker"].includes(mark.kind) ? "--c5" : "--error");
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, top);
      plot.ctx.lineTo(x, top + height);
      plot.ctx.stroke();
    }
    plot.ctx.restore();
  }

  function options(spec, found, width, caption) {
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    const bands = found.flatMap((column, i) =>
      column.isBand ? [{ series: [i + 1, i], fill: `${color("--c0")}2e` }] : []);
    let hue = 0;
    const series = found.map((column) => {
      if (column.edge) return { label: column.label || "", stroke: "transparent", width: 0, points: { show: false } };
      column.hue = `--c${hue++ % 6}`;
      column.isDashed = hue > 6;
      return { label: column.label, stroke: color(column.hue), width: 1.6,
        points: { show: () => Boolean(column.dots), size: 6, fill: color(column.hue),
          filter: (plot, i, all) => all ? null : alone(plot.data[i]) },
        dash: column.isDashed ? [6, 3] : undefined, ...(column.dots ? { paths: () => null } : {}) };
    });
    return {
      width, height: 170, legend: { show: false }, series: [{}, ...series], bands,
      cursor: { sync: { key: "fleet" }, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: !bySteps && !data.isElapsed, range: () => range() }, y: { range: (_, low, high) => limits(low, high) } },
      axes: [{ ...axis, size: 28, space: 70, ...(data.isElapsed && !bySteps ? { incrs: ELAPSED_TICKS } : {}),
        values: (_, ticks) => ticks.map((tick) => bySteps ? short(tick) : data.isElapsed ? duration(tick)
          : clock(tick).slice(0, ticks[ticks.length - 1] - ticks[0] > 600 ? 5 : 8)) }, { ...axis, size: 56, incrs: spec.isWhole ? WHOLE_TICKS : undefined,
        values: (_, ticks) => ticks.map((tick) => short(tick)) }],
      hooks: { draw: [drawMarks], setCursor: [(plot) => tell(caption, spec, found, plot.cursor.idx)] },
    };
  }

  function range() {
    const last = data.unix_s[data.unix_s.length - 1] ?? Date.now() / 1000;
    const first = Math.max(data.unix_s[0] || 0, last - shown);
    if (!bySteps) return data.isElapsed ? [0, last || 1] : [Math.min(first, last - 60), last];
    const x = places();
    const from = x[data.unix_s.findIndex((time) => time >= first)] || 0;
    return [from, Math.max(from + 1, x[x.length - 1] || 0)];
  }

  function limits(low, high) {
    if (low === null || low === undefined || (low === 0 && high === 0)) return [0, 1];
    const size = Math.max(Math.abs(low), Math.abs(high));
    const spread = high - low > FLAT * size ? high - low : 0; /* else the axis would show rounding errors */
    const room = (spread || size) * 0.08;
    return [low >= 0 && low < spread * 2 ? 0 : low - room, high + room];
  }

  const short = (value) => Math.abs(value) >= 10000
    ? new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 }).format(value)
    : String(Number(value.toPrecision(4)));

  /* Say in the caption, in text, what the curves are at one moment: under the cursor, else the newest. */
  function tell(caption, spec, found, index) {
    let i = index;
    if (i === null || i === undefined) {
      for (i = data.unix_s.length - 1; i > 0; i--) if (found.some((one) => data.curves[one.name][i] !== null)) break;
    }
    const parts = [];
    const valueOf = (name) => { /* columns of a report have their values at different moments: the newest until then */
      let k = i;
      const values = data.curves[name] || [];
      if (data.isElapsed) while (k > 0 && values[k] === null) k--;
      return values[k];
    };
    for (const [k, column] of found.entries()) {
      const value = valueOf(column.name);
      if (column.edge && !column.isBand) continue;
      const low = column.isBand ? valueOf(found[k - 1].name) : null;
      const said = (one) => one === null || one === undefined ? "-" : spec.isWhole && !(one > 0 && one < 1) ? whole(one)
        : short(one * (spec.scale || 1));
      parts.push({ column, text: `${column.label} ${column.isBand ? `${said(low)} to ` : ""}${said(value)}` });
    }
    const steps = stepsUntil();
    const at = `${timeOf(data.unix_s[i])}${steps ? `, ${whole(steps[i])} env steps` : ""}`;
    const when = index === null || index === undefined ? "" : at;
    caption.replaceChildren(...(when ? [make("b", { text: when })] : []), ...parts.map(({ column, text }) => {
      const swatch = make("span", { class: "swatch" });
      const hue = color(column.hue || "--c0");
      swatch.style.background = column.isBand ? `${hue}55`
        : column.isDashed ? `repeating-linear-gradient(90deg, ${hue} 0 4px, transparent 4px 6px)` : hue;
      return make("span", {}, swatch, text);
    }));
    return parts.map(({ text }) => text).join(", ");
  }

  function drop(title) {
    plots.get(title).remove();
    plots.delete(title);
    for (const box of boxes) if (box.known) box.known.delete(title);
  }

  function draw() {
    if (!boxes.length) return;
    const wanted = specs().map((spec) => ({ spec, found: columns(spec) })).filter(({ found }) => found.length);
    document.getElementById("no-history").hidden = wanted.length > 0;
    for (const [title] of plots) if (!wanted.some(({ spec }) => spec.title === title)) drop(title);
    for (const { spec, found } of wanted) {
      const known = plots.get(spec.title);
      const names = found.map((column) => column.name).join();
      if (known && known.names !== names) drop(spec.title);
      if (!plots.has(spec.title)) plots.set(spec.title, build(spec, found, names));
      plots.get(spec.title).update();
    }
    for (const [i, box] of boxes.entries()) {
      const own = wanted.filter(({ spec }) => Boolean(spec.isOfLearner) === (i === 1));
      if (box.closest("details")) box.closest("details").hidden = !own.length;
      keyed(box, own, ({ spec }) => spec.title, ({ spec }) => plots.get(spec.title).figure, () => {});
    }
  }

  function build(spec, found, names) {
    const caption = make("figcaption", {});
    const canvas = make("div", { role: "img" });
    const figure = make("figure", {}, make("h3", { text: spec.unit ? `${spec.title}, ${spec.unit}` : spec.title }),
      canvas, caption);
    let plot = null;
    const rows = () => [places(), ...found.map((column) => valuesOf(spec, column))];
    const resize = new ResizeObserver(() => {
      const width = Math.floor(canvas.clientWidth);
      if (width < 50) return;
      if (plot && plot.width === width) return;
      if (plot) plot.setSize({ width, height: 170 });
      else plot = new uPlot(options(spec, found, width, caption), rows(), canvas);
    });
    resize.observe(canvas);
    return {
      figure, names,
      update() {
        if (plot) plot.setData(rows());
        const said = tell(caption, spec, found, null);
        const what = `${spec.isOfLearner ? "the learner's " : ""}${spec.title}${spec.unit ? `, ${spec.unit}` : ""}`;
        canvas.setAttribute("aria-label", `Chart of ${what}. Newest: ${said}`);
      },
      remove() { resize.disconnect(); if (plot) plot.destroy(); figure.remove(); },
    };
  }

  return {
    take, clear, draw,
    mount(...elements) {
      boxes = elements;
      const axes = document.querySelectorAll("[data-axis]");
      for (const button of axes) {
        button.addEventListener("click", () => {
          for (const one of axes) one.setAttribute("aria-pressed", String(one === button));
          this.along(button.dataset.axis === "steps");
        });
      }
    },
    show(seconds) { shown = seconds; draw(); },
    along(steps) { bySteps = steps; this.restyle(); },
    restyle() { for (const title of [...plots.keys()]) drop(title); draw(); },
    newest: () => data.unix_s[data.unix_s.length - 1] || 0,
    marks: () => data.marks,
  };
})();
