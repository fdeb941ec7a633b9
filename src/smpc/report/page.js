"use strict";
// Draws the timeline, the memory curves and the module tree of the page from the JSON in #data. Text from the model is
// only ever set as textContent. The data is built by page.py; its fields are named there.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const step = data.step_time || 1;
  const view = { start: 0, end: step }; // seconds that both charts show
  const GUTTER = 64, AXIS = 22, LABEL_FONT = "12px system-ui, sans-serif";
  const MEMORY_PARTS = [["Weights", "--weights"], ["Gradients", "--gradients"], ["Optimizer", "--optimizer"], ["Buffers and working memory", "--other"]];

  // ---- numbers and colours

  function scaled(value, units, base) {
    let index = 0;
    while (value >= base && index < units.length - 1) { value /= base; index += 1; }
    return `${index === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[index]}`.trim();
  }
  const bytes = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
  const number = (value) => scaled(value, ["", "K", "M", "G", "T", "P", "E"], 1000);

  // A time with as many digits as tell neighbours `resolution` seconds apart from each other.
  function time(seconds, resolution = seconds / 1000) {
    const [factor, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    const digits = resolution > 0 ? Math.ceil(-Math.log10(resolution * factor)) : 0;
    return `${(seconds * factor).toFixed(Math.min(Math.max(digits, 0), 6))} ${unit}`;
  }

  const hue = (stage) => data.hues[stage];

  let theme = {};
  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    theme = {};
    for (const name of ["ink", "muted", "line", "grid", "idle", "card", "weights", "gradients", "optimizer", "other",
      "forward-l", "forward-c", "backward-l", "backward-c", "weight-l", "weight-c"]) theme[`--${name}`] = style.getPropertyValue(`--${name}`).trim();
  }
  function colour(stage, kind) {
    return `oklch(${theme[`--${kind}-l`]} ${theme[`--${kind}-c`]} ${hue(stage).toFixed(1)})`;
  }
  const inkOn = (kind) => (Number(theme[`--${kind}-l`]) > 0.6 ? "#14171a" : "#f2f4f7");

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children); // strings become text nodes
    return made;
  }

  // ---- charts: `rows` rows, one for each rank, over a shared axis of time

  function prepare(chart) {
    const width = chart.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    chart.width = width;
    chart.canvas.width = Math.round(width * ratio);
    chart.canvas.height = Math.round(chart.height * ratio);
    chart.canvas.style.height = `${chart.height}px`;
    const context = chart.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, chart.height);
    return context;
  }
  const xOf = (chart, seconds) => GUTTER + ((seconds - view.start) / (view.end - view.start)) * (chart.width - GUTTER);
  const timeAt = (chart, x) => view.start + ((x - GUTTER) / (chart.width - GUTTER)) * (view.end - view.start);
  const rowTop = (chart, rank) => AXIS + rank * chart.row;

  function drawAxis(chart, context) {
    const span = view.end - view.start, wanted = span / Math.max(2, (chart.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= wanted);
    context.font = LABEL_FONT;
    context.textBaseline = "middle";
    for (let index = Math.ceil(view.start / tick); index * tick <= view.end; index += 1) {
      const x = xOf(chart, index * tick), label = index === 0 ? "0" : time(index * tick, tick);
      context.fillStyle = theme["--grid"];
      context.fillRect(Math.round(x), AXIS - 4, 1, chart.height);
      context.fillStyle = theme["--muted"];
      context.textAlign = x > chart.width - 24 ? "right" : x < GUTTER + 16 ? "left" : "center";
      context.fillText(label, x, AXIS / 2 - 2);
    }
    context.textAlign = "left";
    context.fillStyle = theme["--ink"];
    for (let rank = 0; rank < data.num_ranks; rank += 1) {
      context.fillText(`rank ${rank}`, 0, rowTop(chart, rank) + chart.row / 2);
    }
  }

  // Draws what lies in the plot, clipped to it.
  function inPlot(chart, context, draw) {
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, chart.width - GUTTER, chart.height);
    context.clip();
    draw();
    context.restore();
  }

  // The first position whose item's time, `key`, is after `seconds`.
  function after(items, seconds, key) {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (key(items[middle]) > seconds) high = middle; else low = middle + 1;
    }
    return low;
  }

  // ---- the timeline: [stage, microbatch, kind, start, end] of every event, by rank

  const KINDS = ["forward", "backward", "weight"], LETTERS = "FBW", TITLES = ["Forward", "Backward", "Rest of a backward"];

  const severalStages = data.events.some((events) => new Set(events.map((event) => event[0])).size > 1);
  const label = ([stage, microbatch, kind]) => `${severalStages ? stage : ""}${LETTERS[kind]}${microbatch}`;

  function drawTimeline(chart) {
    const context = prepare(chart);
    drawAxis(chart, context);
    inPlot(chart, context, () => {
      for (let rank = 0; rank < data.num_ranks; rank += 1) drawRank(chart, context, rank);
      if (showsMessages) drawMessages(chart, context);
    });
  }

  // Messages: from the end of what makes one to the start of what waits for it, on another rank. Values go along the edges of the
  // plan, gradients against them. [from rank, its end, to rank, its start]
  let showsMessages = true;
  const messages = (() => {
    const places = new Map(); // kind, stage and microbatch: [rank, start, end]
    data.events.forEach((events, rank) => events.forEach(([stage, microbatch, kind, start, end]) => places.set(`${kind} ${stage} ${microbatch}`, [rank, start, end])));
    const microbatches = [...new Set(data.events.flatMap((events) => events.map((event) => event[1])))], found = [];
    for (const [source, destination] of data.edges) {
      for (const microbatch of microbatches) {
        for (const [kind, from, to] of [[0, source, destination], [1, destination, source]]) {
          const made = places.get(`${kind} ${from} ${microbatch}`), taken = places.get(`${kind} ${to} ${microbatch}`);
          if (made && taken && made[0] !== taken[0]) found.push([made[0], made[2], taken[0], taken[1]]);
        }
      }
    }
    return found;
  })();

  function drawMessages(chart, context) {
    const seen = messages.filter(([, end, , start]) => start >= view.start && end <= view.end);
    if (seen.length > 40 * (chart.width / 100)) return; // a grey veil tells nothing: zoom in
    context.strokeStyle = theme["--ink"];
    context.globalAlpha = 0.7;
    for (const [from, end, to, start] of seen) {
      const out = chart.row * (to > from ? 0.75 : 0.25), x = xOf(chart, end), y = rowTop(chart, from) + out;
      const endX = xOf(chart, start), endY = rowTop(chart, to) + chart.row - out, bend = (endY - y) / 2;
      context.beginPath();
      context.moveTo(x, y);
      context.bezierCurveTo(x, y + bend, endX, endY - bend, endX, endY);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  function drawRank(chart, context, rank) {
    const top = rowTop(chart, rank) + 2, height = chart.row - 4, events = data.events[rank];
    context.fillStyle = theme["--idle"];
    context.fillRect(xOf(chart, 0), top, xOf(chart, step) - xOf(chart, 0), height);
    let covered = -1; // events that would lie wholly on drawn pixels are left out
    for (let index = after(events, view.start, (event) => event[4]); index < events.length; index += 1) {
      const event = events[index], left = Math.max(xOf(chart, event[3]), GUTTER - 2);
      if (event[3] > view.end) break;
      const right = Math.min(xOf(chart, event[4]), chart.width + 2);
      if (right < covered + 0.3) continue;
      covered = right;
      const kind = KINDS[event[2]], width = right - left;
      context.fillStyle = colour(event[0], kind);
      if (width > 5) {
        context.beginPath();
        context.roundRect(left + 0.5, top, width - 1, height, Math.min(3, width / 4));
        context.fill();
      } else {
        context.fillRect(left, top, Math.max(width, 0.5), height);
      }
      const text = [label(event), String(event[1])].find((candidate) => candidate.length * 7 + 4 < width);
      if (text === undefined || height < 12) continue;
      context.fillStyle = inkOn(kind);
      context.textAlign = "center";
      context.fillText(text, (left + right) / 2, top + height / 2 + 0.5);
    }
  }

  function eventAt(rank, seconds) {
    const events = data.events[rank], event = events[after(events, seconds, (candidate) => candidate[4])];
    return event !== undefined && event[3] <= seconds ? event : undefined;
  }

  function timelineTip(rank, seconds) {
    const event = eventAt(rank, seconds), memory = ["memory", bytes(bytesAt(rank, seconds))];
    if (event === undefined) return [`rank ${rank}, idle`, ["time", time(seconds)], memory];
    const [stage, microbatch, kind, start, end] = event;
    return [TITLES[kind], ["rank", rank], ["stage", stage], ["microbatch", microbatch],
      ["start", time(start)], ["end", time(end)], ["takes", time(end - start)], memory];
  }

  // ---- memory: {parts, peak, points: [[seconds, bytes], ...]} by rank; a point holds until the next

  function bytesAt(rank, seconds) {
    const points = data.memory[rank].points;
    return points[Math.max(0, after(points, seconds, (point) => point[0]) - 1)][1];
  }
  const most = Math.max(...data.memory.map((rank) => rank.peak), 1);

  function drawMemory(chart) {
    const context = prepare(chart);
    drawAxis(chart, context);
    inPlot(chart, context, () => {
      for (let rank = 0; rank < data.num_ranks; rank += 1) drawCurve(chart, context, rank);
    });
  }

  function drawCurve(chart, context, rank) {
    const { parts, peak, points } = data.memory[rank], bottom = rowTop(chart, rank) + chart.row - 3;
    const yOf = (value) => bottom - (value / most) * (chart.row - 22);
    const left = xOf(chart, 0), right = xOf(chart, step);
    const stage = data.stage_of_rank[rank], first = Math.max(0, after(points, view.start, (point) => point[0]) - 1);
    context.beginPath();
    context.moveTo(xOf(chart, points[first][0]), bottom);
    let x = right;
    for (let index = first; index < points.length && points[index][0] <= view.end; index += 1) {
      x = index + 1 < points.length ? xOf(chart, points[index + 1][0]) : right;
      context.lineTo(xOf(chart, points[index][0]), yOf(points[index][1]));
      context.lineTo(x, yOf(points[index][1]));
    }
    context.lineTo(x, bottom);
    context.fillStyle = colour(stage, "backward");
    context.fill();
    let below = 0;
    for (const [index, [, name]] of MEMORY_PARTS.entries()) {
      context.fillStyle = theme[name];
      context.fillRect(left, yOf(below + parts[index]), right - left, yOf(below) - yOf(below + parts[index]));
      below += parts[index];
    }
    context.strokeStyle = theme["--muted"];
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(GUTTER, Math.round(yOf(peak)) - 0.5);
    context.lineTo(chart.width, Math.round(yOf(peak)) - 0.5);
    context.stroke();
    context.setLineDash([]);
    context.textAlign = "right";
    context.fillStyle = theme["--ink"];
    context.lineWidth = 3;
    context.strokeStyle = theme["--card"];
    const y = yOf(peak) - 8;
    context.strokeText(`peak ${bytes(peak)}`, chart.width - 4, y);
    context.fillText(`peak ${bytes(peak)}`, chart.width - 4, y);
    context.lineWidth = 1;
  }

  function memoryTip(rank, seconds) {
    const { parts } = data.memory[rank], held = bytesAt(rank, seconds);
    const lines = MEMORY_PARTS.map(([name], index) => [name.toLowerCase(), bytes(parts[index])]);
    const activations = held - parts.reduce((sum, part) => sum + part, 0);
    return [`rank ${rank}, ${bytes(held)}`, ["time", time(seconds)], ["activations", bytes(activations)], ...lines.reverse()];
  }

  // ---- zoom, drag, hover: the same for both charts

  const many = data.num_ranks > 24, some = data.num_ranks > 8;
  const charts = [
    { canvas: document.getElementById("timeline"), row: many ? 16 : some ? 24 : 34, draw: drawTimeline, tip: timelineTip },
    { canvas: document.getElementById("memory"), row: many ? 36 : some ? 52 : 76, draw: drawMemory, tip: memoryTip },
  ];
  let scheduled = false;
  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; charts.forEach((chart) => chart.draw(chart)); });
  }
  function show(start, end) {
    const span = Math.min(Math.max(end - start, step / 1e5), step);
    view.start = Math.min(Math.max(start, 0), step - span);
    view.end = view.start + span;
    redraw();
  }
  function zoom(factor, around = (view.start + view.end) / 2) {
    show(around - (around - view.start) * factor, around + (view.end - around) * factor);
  }
  const pan = (seconds) => show(view.start + seconds, view.end + seconds);

  const tip = document.getElementById("tip");
  function hover(chart, event) {
    const box = chart.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const rank = Math.floor((y - AXIS) / chart.row), seconds = timeAt(chart, x);
    if (x < GUTTER || rank < 0 || rank >= data.num_ranks || seconds < 0 || seconds > step) return leave();
    const [title, ...lines] = chart.tip(rank, seconds);
    tip.replaceChildren(element("b", "", title), ...lines.map(([name, value]) => element("div", "", element("span", "", name), element("span", "", String(value)))));
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    tip.style.left = `${event.clientX + 16 + size.width > innerWidth ? event.clientX - 12 - size.width : event.clientX + 16}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - size.height - 8)}px`;
    for (const cursor of document.querySelectorAll(".cursor")) { cursor.style.left = `${x}px`; cursor.style.opacity = "0.6"; }
    return undefined;
  }
  function leave() {
    tip.hidden = true;
    for (const cursor of document.querySelectorAll(".cursor")) cursor.style.opacity = "0";
  }

  for (const chart of charts) {
    chart.height = AXIS + data.num_ranks * chart.row + 2;
    const { canvas } = chart;
    let grabbed = null; // the time under the pointer when it went down
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = timeAt(chart, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
      canvas.parentElement.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grabbed !== null) pan(grabbed - timeAt(chart, event.offsetX));
      hover(chart, event);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => {
      grabbed = null;
      canvas.parentElement.classList.remove("dragging");
    });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("dblclick", () => show(0, step));
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), timeAt(chart, event.offsetX));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX / chart.width) * (view.end - view.start));
      else return; // the page scrolls
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const span = view.end - view.start;
      const actions = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => show(0, step),
        ArrowLeft: () => pan(-span / 10), ArrowRight: () => pan(span / 10) };
      if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
      actions[event.key]();
      event.preventDefault();
    });
  }
  const buttons = { in: () => zoom(0.5), out: () => zoom(2), fit: () => show(0, step) };
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", buttons[button.dataset.zoom]);

  // ---- the module tree: [name, class, stages, parameters, FLOPs, children]

  const solid = (stage) => `oklch(0.72 0.14 ${hue(stage)})`;
  function chip(stage) {
    const made = element("span", "stage", String(stage));
    made.style.setProperty("--hue", hue(stage));
    made.title = `stage ${stage}`;
    return made;
  }

  function strip(stages) {
    const made = element("span", "strip"), colours = stages.map(solid);
    if (colours.length === 1) made.style.background = colours[0];
    if (colours.length > 1) made.style.background = `linear-gradient(${colours.join(", ")})`;
    return made;
  }

  const total = data.tree[4] || 1;
  function row([name, className, stages, parameters, flops, children], parentName, depth) {
    const inside = parentName && name.startsWith(`${parentName}.`) ? name.slice(parentName.length + 1) : name;
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    mark.setAttribute("viewBox", "0 0 10 10");
    mark.setAttribute("class", children.length ? "mark" : "mark none");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", "M3 1 L8 5 L3 9 Z");
    path.setAttribute("fill", "currentColor");
    mark.append(path);
    const label = element("div", "name", mark, strip(stages), element("span", "", inside || "(the whole model)"));
    label.style.setProperty("--depth", depth);
    label.title = name;
    const shown = stages.length > 4 ? [chip(stages[0]), "to", chip(stages.at(-1))] : stages.map(chip);
    const bar = element("i", "");
    bar.style.width = `${(100 * flops) / total}%`;
    if (stages.length === 1) bar.style.background = solid(stages[0]);
    const share = element("div", "share", element("div", "bar", bar), element("span", "number", flops ? number(flops) : "\u2013"));
    return element("div", children.length ? "row" : "row leaf", label, element("div", "class", className), element("div", "stages", ...shown),
      element("div", "number", parameters ? number(parameters) : "\u2013"), share);
  }

  // Children are built when they are first seen: a model may have a hundred thousand modules.
  function branch(node, parentName, depth) {
    const made = row(node, parentName, depth), [name, , , , , children] = node;
    if (!children.length) return made;
    const details = element("details", "", element("summary", "", made));
    details.fill = () => {
      if (details.childElementCount === 1) details.append(...children.map((child) => branch(child, name, depth + 1)));
    };
    details.addEventListener("toggle", details.fill);
    return details;
  }
  function openAll(limit) {
    let level = [...document.querySelectorAll("#tree > details")], rows = 1;
    while (level.length) {
      level.forEach((details) => details.fill());
      const next = level.flatMap((details) => [...details.children].slice(1));
      rows += next.length;
      if (rows > limit) break;
      level.forEach((details) => { details.open = true; });
      level = next.filter((child) => child.tagName === "DETAILS");
    }
  }
  const names = element("div", "row names", ...["Module", "Class", "Stages"].map((text) => element("div", "", text)),
    element("div", "number", "Parameters"), element("div", "number", "FLOPs"));
  document.getElementById("tree").append(names, branch(data.tree, "", 0));
  openAll(40);
  document.querySelector("[data-tree=open]").addEventListener("click", () => openAll(Infinity));
  document.querySelector("[data-tree=close]").addEventListener("click", () => {
    for (const details of document.querySelectorAll("#tree details")) details.open = false;
  });

  // ---- legends, themes, sizes

  function legend(id, entries) {
    document.getElementById(id).replaceChildren(...entries.map(([text, background]) => {
      const swatch = element("span", "swatch");
      swatch.style.background = background;
      return element("span", "", swatch, text);
    }));
  }
  function update() {
    readTheme();
    const used = KINDS.filter((_, kind) => data.events.some((events) => events.some((event) => event[2] === kind)));
    legend("legend-time", [...used.map((kind) => [kind === "weight" ? "rest of a backward" : kind, colour(0, kind)]), ["idle", theme["--idle"]]]);
    legend("legend-memory", [...MEMORY_PARTS.map(([name, variable]) => [name.toLowerCase(), theme[variable]]), ["activations", colour(0, "backward")]]);
    redraw();
  }
  document.getElementById("messages").addEventListener("click", (event) => {
    showsMessages = !showsMessages;
    event.currentTarget.setAttribute("aria-pressed", String(showsMessages));
    redraw();
  });
  // A stage's number leads to its rank's program, and opens it.
  function unfold(hash) {
    const target = document.getElementById(hash.slice(1));
    if (target !== null && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  }
  for (const link of document.querySelectorAll("a.stage")) link.addEventListener("click", () => unfold(link.hash));
  unfold(location.hash);
  for (const cell of document.querySelectorAll("[data-stage]")) cell.style.setProperty("--hue", hue(Number(cell.dataset.stage)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  window.addEventListener("resize", redraw);
  update();
})();
