// The page of lieattn.viz.Microscope. It draws the content of the JSON of the page; see _page.py for its parts.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const state = { ...page.start, camera: page.camera, keys: null };
const find = (id) => document.getElementById(id);

// Numbers are stored as 16 bits between the lowest and the highest of an array.
function decoded(array) {
  const bytes = Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer), step = (array.high - array.low) / 65535;
  const values = Float64Array.from({ length: bytes.length / 2 }, (_, k) => array.low + step * view.getUint16(2 * k, true));
  return { shape: array.shape, values };
}

function array(owner, name) {
  const key = "_" + name;
  if (!owner[key]) owner[key] = decoded(owner[name]);
  return owner[key];
}

const layers = () => ({ attention: page.attention, rollout: page.rollout, field: page.fields })[state.view];
const layer = () => layers()[state.layer];
// Spreading a list of 120,000 numbers into the arguments of Math.max overflows the stack.
const ends = (list) => list.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
const mean = (list) => list.reduce((a, b) => a + b, 0) / Math.max(list.length, 1);
const chosen = (index, count) => (index === null ? [...Array(count).keys()] : [index]);
const points = () => page.places[layer().places].pos.length;

// Attention of the query to each point: the mean over frames and heads, the sum over the frames of the keys.
function attention() {
  const { places, edges } = layer(), { rows } = page.edges[edges], { shape, values } = array(layer(), "weights");
  const source = array(page.edges[edges], "source").values, half = source.length / 2;
  const [, frames, keys, heads] = shape, seen = new Array(page.places[places].pos.length).fill(0);
  const mine = chosen(state.frame, frames), theirs = chosen(keys > 1 ? state.keys : null, keys), some = chosen(state.head, heads);
  for (let edge = rows[state.point]; edge < rows[state.point + 1]; edge++) {
    let sum = 0;
    for (const f of mine) for (const k of theirs) for (const h of some) sum += values[((edge * frames + f) * keys + k) * heads + h];
    seen[source[edge] + 65536 * source[half + edge]] += sum / (mine.length * some.length);
  }
  return seen;
}

function rollout() {
  const { shape, values } = array(layer(), "values"), [, frames, inputs] = shape;
  const frame = (f) => (state.point * frames + f) * inputs;
  return [...Array(inputs).keys()].map((j) => mean(chosen(frames > 1 ? state.frame : null, frames).map((f) => values[frame(f) + j])));
}

function field(name, turn) {
  const { shape, values } = array(layer(), name), [, count, frames, channels] = shape;
  const at = (i, f) => values[((turn * count + i) * frames + f) * channels + state.channel];
  return [...Array(count).keys()].map((i) => mean(chosen(state.frame, frames).map((f) => at(i, f))));
}

// The content of the panels: one or two clouds with values, and the ends of the color scale.
function scene() {
  if (state.view === "field") {
    const { places, ranges, channels } = layer(), turn = page.turns[state.turn];
    return {
      panels: [
        { title: `raw: ${turn.label}`, places, values: field("raw", state.turn), turn: turn.matrix },
        { title: "pulled back: unchanged if the network is equivariant", places, values: field("stable", state.turn) },
      ],
      range: ranges[state.channel], colors: "viridis", unit: `${channels[state.channel]}${over("frame", layer().frames)}`,
    };
  }
  const rolled = state.view === "rollout", values = rolled ? rollout() : attention();
  const top = values.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1, signed = values.some((v) => v < 0);
  const places = rolled ? page.attention[0].places : layer().places;
  return {
    panels: [{ title: "", places, values, query: partner(layer().places, places, state.point) }],
    range: [signed ? -top : 0, top], colors: signed ? "RdBu_r" : "magma",
    unit: `weight${over("frame", layer().frames)}${rolled ? "" : over("head", { length: layer().heads }) + over("keys", layer().key_frames, "sum over the frames of the keys")}`,
  };
}

const over = (id, { length }, what = `mean over the ${id}s`) => (length > 1 && state[id] === null ? `, ${what}` : "");

// The point of other places that corresponds to a point. Networks may shift and scale their input, so both clouds are compared
// relative to their means, in units of the distances of their farthest points.
function partner(from, to, point) {
  const own = page.places[from].pos, given = page.places[to].pos;
  if (from === to || own.length === given.length) return point;
  const place = unit(own)[point], pos = unit(given);
  const far = (p) => p.reduce((sum, x, k) => sum + (x - place[k]) ** 2, 0);
  return pos.reduce((best, p, i) => (far(p) < far(pos[best]) ? i : best), 0);
}

function unit(pos) {
  const mean = pos[0].map((_, k) => pos.reduce((sum, p) => sum + p[k], 0) / pos.length);
  const centered = pos.map((p) => p.map((x, k) => x - mean[k]));
  const farthest = Math.max(1e-30, ends(centered.map((p) => Math.hypot(...p)))[1]);
  return centered.map((p) => p.map((x) => x / farthest));
}

// The given cloud, transformed like the fields, with a ring around the query.
function input() {
  const { places, values } = page.input, range = ends(values), field = state.view === "field";
  const turn = field ? page.turns[state.turn].matrix : undefined;
  const query = field ? undefined : partner(layer().places, places, state.point);
  return [{ title: "input", places, values, turn, query }, { range, colors: "gray_r", parts: 1 }];
}

function color(name, value, [low, high]) {
  const table = page.colors[name], part = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
  return table[Math.round(part * (table.length - 1))];
}

// Whether white text is easier to read than black text on a color "#rrggbb".
function isDark(hex) {
  const [red, green, blue] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

const turned = (matrix, p) => (matrix ? matrix.map((row) => row.reduce((sum, m, k) => sum + m * p[k], 0)) : p);

// Coordinates on the screen, and the depth towards the viewer.
const seen = (p) => (page.camera ? turned(state.camera, p) : [p[0], p[1] ?? 0, 0]);

function draw(canvas, panel, { range, colors }) {
  const soft = getComputedStyle(document.body).getPropertyValue("--soft");
  const side = canvas.clientWidth, dots = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  canvas.width = canvas.height = side * dots;
  context.setTransform(dots, 0, 0, dots, 0, 0);
  context.clearRect(0, 0, side, side);
  const { pos, square, spacing } = page.places[panel.places], middle = page.sphere ? [0, 0, 0] : pos[0].map((_, k) => mean(pos.map((p) => p[k])));
  // Flat clouds that do not turn fill the picture.
  const still = !page.camera && state.view !== "field", reach = still ? (point) => Math.max(...point.map(Math.abs)) : (point) => Math.hypot(...point);
  const apart = pos.map((p) => reach(p.map((x, k) => x - middle[k])));
  const scale = ((still ? 0.49 : 0.46) * side) / (ends(apart)[1] + (page.sphere ? 0.05 : square && still ? spacing / 2 : spacing) || 1);
  const place = (p) => { const [x, y, z] = seen(turned(panel.turn, p.map((q, k) => q - middle[k]))); return [side / 2 + scale * x, side / 2 - scale * y, z]; };
  const at = pos.map(place), radius = Math.max(side / 130, Math.min(page.camera ? side / 36 : 1e9, (page.camera ? 0.34 : 0.48) * spacing * scale));
  const angle = panel.turn && !page.camera ? -Math.atan2(panel.turn[1][0], panel.turn[0][0]) : 0;
  context.strokeStyle = soft;
  context.lineWidth = 1;
  if (page.sphere) { context.beginPath(); context.arc(side / 2, side / 2, scale, 0, 7); context.stroke(); }
  const bonds = pos.length === page.input.values.length ? page.bonds : [];
  const symbols = page.symbols.length === pos.length && radius >= 8 ? page.symbols : [];
  const normals = pos.length === page.normals.length ? page.normals.map((n) => seen(turned(panel.turn, n))) : [];
  context.textAlign = "center";
  context.textBaseline = "middle";
  const parts = [
    ...bonds.map(([i, j]) => ({ depth: Math.min(at[i][2], at[j][2]) - 1e-3 * spacing, line: [at[i], at[j]] })),
    ...at.map((p, i) => ({ depth: p[2], point: i })),
  ].sort((a, b) => a.depth - b.depth);
  for (const { line, point } of parts) {
    context.beginPath();
    if (line) {
      context.strokeStyle = soft;
      context.lineWidth = 2.5;
      context.moveTo(...line[0].slice(0, 2));
      context.lineTo(...line[1].slice(0, 2));
      context.stroke();
      continue;
    }
    const [x, y, depth] = at[point], ring = point === panel.query, normal = normals[point];
    context.globalAlpha = page.sphere && depth < 0 && !ring ? 0.3 : 1;
    if (square) {
      const half = scale * spacing * Math.SQRT1_2;
      for (let k = 0; k < 4; k++) context.lineTo(x + half * Math.cos(angle + (k + 0.5) * Math.PI / 2), y + half * Math.sin(angle + (k + 0.5) * Math.PI / 2));
      context.closePath();
    } else if (normal) context.ellipse(x, y, 2 * radius * Math.max(0.2, Math.abs(normal[2])), 2 * radius, -Math.atan2(normal[1], normal[0]), 0, 7);
    else context.arc(x, y, radius, 0, 7);
    context.fillStyle = color(colors, panel.values[point], range);
    context.fill();
    context.strokeStyle = soft;
    context.lineWidth = square ? 0.4 : 0.8;
    context.stroke();
    if (normal) { // light from above, and from the left; dark behind
      const light = -0.35 * normal[0] + 0.5 * normal[1] + 0.8 * normal[2];
      context.fillStyle = light < 0.5 ? `rgba(0, 0, 0, ${Math.min(0.55, 0.4 * (0.5 - light))})` : `rgba(255, 255, 255, ${0.35 * (light - 0.5)})`;
      context.fill();
    } else if (page.camera && radius > 4 && !symbols[point]) {
      context.beginPath();
      context.arc(x - 0.35 * radius, y - 0.35 * radius, 0.25 * radius, 0, 7);
      context.fillStyle = "rgba(255, 255, 255, 0.5)";
      context.fill();
    }
    if (symbols[point]) {
      context.font = `${radius * (symbols[point].length > 1 ? 0.9 : 1.15)}px system-ui, sans-serif`;
      context.fillStyle = isDark(color(colors, panel.values[point], range)) ? "#fff" : "#000";
      context.fillText(symbols[point], x, y);
    }
    context.globalAlpha = 1;
  }
  if (panel.query !== undefined) {
    const [x, y] = at[panel.query];
    for (const [style, width] of [["#fff", 5], ["#D55E00", 2.5]]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.beginPath();
      context.arc(x, y, square ? 0.45 * scale * spacing : radius + 3.5, 0, 7);
      context.stroke();
    }
  }
  canvas.hits = { panel, at, radius: square ? 0.7 * scale * spacing : radius + 4 };
}

function scaleBar({ children: [bar, ticks, told] }, { range, colors, unit, parts = 4 }) {
  const at = [...Array(parts + 1).keys()].map((k) => range[0] + (k / parts) * (range[1] - range[0]));
  bar.style.background = `linear-gradient(to right, ${page.colors[colors].join(",")})`;
  ticks.replaceChildren(...at.map((tick) => Object.assign(document.createElement("span"), { textContent: Number(tick.toPrecision(3)) })));
  if (unit) told.textContent = unit;
}

const named = (i) => `point ${i}` + (page.symbols[i] && points() === page.symbols.length ? ` (${page.symbols[i]})` : "");

function tell(shown, hovered) {
  const { panels, range } = shown, number = (x) => Number(x.toPrecision(3)).toString();
  if (hovered) find("told").textContent = hovered;
  else if (state.view === "field") {
    const { deviation, largest } = layer(), { outside } = page.turns[state.turn];
    find("told").textContent = `the field that is pulled back differs by ${deviation[state.turn].toExponential(1)} (largest absolute value of a channel ${number(largest)})${outside && `; the map is ${outside}`}`;
  } else {
    const { values, query } = panels[0], best = values.indexOf(values.reduce((a, b) => Math.max(a, b)));
    find("told").textContent = `${named(state.point)} attends most to point ${best}: ${number(values[best])}; sum ${number(values.reduce((a, b) => a + b, 0))}`;
  }
}

function show() {
  const shown = scene(), canvases = [find("left"), find("right")];
  canvases.forEach((canvas, k) => {
    canvas.parentElement.hidden = k >= shown.panels.length;
    if (k >= shown.panels.length) return;
    canvas.nextElementSibling.textContent = shown.panels[k].title;
    draw(canvas, shown.panels[k], shown);
  });
  const [given, colors] = input(), same = new Set(given.values).size === 1;
  find("small").hidden = same;
  if (!same) {
    draw(find("input"), given, colors);
    scaleBar(find("input").nextElementSibling, colors);
  }
  scaleBar(find("scale"), shown);
  const turn = page.turns[state.turn];
  value("point", `${named(state.point)}, of 0 to ${points() - 1}`);
  value("turn", `${state.turn + 1} of ${page.turns.length}: ${turn.label}`);
  const field = state.view === "field", moves = page.camera ? " Drag, or use Shift and the arrow keys, to rotate the picture." : "";
  find("help").textContent = field
    ? `The input is transformed. If a picture has the focus, the arrow keys select the next or previous transformation.${moves}`
    : `Click a point to make it the query, which has a ring. If a picture has the focus, the arrow keys go to the next point in their direction.${moves}`;
  tell(shown);
}

function value(id, text) {
  find(id).nextElementSibling.textContent = text;
  find(id).ariaValueText = text;
}

// --- controls --------------------------------------------------------------------------------------------------

function menu(id, entries, value) {
  const select = find(id);
  select.parentElement.hidden = entries.length < 2;
  select.replaceChildren(...entries.map(([key, text]) => Object.assign(document.createElement("option"), { value: key, textContent: text })));
  select.value = value ?? "";
}

const numbered = (word, names, all) => [...(all ? [["", all]] : []), ...names.map((name, k) => [k, name ?? `${word} ${k}`])];

function controls() {
  const views = { attention: "attention", rollout: "attention rolled out to the input", field: "field" };
  const found = { attention: page.attention, rollout: page.rollout, field: page.fields };
  menu("view", Object.entries(views).filter(([view]) => found[view].length), state.view);
  state.layer = Math.min(state.layer, layers().length - 1);
  const now = layer(), field = state.view === "field", frames = now.frames, count = points();
  state.point = Math.min(state.point, count - 1);
  if (state.frame >= frames.length) state.frame = null;
  menu("layer", numbered("layer", layers().map((one) => one.name)), state.layer);
  menu("frame", frames.length > 1 ? numbered("frame", frames, "mean over the frames") : [], state.frame);
  const keys = state.view === "attention" ? now.key_frames : [];
  if (state.keys >= keys.length) state.keys = null;
  menu("keys", keys.length > 1 ? numbered("frame", keys, "sum over the frames") : [], state.keys);
  const heads = state.view === "attention" ? now.heads : 0;
  if (state.head >= heads) state.head = null;
  menu("head", heads > 1 ? numbered("head", Array(heads).fill(null), "mean over the heads") : [], state.head);
  if (field) state.channel = Math.min(state.channel, now.channels.length - 1);
  menu("channel", field ? numbered("channel", now.channels) : [], state.channel);
  for (const [id, visible, most, value] of [["turn", field, page.turns.length - 1, state.turn], ["point", !field, count - 1, state.point]]) {
    find(id).parentElement.hidden = !visible || most < 1;
    Object.assign(find(id), { max: most, value });
  }
  show();
}

for (const id of ["view", "layer", "frame", "keys", "head", "channel"]) {
  find(id).addEventListener("change", ({ target }) => {
    state[id] = id === "view" ? target.value : target.value === "" ? null : Number(target.value);
    controls();
  });
}
for (const id of ["turn", "point"]) find(id).addEventListener("input", ({ target }) => { state[id] = Number(target.value); show(); });

function step(by) {
  const id = state.view === "field" ? "turn" : "point", count = id === "turn" ? page.turns.length : points();
  state[id] = (state[id] + by + count) % count;
  find(id).value = state[id];
  show();
}

// Make the nearest point in a direction on the screen the query. Its angle to the direction is at most 45 degrees.
function toward([right, up]) {
  const pos = page.places[layer().places].pos.map(seen), [x, y] = pos[state.point];
  const far = pos.map((p) => Math.hypot(p[0] - x, p[1] - y));
  const along = pos.map((p) => right * (p[0] - x) + up * (p[1] - y));
  const ahead = [...pos.keys()].filter((i) => along[i] > 0 && along[i] >= 0.707 * far[i]);
  if (ahead.length) choose(ahead.reduce((a, b) => (far[b] < far[a] ? b : a)));
}

function choose(point) {
  state.point = point;
  find("point").value = point;
  show();
}

let playing = null;
find("play").addEventListener("click", ({ target }) => {
  playing = playing ? clearInterval(playing) : setInterval(() => step(1), 700);
  target.textContent = playing ? "stop" : "play";
});

// Rotate the camera about the axes of the screen.
function rotate(round, up) {
  const [c, s, C, S] = [Math.cos(round), Math.sin(round), Math.cos(up), Math.sin(up)];
  const by = [[c, 0, s], [S * s, C, -S * c], [-C * s, S, C * c]];
  state.camera = by.map((row) => [0, 1, 2].map((k) => row.reduce((sum, x, j) => sum + x * state.camera[j][k], 0)));
  show();
}

for (const canvas of [find("input"), find("left"), find("right")]) {
  if (page.camera) canvas.style.touchAction = "pan-y pinch-zoom"; // up and down scroll, sideways rotates
  let start = null, moved = false, camera = null;
  const hit = ({ offsetX, offsetY }) => {
    const far = (p) => Math.hypot(p[0] - offsetX, p[1] - offsetY), { at, radius } = canvas.hits;
    const near = at.map((p, i) => [p, i]).filter(([p]) => far(p) <= radius);
    return near.length ? near.reduce((a, b) => (b[0][2] > a[0][2] ? b : a))[1] : null;
  };
  canvas.addEventListener("pointerdown", (event) => { start = event; moved = false; camera = state.camera; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!start) {
      const point = hit(event), { panel } = canvas.hits;
      tell(scene(), point === null ? undefined : `${panel.title === "input" ? "input of " : ""}${named(point)}: ${Number(panel.values[point].toPrecision(3))}`);
    } else if (page.camera && (moved || Math.hypot(event.offsetX - start.offsetX, event.offsetY - start.offsetY) > 4)) {
      moved = true;
      rotate(0.01 * event.movementX, 0.01 * event.movementY);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const point = moved ? null : hit(event);
    start = null;
    if (point !== null && state.view !== "field") choose(partner(canvas.hits.panel.places, layer().places, point));
  });
  canvas.addEventListener("pointercancel", () => { // the finger scrolls the page
    start = null;
    state.camera = camera;
    show();
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!by) return;
    event.preventDefault();
    if (event.shiftKey && page.camera) rotate(0.1 * by[0], -0.1 * by[1]);
    else if (state.view === "field") step(by[0] - by[1]);
    else toward(by);
  });
}
new ResizeObserver(show).observe(find("panels"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
controls();
