(() => {
"use strict";
const find = id => document.getElementById(id);
const ROWS = 8, MATRIX = 6, EDITABLE_NODES = 50, MANY_TERMS = 40, FEW_CARDS = 12, PLAY_MS = 1500;
const MATHML = "http://www.w3.org/1998/Math/MathML", SVG = "http://www.w3.org/2000/svg";
const { count, indexOf } = Interpreter;

let data, steps, nodes, recorded; // what Python wrote
const producers = new Map(), cotangentsOf = new Map(), contributionsOf = new Map(), sumsOf = new Map(), forwardNames = new Set(); // by name of a value
let position = 0, playing = 0, inspected = null, mayEdit = null, changed = new Map(), computed = null;
let unrounded = null; // all values of the recorded inputs, in float64
let quiz = false;
const solved = new Set(), rightly = new Set(), drafts = new Map(), windowsOf = new Map(), openFolds = new Set();

// Elements

// Names are text to it: none is read as HTML, and none turns the text round or hides in it.
const ODD = /[\p{C}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;
const plain = text => String(text).replace(ODD, letter => letter === "\n" ? letter : "\ufffd");
const SEEN = ["title", "aria-label", "aria-valuetext", "placeholder"]; // attributes that people read

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : SEEN.includes(name) ? plain(value) : value);
  made.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== "").map(child => child instanceof Node ? child : plain(child)));
  return made;
}
const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const math = (tag, attributes, ...children) => fill(document.createElementNS(MATHML, tag), attributes, children);
function button(text, action, attributes) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", action);
  return made;
}
const put = (id, text) => { find(id).textContent = plain(text); };
const say = text => put("said", text);
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

// Numbers

function read() {
  const packed = Uint8Array.from(atob(find("data").textContent.trim()), one => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
const TYPES = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array };
const numberOf = text => ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[text] ?? Number(text);
function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true), start = 4 + size;
  data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  [steps, nodes] = [data.steps, data.nodes];
  const numbers = one => ("whole" in one ? one.whole : new TYPES[one.code](buffer, start + one.at, one.count));
  recorded = new Map(data.values.map(one => [one.name, {
    ...one, dims: one.shape, data: "at" in one || "whole" in one ? numbers(one) : undefined,
    parts: one.parts?.map(part => ({ ...part, data: numbers(part) })), overview: one.overview && overviewOf(one.overview, numbers(one.overview)),
  }]));
  for (const node of nodes) {
    for (const [name, value] of Object.entries(node.attributes))
      if (value && typeof value === "object" && "dims" in value) node.attributes[name] = Interpreter.tensor(value.dims, Float64Array.from(value.data, numberOf), value.kind);
      else if (typeof value === "string" && ["inf", "-inf", "nan"].includes(value)) node.attributes[name] = numberOf(value);
    node.outputs.forEach((name, k) => name && producers.set(name, [node, k]));
  }
  for (const at of data.forward) nodes[at].outputs.forEach(name => name && forwardNames.add(name));
  data.inputs.forEach(name => forwardNames.add(name));
  data.forward.forEach((at, row) => nodes[at].outputs.forEach(name => name && rowOf.set(name, row)));
  steps.forEach(step => stepAt.set(step.row, step.number));
  for (const [of, one] of Object.entries(data.cotangents)) {
    cotangentsOf.set(one.value, [...(cotangentsOf.get(one.value) ?? []), of]);
    for (const part of one.contributions) {
      contributionsOf.set(part.value, [...(contributionsOf.get(part.value) ?? []), part]);
      if (part.before) sumsOf.set(part.summed, part);
    }
  }
}

function overviewOf(one, blocks) {
  return { ...one, read: (r, c) => blocks[r * one.size[1] + c] };
}

// A value as it is now: {dims, kind, type, at(element), isWhole, tensor}
function valueOf(name) {
  const known = recorded.get(name), now = computed?.get(name);
  if (now) return { dims: now.dims, kind: now.kind, type: known?.type ?? "", at: flat => now.data[flat], isWhole: true, tensor: now };
  if (!known || known.text !== undefined) return { text: known?.text ?? "not recorded" };
  const { dims, kind, type, histogram, top, statistics, parts, overview } = known;
  if (known.data) return { dims, kind, type, histogram, top, at: flat => known.data[flat], isWhole: true, tensor: known.whole ? undefined : known };
  return { dims, kind, type, histogram, top, statistics, parts, overview, isWhole: false, at: flat => partial(known, flat) };
}
function partial(known, flat) {
  const index = indexOf(flat, known.dims), lead = index.slice(0, -2), [row, column] = [0, ...index].slice(-2);
  for (const part of known.parts) {
    const r = row - part.from[0], c = column - part.from[1];
    if (Interpreter.same(part.lead, lead) && r >= 0 && c >= 0 && r < part.size[0] && c < part.size[1]) return part.data[r * part.size[1] + c];
  }
  return undefined;
}
// What a step gives to a cotangent: its contribution, or the sum of several, if its node reads the value several times
function sumOf(names) {
  const values = names.map(valueOf), [{ dims, kind }] = values;
  if (values.length === 1 || values.some(one => one.dims === undefined)) return values[0];
  return { dims, kind, isWhole: values.every(one => one.isWhole), at: flat => values.reduce((sum, one) => sum + one.at(flat), 0) };
}
function show(number, digits = 4) {
  if (number === undefined) return "?";
  if (typeof number === "string") return number;
  if (!Number.isFinite(number)) return String(number).replace("Infinity", "∞").replace("-", "−");
  if (Number.isInteger(number) && Math.abs(number) < 1e7) return String(number).replace("-", "−");
  const size = Math.abs(number);
  const text = size < 1e-3 || size >= 1e6 ? number.toExponential(digits - 2) : String(Number(number.toPrecision(digits)));
  return text.replaceAll("-", "−");
}
const shapeText = dims => (dims.length ? dims.join(" × ") : "scalar");
const placeText = index => (index.length ? `[${index.join(", ")}]` : "");
function shownName(name, of) {
  const owners = cotangentsOf.get(name) ?? [], owner = of ?? owners.find(one => steps[position - 1]?.incoming.includes(one)) ?? owners[0]; // as the step calls it
  if (owner !== undefined) return `∂${owner}`;
  const [part] = contributionsOf.get(name) ?? [];
  return part ? `contribution to ∂${part.of}` : name;
}

// Colours

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let colors;
function tintOf(number, most) {
  if (typeof number !== "number" || !most || !Number.isFinite(number)) return "transparent";
  const share = Math.min(1, Math.abs(number) / most);
  return share ? `rgba(${number > 0 ? colors.plus : colors.minus}, ${(0.06 + 0.36 * share).toFixed(3)})` : "transparent";
}
function largest(numbers) {
  let most = 0;
  for (const one of numbers) if (Number.isFinite(one) && Math.abs(one) > most) most = Math.abs(one);
  return most;
}

const largestOf = value => largest(value.isWhole ? range(0, count(value.dims)).map(value.at) : [value.statistics.least, value.statistics.most].map(numberOf));

// A tensor: a window of numbers, and a heat map where the window does not show all

function planesOf(value) {
  const rank = value.dims.length, [rows, columns] = [1, 1, ...value.dims].slice(-2);
  if (value.isWhole) {
    const lead = value.dims.slice(0, Math.max(0, rank - 2));
    return Array.from({ length: count(lead) }, (_, k) => ({ lead: indexOf(k, lead), start: k * rows * columns, from: [0, 0], size: [rows, columns], columns, read: (r, c) => value.at((k * rows + r) * columns + c) }));
  }
  return value.parts.map(part => {
    const lead = value.dims.slice(0, Math.max(0, rank - 2));
    const k = part.lead.reduce((sum, at, axis) => sum * lead[axis] + at, 0);
    return { lead: part.lead, start: k * rows * columns, from: part.from, size: part.size, columns, read: (r, c) => part.data[r * part.size[1] + c] };
  });
}
function statisticsOf(value) {
  if (!value.isWhole) {
    const { least, most, mean, zeros, infinite } = value.statistics;
    return `${show(numberOf(least))} to ${show(numberOf(most))}, mean ${show(meanOf(numberOf(mean), value))}` + (zeros ? `, ${plural(zeros, "zero")}` : "") + (infinite ? `, ${infinite} not finite` : "");
  }
  const total = count(value.dims);
  if (total < 7 || value.kind !== "f") return "";
  const [least, most] = extremes(value), sum = range(0, total).reduce((sum, k) => sum + value.at(k), 0);
  return `${show(least)} to ${show(most)}, mean ${show(meanOf(sum / total, value))}`;
}
const meanOf = (mean, value) => (Math.abs(mean) < 1e-6 * largestOf(value) ? 0 : mean); // less is rounding
function metaText(value) {
  if (value.text !== undefined) return value.text;
  return [computed && value.kind === "f" ? "float64" : value.type, shapeText(value.dims), statisticsOf(value)].filter(Boolean).join(" · ");
}

function arrayView(name, { label = name, of, kinks = [] } = {}) {
  const value = valueOf(name);
  if (value.text !== undefined) return element("p", { class: "soft small" }, value.text);
  if (count(value.dims) === 0) return element("p", { class: "soft small" }, "no elements");
  const box = element("div", { class: "array" });
  const draw = () => box.replaceChildren(...arrayParts(name, value, label, of, kinks, draw, box));
  draw();
  return box;
}
function arrayParts(name, value, label, of, kinks, draw, box) {
  const wide = innerWidth < 500 ? 4 : ROWS, tall = ROWS;
  const planes = planesOf(value), state = windowsOf.get(name) ?? { plane: 0, row: 0, column: 0, cell: [0, 0], ...(value.isWhole ? {} : aroundLargest(value, tall, wide)) };
  windowsOf.set(name, state);
  const plane = planes[Math.min(state.plane, planes.length - 1)], [rows, columns] = plane.size;
  state.row = Math.max(0, Math.min(state.row, rows - tall));
  state.column = Math.max(0, Math.min(state.column, columns - wide));
  const flatAt = (row, column) => plane.start + (plane.from[0] + row) * plane.columns + plane.from[1] + column;
  const most = largest(range(0, rows * columns).map(k => plane.read(Math.floor(k / columns), k % columns)));
  const marked = new Set(kinks.map(index => index.join()));
  const rank = value.dims.length, indexAt = (r, c) => indexOf(flatAt(r, c), value.dims);
  const lastRow = Math.min(rows, state.row + tall), lastColumn = Math.min(columns, state.column + wide);
  const head = element("tr", {}, rank > 1 ? element("td", { class: "corner", role: "gridcell" }) : "", range(state.column, lastColumn).map(c => element("th", { scope: "col" }, String(plane.from[1] + c))));
  const body = range(state.row, lastRow).map(r => element("tr", {}, rank > 1 ? element("th", { scope: "row" }, String(plane.from[0] + r)) : "", range(state.column, lastColumn).map(c => {
    const flat = flatAt(r, c), one = plane.read(r, c), index = indexAt(r, c), isHere = state.cell[0] === r && state.cell[1] === c;
    const isChosen = inspected && inspected.name === name && inspected.flat === flat;
    const text = value.kind === "b" ? (one ? "true" : "false") : show(one);
    const cell = element("td", {
      role: "gridcell", tabindex: isHere ? "0" : "-1", "data-row": r, "data-column": c, "aria-label": `${placeText(index)} ${text}`.trim(),
      class: [isChosen && "chosen", marked.has(index.join()) && "kink"].filter(Boolean).join(" ") || undefined, title: placeText(index) || undefined,
    }, text);
    if (value.kind === "f") cell.style.background = tintOf(one, most);
    return cell;
  })));
  const isOneCell = rows === 1 && columns === 1;
  const table = element("table", { class: "grid", role: "grid", "aria-label": `${label}${plane.lead.length ? ` ${placeText(plane.lead)}` : ""}` }, isOneCell ? [] : element("thead", {}, head), element("tbody", {}, isOneCell ? body.map(row => { row.querySelector("th")?.remove(); return row; }) : body));
  if (!table.querySelector("[tabindex='0']")) table.querySelector("td[data-row]")?.setAttribute("tabindex", "0");
  const go = (row, column, focus) => {
    state.cell = [Math.max(0, Math.min(row, rows - 1)), Math.max(0, Math.min(column, columns - 1))];
    const [r, c] = state.cell;
    if (r < state.row) state.row = r;
    if (r >= state.row + tall) state.row = r - tall + 1;
    if (c < state.column) state.column = c;
    if (c >= state.column + wide) state.column = c - wide + 1;
    draw();
    if (focus) box.querySelector("td[tabindex='0']").focus();
  };
  table.addEventListener("click", event => {
    const cell = event.target.closest("td[data-row]");
    if (!cell) return;
    state.cell = [Number(cell.dataset.row), Number(cell.dataset.column)];
    inspectFrom(table, name, flatAt(...state.cell), of, false);
  });
  table.addEventListener("keydown", event => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key], cell = event.target.closest("td[data-row]");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const [r, c] = [Number(cell.dataset.row), Number(cell.dataset.column)];
    if (move) go(r + move[0], c + move[1], true);
    else if (event.key === "Home") go(r, 0, true);
    else if (event.key === "End") go(r, columns - 1, true);
    else if (event.key === "Enter" || event.key === " ") {
      state.cell = [r, c];
      inspectFrom(table, name, flatAt(r, c), of, true);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const lines = [];
  const turning = (text, before, after, what) => lines.push(element("div", { class: "lead" }, button("◀", before, { "aria-label": `${what} before, of ${label}` }), text, button("▶", after, { "aria-label": `Next ${what} of ${label}` })));
  const again = change => event => { // the same button keeps the focus in what is drawn anew
    const place = [...box.querySelectorAll(".lead button")].indexOf(event.currentTarget);
    change();
    draw();
    box.querySelectorAll(".lead button")[place]?.focus({ preventScroll: true });
  };
  if (planes.length > 1) {
    const turn = by => again(() => Object.assign(state, { plane: (state.plane + by + planes.length) % planes.length, row: 0, column: 0, cell: [0, 0] }));
    const place = value.isWhole ? placeText([...plane.lead, ":", ":"].slice(0, rank)) : partText(value, plane, rank);
    turning(`${place}, ${state.plane + 1} of ${planes.length}`, turn(-1), turn(1), "slice");
  } else if (!value.isWhole) lines.push(element("div", { class: "lead" }, partText(value, plane, rank)));
  if (columns > wide) {
    const turn = by => again(() => { state.column += by * wide; });
    turning(`columns ${plane.from[1] + state.column} to ${plane.from[1] + lastColumn - 1} of ${plane.columns}`, turn(-1), turn(1), "columns");
  }
  if (rows > tall) {
    const turn = by => again(() => { state.row += by * tall; });
    turning(`rows ${plane.from[0] + state.row} to ${plane.from[0] + lastRow - 1} of ${value.dims.at(-2)}`, turn(-1), turn(1), "rows");
  }
  const shown = [], { overview } = value;
  const [tallest, widest] = [1, 1, ...value.dims].slice(-2);
  if (overview && Interpreter.same(overview.lead, plane.lead) && (rows < tallest || columns < widest)) {
    shown.push(framed(heatMap(...overview.size, overview.read, 150, `Overview of ${label}`), [plane.from[0] / tallest, plane.from[1] / widest, rows / tallest, columns / widest], "overview; the frame is enlarged"));
  }
  if (rows > tall || columns > wide) {
    const canvas = heatMap(rows, columns, plane.read, 150, `Heat map of ${label}`);
    canvas.addEventListener("click", event => {
      const [x, y] = [event.offsetX / canvas.clientWidth, event.offsetY / canvas.clientHeight];
      go(Math.floor(y * rows), Math.floor(x * columns), false);
    });
    canvas.classList.add("live");
    shown.push(framed(canvas, [state.row / rows, state.column / columns, Math.min(tall, rows) / rows, Math.min(wide, columns) / columns], "click for its numbers"));
  }
  shown.push(element("div", { class: "scroll" }, table));
  if (value.histogram) shown.push(histogram(value, label));
  const top = value.top && `Largest ${value.top.what}: ${placeText(value.top.index)}, with norm ${show(numberOf(value.top.norm), 3)} of ${show(numberOf(value.top.whole), 3)} in all.`;
  return [lines.length ? element("div", { class: "leads" }, lines) : "", ...shown, top ? element("p", { class: "more soft wide" }, top) : ""].filter(Boolean);
}
function aroundLargest(value, tall, wide) { // the window of a part whose middle is the largest element
  const { from } = value.parts[0], [row, column] = [0, ...value.statistics.largest].slice(-2), cell = [row - from[0], column - from[1]];
  return { row: cell[0] - tall / 2, column: cell[1] - wide / 2, cell };
}
function framed(canvas, [top, left, tall, wide], text) {
  const frame = element("span", { class: "frame" });
  Object.assign(frame.style, { top: `${100 * top}%`, left: `${100 * left}%`, height: `${100 * tall}%`, width: `${100 * wide}%` });
  return element("span", { class: "tile" }, element("span", { class: "framed" }, canvas, frame), element("span", {}, text));
}
// How many elements are how large: the heights are logarithms, so that a single one is seen beside a million
function histogram(value, label) {
  const { counts: bins, least, most } = value.histogram, high = Math.log1p(largest(bins));
  const text = `Histogram of ${label}, ${show(least, 3)} to ${show(most, 3)}; the largest bar has ${largest(bins)} elements`;
  const bars = bins.map((one, k) => svg("rect", { x: 6 * k, y: 50 - 50 * (Math.log1p(one) / high), width: 5, height: 50 * (Math.log1p(one) / high), class: least + ((k + 0.5) * (most - least)) / bins.length < 0 ? "minus" : "plus" }));
  return element("span", { class: "tile" }, svg("svg", { class: "histogram", viewBox: `0 0 ${6 * bins.length} 50`, width: 6 * bins.length, height: 50, role: "img", "aria-label": text }, bars), element("span", {}, `${show(least, 3)} to ${show(most, 3)}`), element("span", {}, "how many (log scale)"));
}
function extremes(value) {
  let [least, most] = [Infinity, -Infinity];
  for (let k = 0; k < count(value.dims); k++) [least, most] = [Math.min(least, value.at(k)), Math.max(most, value.at(k))];
  return [least, most];
}
const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, k) => start + k);
function partText(value, plane, rank) {
  const [r, c] = plane.from, [rows, columns] = plane.size;
  const text = [...plane.lead, ...(rank > 1 ? [`${r}:${r + rows}`] : []), `${c}:${c + columns}`];
  const isAround = Interpreter.same(plane.lead, value.parts[0].lead) && Interpreter.same(plane.from, value.parts[0].from);
  return `${isAround ? "around the largest: " : ""}${placeText(text)} of ${shapeText(value.dims)}`;
}
// Colours are proportional, unless nearly all elements are small beside the largest: then they show as many powers of ten as
// make the middle one seen.
function heatMap(rows, columns, at, room, label) {
  const numbers = range(0, rows * columns).map(k => Number(at(Math.floor(k / columns), k % columns))), most = largest(numbers);
  const sizes = numbers.filter(one => one && Number.isFinite(one)).map(Math.abs).sort((a, b) => a - b), upper = sizes[Math.floor(0.9 * sizes.length)];
  const powers = !most || upper > 0.05 * most ? 0 : Math.max(4, Math.ceil(Math.log10(most / sizes[sizes.length >> 1])) + 1);
  const shareOf = one => (!most || !Number.isFinite(one) ? 0 : powers ? Math.max(0, 1 + Math.log10(Math.abs(one) / most) / powers) : Math.abs(one) / most);
  const text = `${label}${powers ? `, the colours on a log scale of ${powers} powers of ten` : ""}`;
  const canvas = element("canvas", { role: "img", "aria-label": text, title: text, width: columns, height: rows }), context = canvas.getContext("2d", { willReadFrequently: true });
  const image = context.createImageData(columns, rows), [plus, minus] = [colors.plus, colors.minus].map(text => text.split(",").map(Number));
  numbers.forEach((one, k) => image.data.set([...(one > 0 ? plus : minus), 255 * Math.min(1, shareOf(one))], 4 * k));
  context.putImageData(image, 0, 0);
  const scale = Math.max(1, Math.min(10, room / Math.max(rows, columns)));
  canvas.style.width = `${Math.max(6, Math.round(columns * scale))}px`;
  canvas.style.height = `${Math.max(6, Math.round(rows * scale))}px`;
  return canvas;
}

// Names in formulas: those of tensors look unlike the letters that only the formula has

const cut = (text, longest = 24) => (text.length <= longest ? text : `${text.slice(0, longest / 2 - 1)}…${text.slice(1 - longest / 2)}`);
const NAME_CLASS = { true: "gradient", false: "tensor" };
// What a letter stands for: "A" for a tensor, "dA" for the gradient of one; undefined where it stands for itself
function meant(token, letters) {
  if (Object.hasOwn(letters, token)) return { name: letters[token], isGradient: false };
  if (token[0] === "d" && Object.hasOwn(letters, token.slice(1))) return { name: letters[token.slice(1)], isGradient: true };
  return undefined;
}
const named = ({ name, isGradient }, make = element, tag = "b") => make(tag, { class: NAME_CLASS[isGradient], mathvariant: make === math && "normal" }, `${isGradient ? "∂" : ""}${make === math ? cut(name) : name}`);

// Formulas: "dA = dY B^T" as MathML; braces group, / is a fraction, words stand in quotes

function formula(text, letters = {}) {
  const tokens = text.match(/"[^"]*"|[{}^_/]|\+=|[\p{L}∂][\p{L}\p{M}\d'′]*|\d+(?:\.\d+)?|[^\s]/gu);
  const atom = () => {
    const token = tokens.shift();
    if (token === "{") {
      const row = math("mrow", {}, parse());
      tokens.shift();
      return row;
    }
    if (token[0] === '"') return math("mtext", {}, token.slice(1, -1).replaceAll(" ", "\u00a0"));
    const what = meant(token, letters);
    if (what) return named(what, math, "mi");
    if (/^[\p{L}∂]/u.test(token)) return math("mi", {}, token);
    return /^\d/.test(token) ? math("mn", {}, token) : math("mo", {}, token);
  };
  function parse() {
    const items = [];
    while (tokens.length && tokens[0] !== "}") {
      let item = atom();
      while (["^", "_", "/"].includes(tokens[0])) {
        const how = tokens.shift(), isSum = item.textContent === "∑";
        item = math(how === "^" ? "msup" : how === "/" ? "mfrac" : isSum ? "munder" : "msub", {}, item, atom());
      }
      items.push(item);
    }
    return items;
  }
  return parse();
}
const BREAKS = ["=", "+=", "+", "−", "·", "⊙", ","];
// The formula as pieces that may stand on lines of their own: each begins with an operator
function broken(text, letters) {
  const pieces = [[]];
  for (const item of formula(text, letters)) {
    if (item.localName === "mo" && BREAKS.includes(item.textContent) && pieces.at(-1).length) {
      item.setAttribute("form", "infix");
      pieces.push([]);
    }
    pieces.at(-1).push(item);
  }
  return element("div", { class: "symbols" }, pieces.map(items => math("math", { displaystyle: "true" }, math("mrow", {}, items))));
}
// The numbers of a small tensor. A click on one shows its terms, if it is an element of a tensor of the model.
function matrix(value, most, { source, of, isFlipped } = {}) {
  const [rows, columns] = [1, 1, ...value.dims].slice(-2);
  const alive = (made, flat) => {
    if (source === undefined) return made;
    made.classList.add("live");
    made.addEventListener("click", () => pick(source, flat, of));
    return made;
  };
  const cell = (r, c) => {
    const one = value.at(r * columns + c), made = math("mtd", { class: "tint-cell" }, math("mn", {}, show(one, 3)));
    if (value.kind === "f") made.style.background = tintOf(one, most);
    return alive(made, isFlipped ? c * rows + r : r * columns + c);
  };
  if (!value.dims.length) return alive(math("mn", {}, show(value.at(0))), 0);
  const table = math("mtable", { class: "matrix" }, range(0, rows).map(r => math("mtr", {}, range(0, columns).map(c => cell(r, c)))));
  return table;
}
function tile(one) {
  if (typeof one === "string") return element("span", { class: "op" }, one);
  const value = one.tensor ? { dims: one.tensor.dims, kind: one.tensor.kind, at: flat => one.tensor.data[flat], isWhole: true } : valueOf(one.name);
  if (value.text !== undefined) return element("span", { class: "tile" }, element("span", {}, `${one.label}: ${value.text}`));
  const [rows, columns] = [1, 1, ...value.dims].slice(-2), isSmall = value.isWhole && value.dims.length <= 2 && rows <= MATRIX && columns <= MATRIX && rows * columns > 0;
  if (isSmall) return element("span", { class: "tile" }, math("math", { display: "inline" }, matrix(value, largest(range(0, rows * columns).map(value.at)), one)), element("span", {}, one.label));
  if (count(value.dims) === 0) return element("span", { class: "tile" }, element("span", {}, `${one.label}: no elements`));
  const plane = value.isWhole ? planesOf(value)[0] : value.overview, read = one.isTurned ? (i, j) => plane.read(j, i) : plane.read;
  const [r, c] = one.isTurned ? [...plane.size].reverse() : plane.size;
  return element("span", { class: "tile" }, heatMap(r, c, read, 84, `Heat map of ${one.label}`), element("span", {}, `${one.label} ${shapeText(one.isTurned ? swapped(value.dims) : value.dims)}`));
}
const swapped = dims => [...dims.slice(0, -2), dims.at(-1), dims.at(-2)];

// The textbook line of an operator: what is written, and what it is made of

const each = (compute, ...tensors) => Interpreter.elementwise(compute, tensors);
const DERIVATIVES = { // f'(X): how it is written, and its value from x and y
  Relu: ['( "1 where " A > 0 ", else 0" )', x => Number(x > 0)], Sigmoid: ["Y ⊙ {{( 1 − Y )}}", (x, y) => y * (1 - y)], Tanh: ["{( 1 − Y^2 )}", (x, y) => 1 - y * y],
  Exp: ["Y", (x, y) => y], Log: ["{1}/A", x => 1 / x], Sqrt: ["{1}/{2 Y}", (x, y) => 0.5 / y], Neg: ["{( − 1 )}", () => -1], Abs: ["sign ( A )", x => Math.sign(x)],
  Reciprocal: ["{( − Y^2 )}", (x, y) => -y * y], Sin: ["cos ( A )", x => Math.cos(x)], Cos: ["{( − sin ( A ) )}", x => -Math.sin(x)],
  Softplus: ["σ ( A )", x => Interpreter.sigmoid(x)], Softsign: ["{1}/{{( 1 + | A | )}^2}", x => 1 / (1 + Math.abs(x)) ** 2],
  Erf: ["{2}/{√ π} e^{− A^2}", x => (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x)], Atan: ["{1}/{1 + A^2}", x => 1 / (1 + x * x)],
  Sinh: ["cosh ( A )", x => Math.cosh(x)], Cosh: ["sinh ( A )", x => Math.sinh(x)],
  LeakyRelu: ["f′ ( A )", (x, y, { alpha = 0.01 }) => (x >= 0 ? 1 : alpha)], Elu: ["f′ ( A )", (x, y, { alpha = 1 }) => (x > 0 ? 1 : alpha * Math.exp(x))],
};
const isMatrix = one => one?.dims?.length >= 2;
// Each returns [{position, written, tiles, value}]: `value` is what the tiles make, and is compared with what the model computed.
const TEXTBOOK = {
  MatMul({ given, d }) {
    const [A, B] = given;
    if (!isMatrix(A) || !isMatrix(B)) return [];
    return [
      { position: 0, written: "dA = dY · B^T", tiles: [d, { ...flipped(B), label: `${B.label}ᵀ` }], between: "·", value: () => Interpreter.contracted("MatMul", [d.tensor, flipped(B).tensor], {}) },
      { position: 1, written: "dB = A^T · dY", tiles: [{ ...flipped(A), label: `${A.label}ᵀ` }, d], between: "·", value: () => Interpreter.contracted("MatMul", [flipped(A).tensor, d.tensor], {}) },
    ];
  },
  Gemm({ given, d, attributes }) {
    const { transA = 0, transB = 0, alpha = 1, beta = 1 } = attributes, [A, B] = given, by = alpha === 1 ? "" : `${alpha} · `, times = (x, y, flags) => Interpreter.contracted("Gemm", [x.tensor, y.tensor], { alpha, ...flags });
    const a = transA ? { position: 0, written: `dA = ${by}B${transB ? "^T" : ""} · dY^T`, tiles: [transB ? { ...flipped(B), label: `${B.label}ᵀ` } : B, { ...flipped(d), label: `${d.label}ᵀ` }], value: () => times(B, d, { transA: transB, transB: 1 }) }
      : { position: 0, written: `dA = ${by}dY · B${transB ? "" : "^T"}`, tiles: [d, transB ? B : { ...flipped(B), label: `${B.label}ᵀ` }], value: () => times(d, B, { transB: transB ? 0 : 1 }) };
    const b = transB ? { position: 1, written: `dB = ${by}dY^T · A${transA ? "^T" : ""}`, tiles: [{ ...flipped(d), label: `${d.label}ᵀ` }, transA ? { ...flipped(A), label: `${A.label}ᵀ` } : A], value: () => times(d, A, { transA: 1, transB: transA }) }
      : { position: 1, written: `dB = ${by}A${transA ? "" : "^T"} · dY`, tiles: [transA ? A : { ...flipped(A), label: `${A.label}ᵀ` }, d], value: () => times(A, d, { transA: transA ? 0 : 1 }) };
    return [a, b, { position: 2, written: `dC = ${beta === 1 ? "" : `${beta} · `}dY`, tiles: beta === 1 ? [d] : [String(beta), d], value: () => each(x => beta * x, d.tensor) }].map(one => ({ between: "·", ...one, tiles: by && one.position < 2 ? [String(alpha), ...one.tiles] : one.tiles }));
  },
  Add: ({ d }) => [{ position: 0, written: "dA = dY", tiles: [d], value: () => d.tensor }, { position: 1, written: "dB = dY", tiles: [d], value: () => d.tensor }],
  Sub: ({ d }) => [{ position: 0, written: "dA = dY", tiles: [d], value: () => d.tensor }, { position: 1, written: "dB = − dY", tiles: ["−", d], value: () => each(x => -x, d.tensor) }],
  Mul: ({ given: [A, B], d }) => [
    { position: 0, written: "dA = dY ⊙ B", tiles: [d, B], value: () => each((x, y) => x * y, d.tensor, B.tensor) },
    { position: 1, written: "dB = dY ⊙ A", tiles: [d, A], value: () => each((x, y) => x * y, d.tensor, A.tensor) },
  ],
  Div: ({ given: [A, B], d }) => [
    { position: 0, written: "dA = {dY}/{B}", tiles: [d, B], between: "÷", value: () => each((x, y) => x / y, d.tensor, B.tensor) },
    { position: 1, written: "dB = − {dY ⊙ A}/{B^2}", tiles: ["−", d, A, { tensor: B.tensor && each(x => 1 / (x * x), B.tensor), name: B.name, label: `1 / ${B.label}²` }], value: () => each((x, a, b) => (-x * a) / (b * b), d.tensor, A.tensor, B.tensor) },
  ],
  Pow: ({ given: [A, B], d }) => [{ position: 0, written: "dA = dY ⊙ B ⊙ A^{B − 1}", tiles: [d, { tensor: A.tensor && B.tensor && each((a, b) => b * a ** (b - 1), A.tensor, B.tensor), name: A.name, label: `${B.label}·${A.label}^(${B.label}−1)` }], value: () => each((g, a, b) => g * b * a ** (b - 1), d.tensor, A.tensor, B.tensor) }],
  Softmax({ result: [Y], d, attributes }) {
    const axis = attributes.axis ?? -1, isKnown = Y.tensor && d.tensor, sum = isKnown && summed(each((a, b) => a * b, d.tensor, Y.tensor), axis), rest = isKnown && each((g, s) => g - s, d.tensor, sum), total = `∑ ${d.label} ⊙ ${Y.label}`;
    const tiles = isKnown ? [Y, "⊙ (", d, "−", { tensor: sum, label: total }, ")"] : [Y, "⊙ (", d, `− ${total} )`];
    return [{ position: 0, written: `dA = Y ⊙ ( dY − ∑_{"${axisText(attributes)}"} dY ⊙ Y )`, tiles, between: "", value: () => each((y, x) => y * x, Y.tensor, rest), factors: isKnown && [Y, { tensor: rest, label: `(${d.label} − ${total})` }] }];
  },
  LogSoftmax: ({ given: [X], d, attributes }) => [{ position: 0, written: `dA = dY − softmax ( A ) ∑_{"${axisText(attributes)}"} dY`, tiles: [d, "−", { tensor: X.tensor && Interpreter.softmax(X.tensor, attributes.axis ?? -1), name: X.name, label: `softmax(${X.label})` }, "·", { tensor: d.tensor && summed(d.tensor, attributes.axis ?? -1), name: d.name, label: `∑ ${d.label}` }], between: "",
    value: () => each((g, p, s) => g - p * s, d.tensor, Interpreter.softmax(X.tensor, attributes.axis ?? -1), summed(d.tensor, attributes.axis ?? -1)) }],
  ReduceSum: ({ d, given: [X], target }) => [{ position: 0, written: 'dA = dY " for every element that was summed"', tiles: [d], value: () => spread(d, X, target, 1) }],
  ReduceMean: ({ d, given: [X], target }) => [{ position: 0, written: 'dA = {dY}/{n} " for every element"', tiles: [d, "÷", String(X.dims && d.dims ? count(X.dims) / Math.max(1, count(d.dims)) : "n")], between: "", value: () => spread(d, X, target, count(d.dims) / count(X.dims)) }],
  SoftmaxCrossEntropyLoss({ given: [scores, labels, weights], d, attributes }) {
    if (weights || attributes.ignore_index !== undefined) return [];
    const how = attributes.reduction ?? "mean", N = labels.dims ? count(labels.dims) : 1;
    const p = scores.tensor && { tensor: Interpreter.softmax(scores.tensor, 1), label: `softmax(${scores.label})` }, hot = scores.tensor && labels.tensor && { tensor: oneHot(scores.tensor, labels.tensor), label: `onehot(${labels.label})` };
    const written = how === "mean" ? "dA = {softmax ( A ) − onehot ( B )}/{N} · dY" : "dA = ( softmax ( A ) − onehot ( B ) ) ⊙ dY";
    if (!p || !hot || how === "none") return [{ position: 0, written, tiles: [scores, labels] }];
    return [{ position: 0, written, tiles: ["(", p, "−", hot, ")", ...(how === "mean" ? ["÷", String(N)] : []), "·", d], between: "", value: () => each((x, y, g) => ((x - y) * g) / (how === "mean" ? N : 1), p.tensor, hot.tensor, d.tensor) }];
  },
  Conv: ({ given: [X, W], d }) => [
    { position: 0, written: "dA_{i} = ∑_{o} dY_{o} B_{i − o}", tiles: [d, W], between: "∗" }, { position: 1, written: "dB_{k} = ∑_{o} dY_{o} A_{o + k}", tiles: [d, X], between: "⋆" }, { position: 2, written: "dC = ∑ dY", tiles: [d], between: "" },
  ],
  LayerNormalization: ({ given: [X], d }) => [
    { position: 0, written: "dA = {1}/{σ} ( u − mean ( u ) − x̂ ⊙ mean ( u ⊙ x̂ ) )  ,  u = dY ⊙ B  ,  x̂ = {A − mean ( A )}/{σ}  ,  σ \" the standard deviation of \" A", tiles: [d, X], between: "," }, { position: 1, written: "dB = ∑ dY ⊙ x̂  ,  x̂ = {A − mean ( A )}/{σ}", tiles: [d, X], between: "," }, { position: 2, written: "dC = ∑ dY", tiles: [d], between: "" },
  ],
  Gather: ({ given: [, indices], d }) => [{ position: 0, written: "dA_{j} = ∑_{i : B_i = j} dY_{i}", tiles: [d, indices], between: "at" }],
  MaxPool: ({ d }) => [{ position: 0, written: 'dA_{i} = dY_{o} " where " i " is the largest of window " o', tiles: [d] }],
  Concat: ({ d, given }) => given.map((_, position) => ({ position, written: 'dX = "its part of " dY', tiles: [d] })),
  Split: ({ d }) => [{ position: 0, written: 'dA = "the parts side by side"', tiles: [d] }], Slice: ({ d }) => [{ position: 0, written: 'dA = dY " where it was taken, else 0"', tiles: [d] }],
  Transpose: ({ d, attributes }) => [{ position: 0, written: "dA = dY^T", tiles: [d], value: () => Interpreter.transposed(d.tensor, attributes.perm && attributes.perm.map((_, k) => attributes.perm.indexOf(k))) }],
};
for (const name of ["Reshape", "Flatten", "Squeeze", "Unsqueeze"])
  TEXTBOOK[name] = ({ d, given: [X] }) => [{ position: 0, written: 'dA = dY " in the shape of " A', tiles: [d], value: () => Interpreter.reshaped(d.tensor, X.dims) }];
TEXTBOOK.Identity = ({ d }) => [{ position: 0, written: "dA = dY", tiles: [d], value: () => d.tensor }];
for (const [name, [written, derivative]] of Object.entries(DERIVATIVES))
  TEXTBOOK[name] = ({ given: [X], result: [Y], d, attributes }) => {
    const slope = X.tensor && Y.tensor && each((x, y) => derivative(x, y, attributes), X.tensor, Y.tensor);
    const label = `${name}′(${X.label})`;
    return [{ position: 0, written: `dA = dY ⊙ ${written}`, tiles: [d, slope ? { tensor: slope, label } : X], value: () => each((g, s) => g * s, d.tensor, slope), factors: slope && [d, { tensor: slope, label }] }];
  };
function flipped(one) {
  const order = one.dims && one.dims.map((_, k) => k), rank = order?.length;
  if (!one.tensor || rank < 2) return { ...one, isTurned: rank > 1 };
  [order[rank - 1], order[rank - 2]] = [order[rank - 2], order[rank - 1]];
  const tensor = Interpreter.transposed(one.tensor, order);
  return { tensor, dims: tensor.dims, source: one.source, of: one.of, isFlipped: true };
}
const summed = (one, axis) => Interpreter.contracted("ReduceSum", [one], { axes: [axis], keepdims: 1 });
function spread(d, X, target, factor) { // the cotangent of a reduction, repeated over the axes that it summed
  const { axes, keepdims = 1 } = target, at = (axes ?? X.dims.map((_, k) => k)).map(axis => (axis < 0 ? axis + X.dims.length : axis));
  const kept = keepdims ? d.tensor : Interpreter.reshaped(d.tensor, X.dims.map((size, k) => (at.includes(k) ? 1 : size)));
  return Interpreter.expanded(each(x => x * factor, kept), X.dims);
}
function oneHot(scores, labels) {
  const out = Interpreter.filled(scores.dims), [, C] = scores.dims, spots = count(scores.dims.slice(2));
  labels.data.forEach((label, k) => { out.data[(Math.floor(k / spots) * C + label) * spots + (k % spots)] = 1; });
  return out;
}
// An operand of a formula; `source` is the tensor whose elements its numbers are, `of` the value whose gradient it is
const operand = (name, label, of) => (!name ? undefined : { name, label, of, source: name, dims: valueOf(name).dims, tensor: valueOf(name).tensor });
const isStandard = one => one.domain === "" || one.domain === "ai.onnx";
// A for the first input, B for the second, C for the third, Y for the first output: as the textbook's lines write them
function lettersOf(inputs, outputs) {
  const found = [["A", inputs[0]], ["B", inputs[1]], ["C", inputs[2]], ["Y", outputs[0]]].filter(([, name]) => name);
  return Object.fromEntries(found);
}
function textbook(step) {
  const make = isStandard(step) && Object.hasOwn(TEXTBOOK, step.operator) ? TEXTBOOK[step.operator] : undefined, incoming = step.incoming[0], cotangent = data.cotangents[incoming];
  if (!make || !cotangent) return [];
  const d = operand(cotangent.value, `∂${incoming}`, incoming), axes = step.inputs[1] && valueOf(step.inputs[1]), isReduction = step.operator.startsWith("Reduce");
  const target = { ...step.attributes, axes: isReduction && axes?.isWhole ? range(0, count(axes.dims)).map(axes.at) : step.attributes.axes };
  if (target.axes?.length === 0) delete target.axes;
  let found;
  try {
    found = make({ given: step.inputs.map(name => operand(name, name)), result: step.outputs.map(name => operand(name, name)), d, attributes: step.attributes, target });
  } catch {
    return [];
  }
  return found.flatMap(one => {
    const contribution = step.outgoing.find(part => part.position === one.position);
    if (!contribution) return [];
    const { of, value: name, before, axes } = contribution, known = valueOf(name), isPart = isShared(of);
    let isChecked = false;
    if (one.value && known.isWhole && d.tensor)
      try {
        const made = one.value();
        if (!agrees(before ? Interpreter.reshaped(Interpreter.contracted("ReduceSum", [made], { axes, keepdims: 1 }), known.dims) : made, known)) return [];
        isChecked = true;
      } catch {
        return [];
      }
    const [left, right] = one.written.split(/ = (.*)/s), sum = before ? `∑_{"${axesText(axes)}"}` : "";
    return [{ ...one, contribution, isChecked, sum: before ? `∑ over ${axesText(axes)}` : "", letters: { ...lettersOf(step.inputs, [incoming]), X: of },
      written: `${left} ${isPart ? "+=" : "="} ${sum ? `${sum} ( ${right} )` : right}`, result: { name, source: name, of: isPart ? undefined : of, label: isPart ? `contribution to ∂${of}` : `∂${of}` } }];
  });
}
// What a node computes on the way forward, in the same letters: the formula; how its numbers are written, with ? for each
// operand in turn; "" where the numbers are only named
const FORWARD = {
  MatMul: ["A · B", "? · ?"], Add: ["A + B", "? + ?"], Sub: ["A − B", "? − ?"], Mul: ["A ⊙ B", "? ⊙ ?"], Div: ["{A}/{B}", "? ÷ ?"], Pow: ["A^B", "? ^ ?"], Relu: ["max ( 0 , A )", "max(0, ? )"], Sigmoid: ["σ ( A )", "σ( ? )"],
  Tanh: ["tanh ( A )", "tanh( ? )"], Exp: ["exp ( A )", "exp( ? )"], Log: ["log ( A )", "log( ? )"], Sqrt: ["√ A", "√( ? )"], Neg: ["− A", "− ?"], Transpose: ["A^T", "( ? )ᵀ"], Softmax: ["{exp ( A )}/{∑_{AXIS} exp ( A )}", "softmax( ? )"],
  ReduceSum: ["∑_{AXIS} A", "∑( ? )"], ReduceMean: ["mean_{AXIS} ( A )", "mean( ? )"], SoftmaxCrossEntropyLoss: ['− {1}/{N} ∑ log softmax ( A ) " at the class " B', ""], Conv: ["A ∗ B + C", ""], Identity: ["A", "?"],
  Reshape: ['A " in another shape"', ""], Flatten: ['A " in another shape"', ""], Gather: ['A " at the indices " B', "? at ?"], MaxPool: ['"the largest of each window of " A', ""],
  LayerNormalization: ["{A − mean ( A )}/{σ ( A )} ⊙ B + C", ""],
};
const FIRST_ALONE = ["Reshape", "ReduceSum", "ReduceMean"]; // their other inputs are sizes and axes
function forwardLine(node) {
  const given = node.inputs.map(name => operand(name, name));
  if (!isStandard(node)) return undefined;
  if (node.operator === "Gemm") return gemmLine(node, given);
  if (!Object.hasOwn(FORWARD, node.operator) || (node.operator === "SoftmaxCrossEntropyLoss" && (given[2] || (node.attributes.reduction ?? "mean") !== "mean"))) return undefined;
  const isOrder = node.operator === "Transpose" && given[0]?.dims?.length !== 2;
  const [written, numbers] = isOrder ? ['A " with its axes in another order"', ""] : FORWARD[node.operator], operands = FIRST_ALONE.includes(node.operator) ? given.slice(0, 1) : given, axis = summedAxis(node);
  const right = (given[2] ? written : written.replace(" + C", "")).replace("_{AXIS}", axis ? `_{"${axis}"}` : "");
  return { written: `Y = ${right}`, ...(numbers ? { tiles: filledIn(numbers, operands), between: "", isEqual: true } : { tiles: operands, between: "," }) };
}
const filledIn = (numbers, operands) => { const left = [...operands]; return numbers.split(" ").map(part => (part === "?" ? left.shift() : part)); };
function gemmLine(node, given) {
  const { transA, transB, alpha = 1, beta = 1 } = node.attributes, times = (factor, text) => (factor === 1 ? text : `${factor} · ${text}`), turned = (one, isTurned) => (isTurned ? { ...flipped(one), label: `${one.label}ᵀ` } : one);
  const written = `Y = ${times(alpha, `A${transA ? "^T" : ""} · B${transB ? "^T" : ""}`)}${given[2] ? ` + ${times(beta, "C")}` : ""}`;
  const numbers = `${times(alpha, "? · ?")}${given[2] ? ` + ${times(beta, "?")}` : ""}`;
  return { written, tiles: filledIn(numbers, [turned(given[0], transA), turned(given[1], transB), given[2]]), between: "", isEqual: true };
}
// The axis or axes that a node sums over, "" for all of them
function summedAxis(node) {
  if (node.operator === "Softmax") return axisText(node.attributes);
  const given = node.inputs[1] ? valueOf(node.inputs[1]) : undefined, axes = given?.isWhole ? range(0, count(given.dims)).map(given.at) : node.attributes.axes;
  return axes?.length ? axesText(axes) : "";
}
function agrees(made, known) {
  if (!known.tensor || !Interpreter.same(made.dims, known.dims)) return false;
  const most = largest(made.data), allowed = toleranceOf(known.type) * 10 * most + 1e-12;
  for (let k = 0; k < made.data.length; k++) {
    const [a, b] = [made.data[k], known.at(k)];
    if (!(Math.abs(a - b) <= allowed || a === b || (Number.isNaN(a) && Number.isNaN(b)))) return false;
  }
  return true;
}
const toleranceOf = type => (type === "float64" ? 1e-9 : type === "float32" || type === "" ? 1e-4 : type.includes("float") ? 2e-2 : 1e-9);

// Changed numbers

const tensors = () => new Map([...recorded].filter(([name, one]) => one.data && !one.whole && !producers.has(name)).map(([name, one]) => [name, Interpreter.tensor(one.dims, Float64Array.from(one.data), one.kind)]));
// Why no number can be changed, "" where one can
function whyNot() {
  if (data.forward.length > EDITABLE_NODES) return `Numbers can be changed on models of up to ${EDITABLE_NODES} nodes; this one has ${data.forward.length}.`;
  const strange = nodes.find(node => !Interpreter.knows(node));
  if (strange) return `Numbers cannot be changed: this page cannot compute ${strange.operator}.`;
  const large = data.values.find(one => !("at" in one));
  if (large) return `Numbers cannot be changed: ${large.name} is too large for this page, or is no tensor of numbers.`;
  const full = new Map([...recorded].map(([name, one]) => [name, Interpreter.tensor(one.dims, Float64Array.from(one.data), one.kind)]));
  const differs = (name, made, slack, times) => {
    const one = recorded.get(name);
    if (!one) return false;
    if (!Interpreter.same(made.dims, one.dims)) return true;
    const allowed = toleranceOf(one.type) * times * (largest(made.data) + slack);
    return made.data.some((x, k) => !(Math.abs(x - one.data[k]) <= allowed || x === one.data[k] || (Number.isNaN(x) && Number.isNaN(one.data[k]))));
  };
  try {
    for (const node of nodes) {
      const inputs = node.inputs.map(name => (name ? full.get(name) : undefined)), made = Interpreter.apply(node, inputs);
      const slack = 0.01 * largest(inputs.map(one => (one ? largest(one.data) : 0)));
      const k = made.findIndex((one, at) => node.outputs[at] && differs(node.outputs[at], one, slack, 1));
      if (k >= 0) return `Numbers cannot be changed: of ${node.outputs[k]} (${node.operator}) this page computes other numbers than were recorded.`;
    }
    unrounded = Interpreter.run(nodes, tensors());
    for (const [name, made] of unrounded)
      if (differs(name, made, 0.1, 10)) return `Numbers cannot be changed: this page computes other numbers of ${name} than were recorded.`;
  } catch (error) {
    return `Numbers cannot be changed: ${error.message}.`;
  }
  return "";
}
function recompute() {
  if (!changed.size) computed = null;
  else computed = Interpreter.run(nodes, new Map([...tensors(), ...changed]));
}
// Set an element of an input or weight; returns what is wrong, or ""
function change(name, flat, number) {
  const before = new Map(changed), old = changed.get(name) ?? tensors().get(name);
  const next = Interpreter.tensor(old.dims, Float64Array.from(old.data), old.kind);
  next.data[flat] = number;
  changed.set(name, next);
  try {
    recompute();
    return "";
  } catch (error) {
    changed = before;
    recompute();
    return `That cannot be computed: ${error.message}.`;
  }
}
// The central difference of the output by an element of a forward value, and what of it is rounding; undefined where it cannot be had
function central(of, flat) {
  if (mayEdit !== "" || !forwardNames.has(of)) return undefined;
  const value = valueOf(of);
  if (value.kind !== "f" || !value.tensor) return undefined;
  const base = new Map([...tensors(), ...changed]), forward = data.forward.map(at => nodes[at]), x = value.at(flat), h = 1e-5 * Math.max(1, Math.abs(x));
  const at = moved => {
    const tensor = Interpreter.tensor(value.dims, Float64Array.from(value.tensor.data), "f");
    tensor.data[flat] = moved;
    const made = Interpreter.run(forward, base, new Map([[of, tensor]]));
    let sum = 0;
    for (const [output, seed] of Object.entries(data.seeds)) {
      const weight = base.get(seed), out = made.get(output);
      out.data.forEach((one, k) => { if (weight.data[k] !== 0) sum += one * weight.data[k]; });
    }
    return sum;
  };
  try {
    const [above, below] = [at(x + h), at(x - h)];
    return { value: (above - below) / (2 * h), noise: (1e-14 * largest([above, below])) / h };
  } catch {
    return undefined;
  }
}
const difference = (of, flat) => central(of, flat)?.value;

// The element that was clicked

function madeOf(name, flat, of) {
  const value = valueOf(name), owners = cotangentsOf.get(name) ?? [], owner = of && owners.includes(of) ? of : owners[0], cotangent = owner !== undefined && data.cotangents[owner];
  if (cotangent && cotangent.contributions.length > 1)
    return { how: "The sum of what each reader contributes:", sum: cotangent.contributions.map(one => ({ from: [[one.value, flat]], factor: 1, label: contributor(one) })) };
  const part = sumsOf.get(name);
  if (part) {
    const before = valueOf(part.before);
    if (before.dims && count(before.dims) <= 1 << 16)
      try {
        const from = range(0, count(before.dims)).filter(k => Interpreter.broadcastFlat(k, value.dims, before.dims) === flat);
        return { how: `Summed over ${axesText(part.axes)}, along which ${part.of} was broadcast:`, sum: from.map(k => ({ from: [[part.before, k]], factor: 1 })) };
      } catch { /* the shapes do not align: the emitted node says how */ }
  }
  return byNode(name, flat);
}
function byNode(name, flat) {
  const made = producers.get(name);
  if (!made) return { how: Object.values(data.seeds).includes(name) ? "Where the way back starts (the seed): how the output changes with itself." : "Given: an input or a constant." };
  const [node, output] = made, inputs = node.inputs.map(one => (one ? valueOf(one) : undefined));
  if (inputs.some(one => one && one.dims === undefined) || valueOf(name).dims === undefined) return { how: `Made by ${node.operator}.`, node };
  let found = {};
  try {
    found = Interpreter.terms(node, output, flat, { output: valueOf(name).dims, inputs: inputs.map(one => one?.dims) }, inputs.map(one => one?.tensor));
  } catch { /* what cannot be taken apart is named */ }
  if (found.move) return { how: `Moved by ${node.operator} from`, move: [node.inputs[found.move[0]], found.move[1]], node };
  if (found.sum) return { how: `${node.operator} adds up ${plural(found.sum.length, "term")}:`, sum: found.sum.map(one => ({ ...one, from: one.from.map(([k, at]) => [node.inputs[k], at]) })), node };
  if (found.of && SOFTMAXES.includes(node.operator)) return { how: softmaxText(node, flat, found.of), of: found.of.map(([k, at]) => [node.inputs[k], at]), node };
  if (found.of) return { how: `${node.operator} of`, of: found.of.map(([k, at]) => [node.inputs[k], at]), node };
  return { how: `Made by ${node.operator} of ${node.inputs.filter(Boolean).map(one => shownName(one)).join(", ")}.`, node };
}
const SOFTMAXES = ["Softmax", "LogSoftmax"];
// How a softmax makes an element from those along its axis, with the sum
function softmaxText(node, flat, along) {
  const x = numberAt([node.inputs[0], flat]), powers = along.map(([, at]) => Math.exp(numberAt([node.inputs[0], at]))), sum = powers.reduce((a, b) => a + b, 0);
  const over = `over the ${axisText(node.attributes)}`;
  if (!Number.isFinite(sum) || sum === 0) return `${node.operator} ${over} of`;
  return node.operator === "Softmax" ? `exp(${show(x)}) ÷ ∑ exp ${over} = ${show(Math.exp(x))} ÷ ${show(sum)}, of` : `${show(x)} − log ∑ exp ${over} = ${show(x)} − log ${show(sum)}, of`;
}
// Where an element comes from that was only moved
function origin(name, flat) {
  for (let k = 0; k < 20 && !forwardNames.has(name) && !cotangentsOf.has(name); k++) {
    const { move } = byNode(name, flat);
    if (!move || numberAt(move) !== numberAt([name, flat])) break;
    [name, flat] = move;
  }
  return [name, flat];
}
const axisText = ({ axis = -1 }) => (axis === -1 ? "last axis" : `axis ${axis}`);
const axesText = axes => (axes.length === 1 ? `axis ${axes[0]}` : `axes ${axes.join(", ")}`);
const contributor = one => (one.step === null ? "the start" : `step ${one.step}: ${steps[one.step - 1].operator}${byInput(one, ", ")}`);

function inspect(name, flat, of, from = []) {
  inspected = { name, flat, of, trail: from };
  renderInspector();
  render(false);
}
// Inspect a number of a formula
function pick(name, flat, of) {
  isByKeyboard = false;
  inspect(name, flat, of);
  uncover();
  focusField(() => leave());
}
function focusField(otherwise) {
  const field = find("inspector").querySelector(".edit input");
  if (!field) otherwise();
  field?.focus({ preventScroll: true });
  field?.select();
}
// Scroll the element that is inspected out from under the inspector, where that lies over the page
function uncover() {
  const cell = document.querySelector("#step td.chosen"), box = find("inspector");
  if (!cell || getComputedStyle(box).position !== "fixed") return;
  const [a, b] = [cell.getBoundingClientRect(), box.getBoundingClientRect()];
  if (a.bottom > b.top && a.right > b.left) scrollBy(0, a.bottom - b.top + 12);
}
// Inspect an element of a table. The step is drawn anew: the cell stays where it is on the screen. The cursor goes into the field
// in which the number can be changed; without one, who clicked can step on with the arrows, who came by the keyboard is at the cell.
let isByKeyboard = false;
const grids = () => [...document.querySelectorAll("#step table.grid")];
function inspectFrom(table, name, flat, of, byKeyboard) {
  const place = grids().indexOf(table), top = table.getBoundingClientRect().top;
  isByKeyboard = byKeyboard;
  inspect(name, flat, of);
  const moved = (grids()[place]?.getBoundingClientRect().top ?? top) - top;
  if (Math.abs(moved) > 1) scrollBy(0, moved);
  uncover();
  focusField(() => leave(place));
}
// Give up the field or the inspector: to the cell for who came by the keyboard, else to the step, where arrows step on
function leave(place = grids().findIndex(grid => grid.querySelector(".chosen"))) {
  const cell = isByKeyboard && grids()[place]?.querySelector("td[tabindex='0']");
  (cell || find("step")).focus({ preventScroll: true });
}
function closeInspector() {
  const place = grids().findIndex(grid => grid.contains(document.activeElement) || grid.querySelector(".chosen"));
  inspected = null;
  find("inspector").hidden = true;
  find("body").classList.remove("inspecting");
  render(false);
  leave(place);
}
function reference([given, givenFlat], trail) {
  const [name, flat] = origin(given, givenFlat), value = valueOf(name);
  const index = value.dims ? placeText(indexOf(flat, value.dims)) : "";
  return button(`${shownName(name)}${index}`, () => { inspect(name, flat, undefined, trail); uncover(); find("inspector").focus({ preventScroll: true }); }, { class: "link" });
}
const numberAt = ([name, flat]) => {
  const one = valueOf(name).at?.(flat);
  return typeof one === "string" ? Number(one) : one;
};

function productOf(term) {
  const numbers = term.from.map(numberAt);
  return numbers.some(x => x === undefined) ? undefined : numbers.reduce((a, b) => a * b, term.factor);
}

function renderInspector() {
  const { name, flat, of, trail } = inspected, value = valueOf(name), box = find("inspector");
  box.hidden = false;
  find("body").classList.add("inspecting");
  const index = value.dims ? indexOf(flat, value.dims) : [], here = [...trail, { name, flat, of }].slice(-6);
  const parts = [button("×", closeInspector, { class: "close", "aria-label": "Close the element (Esc)" })];
  if (trail.length) parts.push(element("p", { class: "trail" }, button("← back", () => { const before = trail.at(-1); inspect(before.name, before.flat, before.of, trail.slice(0, -1)); }, { class: "link" })));
  parts.push(element("h2", {}, `${shownName(name, of)}${placeText(index)}`));
  if (hiddenNames().has(name)) {
    box.replaceChildren(...parts, element("p", {}, "The quiz hides it: guess first."));
    return;
  }
  const number = value.at(flat);
  parts.push(element("p", { class: "value" }, value.kind === "b" ? String(Boolean(number)) : show(number, 6)));
  const owner = of ?? cotangentsOf.get(name)?.[0];
  if (owner !== undefined) parts.push(element("p", { class: "soft small" }, `How much ${data.of} changes with ${owner}${placeText(index)}.`));
  const [part] = owner === undefined ? contributionsOf.get(name) ?? [] : [];
  if (part) parts.push(element("p", { class: "soft small" }, `By ${contributor(part)}.`));
  const made = madeOf(name, flat, of), textual = textbookFactors(name, flat);
  if (textual) parts.push(textual);
  parts.push(element("p", { class: "small" }, made.how));
  if (made.move) parts.push(element("p", {}, reference(made.move, here), ` = ${show(numberAt(made.move))}`));
  if (made.of) parts.push(termTable(made.of.map(one => [reference(one, here), show(numberAt(one))]), ["element", "value"]));
  if (made.sum) parts.push(...sumTable(made.sum, number, value, here));
  const times = owner !== undefined && isWholeCotangent(name, owner) ? differenceOf(owner, name, flat, made.sum) : null;
  if (times) parts.push(times);
  if (made.node) parts.push(element("p", { class: "soft small" }, "written as ", element("code", {}, nodeText(made.node))));
  if (mayEdit === "" && data.inputs.includes(name) && value.kind !== "b") parts.push(editor(name, flat, number, value, index));
  box.replaceChildren(...parts.filter(Boolean));
}
const isWholeCotangent = (name, owner) => data.cotangents[owner]?.value === name;
function termTable(rows, head, foot) {
  const line = (cells, tag = "td") => element("tr", {}, cells.map(cell => element(tag, tag === "th" ? { scope: "col" } : {}, cell)));
  return element("table", { class: "terms" }, element("thead", {}, line(head, "th")), element("tbody", {}, rows.map(cells => line(cells))), foot ? element("tfoot", {}, line(foot)) : "");
}
function sumTable(sum, number, value, here) {
  const terms = sum.map(one => {
    return { ...one, numbers: one.from.map(numberAt), product: productOf(one) };
  });
  if (!terms.length) return [element("p", { class: "small" }, "No term: it is 0.")];
  const total = terms.some(one => one.product === undefined) ? undefined : terms.reduce((sum, one) => sum + one.product, 0);
  const shown = terms.slice(0, MANY_TERMS);
  const rows = shown.map(one => [
    [one.label ? [one.label, element("br")] : "", ...(one.factor === 1 ? [] : [show(one.factor), " · "]), one.from.flatMap((from, k) => [k ? " · " : "", reference(from, here)])],
    one.from.length > 1 || one.factor !== 1 ? [one.factor === 1 ? "" : `${show(one.factor)} · `, one.numbers.map(x => show(x)).join(" · ")].join("") : "",
    show(one.product),
  ]);
  const parts = [element("div", { class: "scroll" }, termTable(rows, ["term", "numbers", "value"], terms.length > shown.length ? undefined : ["sum", "", show(total, 6)]))];
  if (terms.length > shown.length) parts.push(element("p", { class: "small" }, `and ${terms.length - shown.length} more; all ${terms.length} add up to ${show(total, 6)}.`));
  if (total === undefined) parts.push(element("p", { class: "soft small" }, "Some of the numbers are not in this page: their tensors are too large."));
  else {
    const scale = Math.max(Math.abs(number), largest(terms.map(one => one.product)));
    if (Math.abs(total - number) > toleranceOf(value.type) * 10 * scale && total !== number)
      parts.push(element("p", { class: "wrong small" }, `These terms add up to ${show(total, 6)}, not to ${show(number, 6)}: the terms shown here are not what the model added.`));
  }
  return parts;
}
function textbookFactors(name, flat) {
  const part = contributionsOf.get(name)?.find(one => one.step !== null && one.value === name && !one.before);
  const line = part && textbook(steps[part.step - 1]).find(one => one.contribution.value === name && one.factors && one.isChecked);
  if (!line) return null;
  const numbers = line.factors.map(one => one.tensor.data[flat]);
  return element("p", { class: "small" }, `${line.factors.map(one => `${one.label}${placeText(indexOf(flat, one.tensor.dims))}`).join(" · ")} = ${numbers.map(x => show(x)).join(" · ")}`);
}
// The difference beside an element of a cotangent. A gradient may be 0 but for the rounding of float32, so that the difference is
// compared with the gradient in float64 where this page computes it, else the rounding of the terms of its sum is allowed for.
function differenceOf(owner, name, flat, sum) {
  const shown = valueOf(name), index = indexOf(flat, shown.dims), mine = central(owner, flat);
  const told = changed.size ? undefined : steps.map(step => step.difference).find(one => one && one.of === owner && one.element.join() === index.join());
  const value = told ? numberOf(told.difference) : mine?.value;
  if (value === undefined) return null;
  const exact = mine && (computed ?? unrounded).get(name), gradient = exact ? exact.data[flat] : shown.at(flat), loose = toleranceOf(shown.type);
  const slack = exact ? 1e-6 * largest(exact.data) + mine.noise : loose * largestOf(shown) + 1e-6 * largest((sum ?? []).map(productOf));
  const off = Math.abs(value - gradient), isClose = off <= Math.max(1e-3, loose) * Math.max(Math.abs(value), Math.abs(gradient)) + slack;
  return element("p", { class: "small difference" }, `Finite difference, (f(x + h) − f(x − h)) / 2h: ${show(value, 6)}`, isClose ? element("span", { class: "right" }, " ✓") : element("span", { class: "wrong" }, ` differs by ${show(off, 2)}: is there a kink nearby?`));
}
const LARGEST = { float16: 65504, bfloat16: 3.3895313892515355e38, float32: 3.4028234663852886e38 };
// The number that a reader typed, NaN where it is none. 0,25 is a number; 1,000 may be one or a thousand, so it is refused.
function typed(text) {
  const written = text.trim().replace("−", "-");
  if (/^[-+]?[1-9]\d{0,2},\d{3}$/.test(written)) return NaN;
  const plain = written.replace(",", ".");
  return /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(plain) ? Number(plain) : NaN;
}
// The shortest way to write a number: 0.1 for the float32 0.10000000149011612
function shortest(number, type) {
  if (type !== "float32" || !Number.isFinite(number)) return String(number);
  return String(range(1, 10).map(digits => Number(number.toPrecision(digits))).find(one => Math.fround(one) === number) ?? number);
}
function editor(name, flat, number, value, index) {
  const input = element("input", { type: "text", inputmode: "decimal", value: shortest(number, value.type), autocomplete: "off" });
  const note = element("p", { class: "small wrong", role: "status" });
  const form = element("form", { class: "edit" }, element("label", {}, `Change ${name}${placeText(index)}`, input), element("button", {}, "Set"), changed.size ? button("Undo all", undo) : "", note);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const next = typed(input.value), most = LARGEST[value.type] ?? Infinity;
    if (!Number.isFinite(next)) note.textContent = "Write a number such as 0.25.";
    else if (Math.abs(next) > most) note.textContent = `${value.type} ends at ${show(most)}: write a smaller number.`;
    else if (value.kind === "i" && !Number.isInteger(next)) note.textContent = "This is a whole number: write one.";
    else {
      note.textContent = plain(change(name, flat, next));
      if (note.textContent) return;
      renderInspector();
      render(false);
      say(`${name}${placeText(index)} is ${next}`);
      leave();
    }
  });
  return form;
}
function undo() {
  changed = new Map();
  computed = null;
  if (inspected) renderInspector();
  render(false);
}

// Quiz

function hiddenNames() {
  if (!quiz) return new Set();
  const hidden = new Set(), open = new Set(Object.values(data.seeds));
  steps.forEach((step, k) => {
    const own = [...step.outgoing.flatMap(one => [one.value, one.before]), ...step.emitted.flatMap(at => nodes[at].outputs)];
    const isHidden = step.question && !solved.has(k);
    own.forEach(name => (isHidden ? hidden : open).add(name));
  });
  for (const one of Object.values(data.cotangents)) if (one.contributions.some(part => hidden.has(part.value) && !open.has(part.value))) hidden.add(one.value);
  for (const name of open) if (!isSumOfHidden(name, hidden, open)) hidden.delete(name);
  return hidden;
}
const isSumOfHidden = (name, hidden, open) => (cotangentsOf.get(name) ?? []).some(of => data.cotangents[of].contributions.some(part => part.value !== name && hidden.has(part.value) && !open.has(part.value)));

// Python wrote which question a step asks, so that the page and the table of answers agree
function guess(k) {
  const { of, values, element: index, number, asksShape, asked: what } = steps[k].question, value = sumOf(values), flat = index.reduce((sum, at, axis) => sum * value.dims[axis] + at, 0);
  const input = element("input", { type: "text", autocomplete: "off", inputmode: asksShape ? "text" : "decimal", value: drafts.get(k) });
  input.addEventListener("input", () => drafts.set(k, input.value));
  input.addEventListener("focus", stop);
  const feedback = element("p", { role: "status", class: "feedback" });
  const again = values.length > 1 && !asksShape ? `${steps[k].operator} reads ${of} ${values.length} times: add what each gives. ` : "";
  const asked = `What is ${what.startsWith("∂") ? "" : "the "}${what}? ${asksShape ? `Write it as ${SHAPE}.` : `${again}Two per cent off is close enough.`}`;
  const form = element("form", { class: "guess" }, element("p", {}, element("strong", {}, "Guess first. "), asked), element("label", {}, capital(what), input), element("button", {}, "Check"), button("Show the answer", () => reveal(k)), feedback);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const said = asksShape ? judgeShape(input.value, value.dims) : judge(input.value, value.isWhole ? value.at(flat) : number, value);
    feedback.className = `feedback ${said.isRight ? "right" : "wrong"}`;
    feedback.textContent = plain(said.text);
    if (said.isRight) reveal(k, said.text);
  });
  return form;
}
const asking = () => range(0, steps.length).filter(k => steps[k].question);
function scoreText() {
  if (!quiz) return "";
  const open = asking().filter(k => !solved.has(k)), right = asking().filter(k => rightly.has(k)).length;
  return element("p", { class: "score" }, `Quiz: ${right} of ${asking().length} answered`, open.length ? [`, ${open.length} open: `, listOf(open.map(k => link(k + 1)))] : "", ".");
}
// A reload of the page keeps the answers; where the browser stores nothing for a file, it forgets them
const memory = () => `walk ${find("data").textContent.trim().slice(-32)}`;
function remember() {
  try {
    sessionStorage.setItem(memory(), JSON.stringify([[...solved], [...rightly]]));
  } catch { /* it stores nothing */ }
}
function recall() {
  try {
    const [open, right] = JSON.parse(sessionStorage.getItem(memory())) ?? [[], []];
    open.forEach(k => solved.add(k));
    right.forEach(k => rightly.add(k));
  } catch { /* it stores nothing */ }
}
function reveal(k, text = "") {
  solved.add(k);
  if (text) rightly.add(k);
  remember();
  render(false);
  say(text || "The answer is shown.");
  find("step").querySelector("h2").after(element("p", { class: "feedback right" }, text ? `✓ ${text}` : "The answer is below."));
}
const SHAPE = "[4, 3]";
const capital = text => text[0].toUpperCase() + text.slice(1);
function judgeShape(text, dims) {
  if (!/^\s*[[(]?\s*\d+((\s*[,x×]\s*|\s+)\d+)*\s*,?\s*[\])]?\s*$/i.test(text)) return { text: `Write a shape such as ${SHAPE}.` };
  const given = text.match(/\d+/g).map(Number);
  if (Interpreter.same(given, dims)) return { isRight: true, text: `Right: ${placeText(dims)}. A gradient has the shape of its value.` };
  if (Interpreter.same([...given].reverse(), dims)) return { text: "Turned around: the axes are in another order." };
  return { text: given.length === dims.length ? "The number of axes is right, a size is not. A gradient has the shape of its value." : `It has ${plural(dims.length, "axis").replace("axiss", "axes")}. A gradient has the shape of its value.` };
}
function judge(text, answer, value) {
  const given = typed(text);
  if (!Number.isFinite(given)) return { text: "Write a number such as 0.25." };
  const slack = 1e-6 * (value.isWhole ? largestOf(value) : Math.abs(answer)), fits = (a, b) => Math.abs(a - b) <= 0.02 * Math.abs(b) + slack;
  if (fits(given, answer)) return { isRight: true, text: `Right: ${show(answer, 5)}.` };
  if (fits(-given, answer)) return { text: "The size is right, the sign is not." };
  for (const factor of [2, 0.5, 10, 0.1]) if (fits(given * factor, answer)) return { text: `Off by a factor of ${factor < 1 ? 1 / factor : factor}: ${factor > 1 ? "too small" : "too large"}.` };
  if (value.isWhole && given !== 0) {
    const other = range(0, count(value.dims)).find(k => fits(given, value.at(k)));
    if (other !== undefined) return { text: `That is the element ${placeText(indexOf(other, value.dims))}: are the operands in the right order, and transposed where they must be?` };
  }
  return { text: Math.abs(given) < Math.abs(answer) ? "Too small in size." : "Too large in size." };
}

// The step

function nodeText(node) {
  const attributes = Object.entries(node.attributes).map(([name, value]) => `${name} = ${attributeText(value)}`);
  return `${node.outputs.filter(Boolean).join(", ")} = ${node.operator}(${node.inputs.map(name => name || "–").join(", ")})${attributes.length ? ` {${attributes.join(", ")}}` : ""}`;
}
function attributeText(value) {
  if (value && value.graph) return `graph of ${plural(value.graph.length, "node")}`;
  if (value && value.data) return value.data.length > 6 ? `tensor ${shapeText(value.dims)}` : `[${Array.from(value.data, one => show(one)).join(", ")}]`;
  if (value && value.text !== undefined) return value.text;
  return Array.isArray(value) ? `[${value.slice(0, 12).join(", ")}${value.length > 12 ? ", …" : ""}]` : String(value);
}
function card(title, name, { label, of, note, kinks, out = false, level = "h4" } = {}) {
  const isHidden = hiddenNames().has(name);
  return element("div", { class: out ? "card out" : "card" }, element(level, {}, title),
    isHidden ? element("p", { class: "masked" }, "hidden by the quiz") : [element("p", { class: "meta" }, metaText(valueOf(name))), arrayView(name, { label, of, kinks })],
    note ? element("p", { class: "more soft" }, note) : "");
}
const link = number => button(`step ${number}`, () => go(number), { class: "link" });
function sumNote(of) {
  const { contributions, alias } = data.cotangents[of];
  if (contributions.length < 2) return alias ? `Unchanged: it equals ∂${alias}.` : "";
  return ["The sum of ", contributions.flatMap((one, k) => [k ? " + " : "", one.step === null ? "the start" : [link(one.step), ` (${steps[one.step - 1].operator}${byInput(one, ", ")}${hiddenNames().has(one.value) ? "" : sizeNote(one.value)})`]]), `: ${of} is read more than once, and contributions add.`];
}
function sizeNote(name) {
  const value = valueOf(name);
  return value.dims && value.dims.length === 0 && value.isWhole ? ` ${show(value.at(0))}` : "";
}
function outgoing(step, one) {
  const cotangent = data.cotangents[one.of], total = cotangent?.contributions.length ?? 1, notes = [];
  const through = step.incoming.find(of => data.cotangents[of]?.value === (one.before || one.value));
  if (through !== undefined) notes.push(`∂${through} passes through unchanged${one.before ? ", before it is summed" : ": no node is written for it"}. `);
  if (one.before) notes.push(`${one.of} was repeated (broadcast) along ${axesText(one.axes)}, so its gradient is summed over ${axesText(one.axes)}: ${shapeText(valueOf(one.before).dims ?? [])} becomes ${shapeText(valueOf(one.value).dims ?? [])}. `);
  if (total > 1) {
    const others = cotangent.contributions.filter(part => part.step !== step.number || part.position !== one.position);
    notes.push(`One of ${total} contributions to ∂${one.of}; the ${total > 2 ? "others come" : "other comes"} from `, listOf(others.map(part => sourceOf(part, step))), ".");
  }
  const cards = [card([total > 1 ? "contribution to " : "", gradientName(one.of), byInput(one, ", ")], one.value, { label: `∂${one.of}`, of: total > 1 ? undefined : one.of, note: notes, out: true, kinks: kinksOf(step, one.of).flatMap(kink => kink.elements) })];
  const isLast = total > 1 && cotangent.contributions.every(part => part.step === null || part.step <= step.number) && step.outgoing.filter(part => part.of === one.of).at(-1) === one;
  if (isLast) cards.push(card([gradientName(one.of), ", the sum"], cotangent.value, { label: `∂${one.of}`, of: one.of, note: sumNote(one.of), out: true }));
  return cards;
}
// Where another contribution comes from, as a step says it
function sourceOf(part, step) {
  if (part.step === null) return "the start";
  return part.step === step.number ? `the ${inputOf(part) || "same node"}` : [link(part.step), byInput(part, ", ")];
}
function lineOf(one, isHidden) {
  const symbols = broken(one.written, one.letters), caption = one.contribution && inputOf(one.contribution) ? element("p", { class: "soft small" }, byInput(one.contribution, "By the ")) : "";
  if (isHidden) return element("div", { class: "line" }, symbols, caption);
  const between = one.between ?? "⊙", tiles = [];
  one.tiles.filter(Boolean).forEach(part => {
    if (tiles.length && typeof part !== "string" && typeof tiles.at(-1) !== "string" && between) tiles.push(between);
    tiles.push(part);
  });
  return element("div", { class: "line", tabindex: "0", role: "group", "aria-label": `Formula with numbers: ${symbols.textContent}` }, symbols, caption,
    element("div", { class: "numbers" }, tile(one.result), kept([one.value ? "=" : "from", ...(one.sum ? [one.sum] : []), ...tiles])),
    one.isChecked && !changed.size ? element("p", { class: "soft small" }, "✓ This page computed the formula: it gives the model's numbers.") : "");
}
// Tiles, each on one line with the operators before it; what follows the last one stays with it
function kept(tiles) {
  const groups = [[]];
  for (const part of tiles) {
    if (groups.at(-1).some(one => typeof one !== "string")) groups.push([]);
    groups.at(-1).push(part);
  }
  if (groups.length > 1 && groups.at(-1).every(one => typeof one === "string")) groups.at(-2).push(...groups.pop());
  return groups.map(parts => element("span", { class: "kept" }, parts.map(tile)));
}
let unfolded = false;
function emittedView(step, k) {
  const isHidden = quiz && step.question && !solved.has(k);
  const numbers = step.emitted.filter(at => !nodes[at].shape).length, total = step.emitted.length;
  if (!total) return element("p", { class: "soft" }, "No node is written for this step.");
  const details = element("details", { class: "fold", id: "emitted", open: unfolded && !isHidden }, element("summary", { title: TERMS.written }, `Nodes written: ${total}${numbers < total ? `, ${total - numbers} of them for sizes and indices` : ""}`));
  const fillIn = () => {
    if (details.open && details.children.length === 1)
      details.append(isHidden ? element("p", { class: "masked" }, "hidden by the quiz") : element("ol", { class: "nodes" }, step.emitted.map(at => emittedNode(nodes[at]))));
  };
  details.addEventListener("toggle", () => { unfolded = details.open; fillIn(); });
  fillIn();
  return details;
}
function emittedNode(node) {
  const bodies = Object.entries(node.attributes).filter(([, value]) => value && value.graph);
  return element("li", { class: node.shape ? "shape" : undefined }, element("code", {}, nodeText(node)), node.shape ? element("span", { class: "badge" }, "sizes and indices") : "",
    node.outputs.filter(name => name && recorded.has(name)).map(name => [element("p", { class: "meta soft small" }, shownName(name) === name ? "" : `${shownName(name)}: `, metaText(valueOf(name))), node.shape && count(valueOf(name).dims ?? [0]) > 8 ? "" : arrayView(name, { label: name })]),
    bodies.map(([name, { graph }]) => element("details", {}, element("summary", { class: "small" }, `${name}: ${plural(graph.length, "node")}`), element("ol", {}, graph.map(line => element("li", {}, element("code", {}, line)))))));
}
function kinksOf(step, name) { // those of the recorded numbers: none are known of changed ones
  return changed.size ? [] : step.kinks.filter(kink => name === undefined || kink.input === name);
}
// The literature's words, in tooltips and in the help
const TERMS = {
  incoming: "Incoming gradient: how the result changes with what this node made. The literature says cotangent or adjoint.",
  outgoing: "Outgoing gradients: how the result changes with what this node read. Incoming to outgoing is a vector–Jacobian product (VJP), or pullback.",
  read: "Values of the forward pass that the rule of this operator needs.",
  written: "The nodes of the gradient model that compute this step.",
};
const heading = (text, term) => element("h3", { title: TERMS[term] }, text);
const listOf = parts => parts.flatMap((part, k) => [k === 0 ? "" : k === parts.length - 1 ? " and " : ", ", part]);
const tensorName = name => named({ name, isGradient: false }), gradientName = name => named({ name, isGradient: true });
const isShared = of => data.cotangents[of].contributions.length > 1;
const isPart = (step, of) => data.cotangents[of].contributions.some(one => one.step !== step.number);
const targetsOf = step => [...new Set(step.outgoing.map(one => one.of))];
// "first input" for a contribution of a node that reads the value several times, else ""
function inputOf(one) {
  const isOnly = one.step === null || steps[one.step - 1].outgoing.filter(part => part.of === one.of).length < 2;
  return isOnly || one.position < 0 ? "" : `${["first", "second", "third"][one.position] ?? `${one.position + 1}th`} input`;
}
const byInput = (one, before) => inputOf(one) && `${before}${inputOf(one)}`;
const inline = (line, node) => math("math", {}, math("mrow", {}, formula(line.written, lettersOf(node.inputs, node.outputs))));
// "h = MatMul(x, W1)", whose names lead to the node that made each value
function callOf(node) {
  const maker = name => {
    const row = rowOf.get(name);
    return row === undefined ? tensorName(name) : button(tensorName(name), () => go(forwardAt(row)), { class: "link", title: `See how ${name} is made` });
  };
  const attributes = Object.entries(node.attributes).map(([name, value]) => `${name} = ${attributeText(value)}`).join(", ");
  return element("p", { class: "soft small" }, listOf(node.outputs.filter(name => name && !data.extra.includes(name)).map(tensorName)), ` = ${node.domain ? `${node.domain}.` : ""}${node.operator}(`, node.inputs.flatMap((name, k) => [k ? ", " : "", name ? maker(name) : "–"]), ")", attributes ? ` with ${attributes}` : "");
}
const title = (text, node) => element("h2", {}, text, node && node !== text.split(": ")[1] ? element("span", { class: "soft" }, ` · ${node}`) : "");
function forwardView(row) {
  const node = nodes[data.forward[row]], line = forwardLine(node), read = [...new Set(node.inputs.filter(Boolean))], made = node.outputs.filter(name => name && !data.extra.includes(name));
  return [
    title(`Forward ${row + 1} of ${data.forward.length}: ${node.operator}`, node.name),
    callOf(node),
    element("p", {}, `${node.operator} makes `, listOf(made.map(tensorName)), read.length ? [" from ", listOf(read.map(tensorName))] : "", "."),
    picture(node.operator, read, made, null),
    line ? lineOf({ ...line, value: line.isEqual, letters: lettersOf(node.inputs, node.outputs), result: { name: made[0], source: made[0], label: made[0] } }, false) : "",
    element("h3", {}, "Made"), element("div", { class: "cards" }, made.map(name => card(tensorName(name), name, { label: name, out: true }))),
    read.length ? [element("h3", {}, "Read"), element("div", { class: "cards" }, read.map(name => card(tensorName(name), name, { label: name })))] : "",
  ];
}
function stepView(k) {
  const step = steps[k], isHidden = quiz && step.question && !solved.has(k), lines = textbook(step), targets = targetsOf(step), made = step.outputs.filter(Boolean), forward = forwardLine(step);
  const parts = [
    title(`Step ${step.number}: ${step.operator}`, step.node),
    callOf(step),
    step.incoming.length && targets.length ? element("p", {}, "Forward: ", forward ? inline(forward, step) : [step.operator, " made ", listOf(made.map(tensorName))], ". Going back, it takes ", listOf(step.incoming.map(gradientName)), " and gives ", listOf(targets.map(of => [isPart(step, of) ? "a part of " : "", gradientName(of)])), ".") : "",
    picture(step.operator, [...new Set(step.inputs.filter(Boolean))], made, step),
    step.formula.length && lines.length < step.outgoing.length ? element("div", { class: "formula" }, step.formula.map(piece => (typeof piece === "string" ? piece : named(piece)))) : "",
    lines.map(one => lineOf(one, isHidden)),
    kinksOf(step).map(one => element("p", { class: "note" }, `${one.input}${one.elements.slice(0, 5).map(placeText).join(", ")}${one.elements.length > 5 ? ` and ${one.elements.length - 5} more` : ""} is at a kink, where no derivative exists. ${one.text}.`)),
    heading("Incoming gradient", "incoming"),
    step.incoming.length ? element("div", { class: "cards" }, step.incoming.map(of => card(gradientName(of), data.cotangents[of]?.value ?? "", { label: `∂${of}`, of, note: sumNote(of) }))) : element("p", { class: "soft" }, "None."),
    heading("Outgoing gradients", "outgoing"),
    isHidden ? guess(k) : "",
    isHidden ? "" : step.outgoing.length ? element("div", { class: "cards" }, step.outgoing.map(one => outgoing(step, one))) : element("p", { class: "soft" }, "None that is asked for."),
    step.difference && !isHidden ? checkText(step, step.difference) : "",
    readView(step, lines),
    emittedView(step, k),
  ];
  return parts;
}
// The values that the rule needs; folded if the formulas show all of them
function readView(step, lines) {
  if (!step.read.length) return "";
  const shown = new Set(lines.flatMap(line => line.tiles).map(one => one?.source));
  const cards = element("div", { class: "cards" }, step.read.map(name => card(tensorName(name), name, { label: name, note: readNote(step, name), kinks: kinksOf(step, name).flatMap(kink => kink.elements) })));
  if (!step.read.every(name => shown.has(name))) return [heading("Values it needs", "read"), cards];
  return element("details", { class: "fold", id: "read" }, element("summary", { title: TERMS.read }, "Values it needs: ", listOf(step.read.map(tensorName)), ", as in the formula"), cards);
}
function readNote(step, name) {
  if (data.extra.includes(name)) return `An output of ${step.operator} that the gradient model adds, so that this is not computed again.`;
  return step.outputs.includes(name) && !step.inputs.includes(name) ? `The result of ${step.operator}, which tells as much as its input here.` : "";
}
// A finite difference beside an element of a gradient that is complete at this step; of changed numbers it is taken here
function checkText(step, one) {
  const { complete, value } = data.cotangents[one.of], place = placeText(one.element);
  if (complete > step.number) return element("p", { class: "small check" }, `∂${one.of} is complete at `, link(complete), ", after its last contribution.");
  const flat = one.element.reduce((sum, at, axis) => sum * valueOf(one.of).dims[axis] + at, 0);
  const [told, gradient] = changed.size ? [difference(one.of, flat), valueOf(value).at(flat)] : [numberOf(one.difference), numberOf(one.gradient)];
  if (told === undefined) return "";
  return element("p", { class: "small check" }, `Checked by a finite difference: moving ${one.of}${place} a little changed ${data.of} by ${show(told, 6)} times as much; ∂${one.of}${place} is ${show(gradient, 6)} (error ${show(Math.abs(told - gradient), 2)}).`);
}
const derivative = (of, by) => math("math", { displaystyle: "true" }, math("mfrac", {}, math("mrow", {}, math("mo", {}, "∂"), math("mi", { mathvariant: "normal" }, of)), math("mrow", {}, math("mo", {}, "∂"), math("mi", { mathvariant: "normal" }, by))));
function startView() {
  return [
    element("h2", {}, `How does ${data.of} change with each number before it?`),
    element("p", {}, `First forward: ${plural(data.forward.length, "node")} from the inputs to ${data.of}. Then back through ${plural(steps.length, "node")}, the last one first: each step multiplies by one derivative more (the chain rule). `, gradientName("v"), ` is short for `, derivative(data.of, "v"), `: how much ${data.of} changes with each element of `, tensorName("v"), "."),
    element("p", { class: "choices" }, button("Forward, node by node →", () => go(forwardAt(0))), button("Straight to the way back", () => go(0)), quiz && asking().length ? button("To the first question", () => go(asking()[0] + 1)) : ""),
    quiz ? element("p", {}, `Quiz: ${plural(asking().length, "question")} on the way back, one a step. Each hides its numbers until you answer.`) : "",
    element("h3", {}, "Inputs and weights"),
    mayEdit === "" ? element("p", { class: "soft" }, "Click a number to change it: everything follows.") : element("p", { class: "soft", id: "why-not" }, mayEdit ?? ""),
    listed("inputs", data.inputs, name => card(tensorName(name), name, { label: name, level: "h4" })),
  ];
}
function turnView() {
  return [
    element("h2", {}, `The way back starts at ${data.of}`),
    element("p", {}, derivative(data.of, data.of), " = 1: that is the first gradient. Every step back takes an incoming gradient and gives outgoing ones."),
    element("div", { class: "cards" }, Object.entries(data.seeds).map(([name, seed]) => [card(tensorName(name), name, { label: name, level: "h3" }), card([gradientName(name), ", the start"], seed, { label: `∂${name}`, of: name, out: true, level: "h3" })])),
  ];
}
function endView() {
  const constants = data.inputs.filter(name => !data.wrt.includes(name) && valueOf(name).kind === "f");
  return [
    element("h2", {}, "End: the gradients"),
    element("p", {}, `How much ${data.of} changes with each element of ${data.wrt.length > 1 ? "these inputs and weights" : data.wrt[0] ?? "nothing"}.`),
    constants.length ? element("p", { class: "soft" }, "Taken for constants, so they have no gradient here: ", listOf(constants.map(tensorName)), `. --wrt ${constants[0]} asks for one.`) : "",
    scoreText(),
    listed("gradients", data.wrt, name => {
      const one = data.cotangents[name];
      return one ? card(gradientName(name), one.value, { label: `∂${name}`, of: name, note: sumNote(name), out: true, level: "h3" }) : element("div", { class: "card" }, element("h3", {}, gradientName(name)), element("p", { class: "soft" }, "zero: no path leads from it to the output"));
    }),
  ];
}
const whole = new Set(); // lists that are shown in full
function listed(what, names, cardOf) {
  const shown = whole.has(what) ? names : names.slice(0, FEW_CARDS);
  const more = button(`Show all ${names.length} ${what}`, () => {
    whole.add(what);
    render(false);
  });
  return [element("div", { class: "cards" }, shown.map(cardOf)), shown.length < names.length ? element("p", {}, more) : ""];
}

// The picture of a node: what it reads on the left, what it makes on the right; values go right, gradients come back

const GAP = 10, MOST_BOXES = 6;
// The largest magnitude of a gradient that is known so far; undefined before its step, and while the quiz hides it
function sizeOf(names) {
  const value = sumOf(names), hidden = hiddenNames();
  return value.dims && value.kind === "f" && count(value.dims) && (value.isWhole || names.length === 1) && !names.some(name => hidden.has(name)) ? largestOf(value) : undefined;
}
function picture(operator, read, made, step) {
  const width = Math.min(680, Math.max(300, find("step").clientWidth || 680)), isNarrow = width < 480, gap = isNarrow ? 26 : 56, high = isNarrow ? 62 : 46, box = (width - 2 * gap) / 3, letters = 2 * Math.floor((box - 14) / 15);
  const given = read.slice(0, MOST_BOXES), results = made.slice(0, MOST_BOXES), tall = Math.max(given.length, results.length, 1), height = tall * (high + GAP) + GAP;
  const place = (k, of) => GAP + (k + (tall - of) / 2) * (high + GAP), middle = height / 2, parts = [];
  const arrow = (x1, y1, x2, y2, kind, strength = 1) => {
    const bend = (x1 + x2) / 2;
    parts.push(svg("path", { class: kind, d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, "marker-end": `url(#to-${kind})`, "stroke-width": strength.toFixed(1) }));
  };
  const value = (name, x, y, gradient, size) => {
    const { dims } = valueOf(name), row = rowOf.get(name), known = size === undefined ? "" : `max ${show(size, 2)}`;
    const symbol = `${gradient && step.outgoing.some(one => one.of === name) && isPart(step, name) ? "part of " : ""}∂`;
    const texts = gradient ? (isNarrow ? [`${symbol}${name}`, known] : [[`${symbol}${cut(name, letters - 2 * Math.floor((known.length + symbol.length) / 2))}`, known].filter(Boolean).join(", ")]) : [dims ? shapeText(dims) : ""];
    const lines = [svg("text", { class: "tensor", x: x + 7, y: y + 18 }, cut(name, letters)), texts.map((text, k) => svg("text", { class: gradient ? "gradient" : "soft", x: x + 7, y: y + 36 + 17 * k }, isNarrow ? cut(text, letters) : text))];
    const made = svg("g", { class: row === undefined ? "box" : "box live" }, svg("title", {}, gradient ? `${name}, and ∂${name}${size === undefined ? "" : `: its largest element is ${show(size, 2)} in size`}` : row === undefined ? name : `${name}: see how it is made`), svg("rect", { x, y, width: box, height: high, rx: 6 }), lines);
    if (row !== undefined) made.addEventListener("click", () => go(forwardAt(row)));
    parts.push(made);
  };
  const sizes = new Map((step ? targetsOf(step) : []).map(of => [of, sizeOf(step.outgoing.filter(one => one.of === of).map(one => one.value))])), coming = new Map((step?.incoming ?? []).map(of => [of, data.cotangents[of] && sizeOf([data.cotangents[of].value])]));
  const most = largest([...sizes.values(), ...coming.values()].filter(one => one !== undefined)), strength = size => 1.5 + 2.5 * (most && size ? Math.max(0, 1 + Math.log10(size / most) / 4) : 0);
  const [left, right] = [box + gap, 2 * box + gap];
  given.forEach((name, k) => {
    const y = place(k, given.length) + high / 2, at = middle + (k - (given.length - 1) / 2) * 16;
    arrow(box, y - 7, left - 6, at - 4, "value");
    if (sizes.has(name)) arrow(left, at + 6, box + 6, y + 9, "gradient", strength(sizes.get(name)));
    value(name, 0, y - high / 2, sizes.has(name), sizes.get(name));
  });
  results.forEach((name, k) => {
    const y = place(k, results.length) + high / 2;
    arrow(right, middle - 5, right + gap - 6, y - 7, "value");
    if (coming.has(name)) arrow(right + gap, y + 9, right + 6, middle + 7, "gradient", strength(coming.get(name)));
    value(name, right + gap, y - high / 2, coming.has(name), coming.get(name));
  });
  parts.push(svg("g", { class: "node" }, svg("title", {}, operator), svg("rect", { x: left, y: middle - 22, width: box, height: 44, rx: 22 }), svg("text", { x: left + box / 2, y: middle + 5, "text-anchor": "middle" }, cut(operator, 2 * Math.floor(box / 17)))));
  const heads = ["value", "gradient"].map(kind => svg("marker", { id: `to-${kind}`, class: kind, viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" })));
  const text = `${read.join(", ") || "Nothing"} into ${operator}, which makes ${made.join(", ")}.${step ? ` ${[...coming.keys()].map(of => `∂${of}`).join(", ") || "No gradient"} comes back and becomes ${[...sizes.keys()].map(of => `∂${of}`).join(", ") || "none that is asked for"}.` : ""}`;
  const more = read.length - given.length + made.length - results.length;
  return element("div", { class: "picture" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text }, svg("defs", {}, heads), parts), more ? element("p", { class: "soft small" }, `and ${more} more`) : "");
}

// The map

const ROW = 26, LANE = 12;
let rowElements = [], shownCopies = "";
const rowOf = new Map(), stepAt = new Map(), flows = new Map(); // the row of a value's node; the step of a row; the size of the gradient along an edge
// Positions: -(rows + 1) is the beginning, -rows to -1 go forward, 0 is the output, 1 is the first step back, the last are the gradients
const firstPosition = () => -(data.forward.length + 1), lastPosition = () => steps.length + 1, forwardAt = row => row - data.forward.length;
function foldOf(row) { return data.folds.findIndex(([start, length, copies]) => row >= start && row < start + length * copies); }
function currentRow() {
  if (position < 0) return Math.max(-1, position + data.forward.length);
  return position >= 1 && position <= steps.length ? steps[position - 1].row : -1;
}
function copyShown(fold) {
  const [start, length, copies] = data.folds[fold], row = currentRow();
  return row >= start && row < start + length * copies ? Math.floor((row - start) / length) : 1;
}
function renderMap() {
  const lanes = Math.max(0, ...data.lanes) + 1, items = [], place = new Map();
  rowElements = [];
  for (let row = 0; row < data.forward.length; row++) {
    const fold = foldOf(row), isOpen = openFolds.has(fold);
    if (fold >= 0) {
      const [start, length, copies] = data.folds[fold], copy = copyShown(fold);
      if (row === start) {
        const toggle = button(isOpen ? `▾ ${copies} blocks of ${length} nodes` : `▸ block ${copy + 1} of ${copies}: ${length} nodes`, () => {
          if (isOpen) openFolds.delete(fold); else openFolds.add(fold);
          renderMap();
          find("list").querySelector(`[data-fold="${fold}"]`).focus();
        }, { "aria-expanded": String(isOpen), "data-fold": fold });
        items.push(element("li", { class: "fold" }, toggle));
      }
      if (!isOpen && Math.floor((row - start) / length) !== copy) continue;
    }
    const node = nodes[data.forward[row]], step = stepAt.get(row), label = node.name && node.name !== node.operator ? node.name : node.outputs[0];
    const dot = element("span", { class: "dot" });
    const item = element("li", { class: [step === undefined && "off", fold >= 0 && "inside"].filter(Boolean).join(" "), "data-row": row },
      button([dot, element("span", {}, node.operator), element("span", { class: "name" }, label)], () => go(position < 0 || step === undefined ? forwardAt(row) : step), { title: step === undefined ? `${nodeText(node)}: not on the way back` : nodeText(node) }));
    dot.style.marginLeft = `${data.lanes[row] * LANE}px`;
    dot.style.marginRight = `${(lanes - 1 - data.lanes[row]) * LANE}px`;
    place.set(row, items.length);
    rowElements.push([row, item]);
    items.push(item);
  }
  find("list").replaceChildren(...items);
  const y = row => place.get(row) * ROW + ROW / 2, x = row => 10 + data.lanes[row] * LANE + (foldOf(row) >= 0 ? 2 : 0), paths = [];
  data.reads.forEach((makers, row) => {
    if (!place.has(row)) return;
    for (const maker of makers) {
      if (!place.has(maker)) continue;
      const values = nodes[data.forward[maker]].outputs, kept = steps[stepAt.get(row) - 1]?.outgoing.filter(one => values.includes(one.of)).map(one => one.value) ?? [];
      flows.set(`${maker} ${row}`, kept);
      const [x1, y1, x2, y2] = [x(maker), y(maker), x(row), y(row)], path = document.createElementNS(SVG, "path");
      const isFar = place.get(row) - place.get(maker) > 1;
      path.setAttribute("d", x1 === x2 && isFar ? `M${x1} ${y1}C${x1 + 9} ${y1 + 12} ${x1 + 9} ${y2 - 12} ${x2} ${y2}` : x1 === x2 ? `M${x1} ${y1}L${x2} ${y2}` : `M${x1} ${y1}C${x1} ${y2 - 8} ${x2} ${y1 + 8} ${x2} ${y2}`);
      path.dataset.from = maker;
      path.dataset.to = row;
      paths.push(path);
    }
  });
  find("edges").replaceChildren(...paths);
  find("edges").setAttribute("width", String(20 + lanes * LANE));
  find("edges").setAttribute("height", String(items.length * ROW));
  shownCopies = data.folds.map((_, fold) => copyShown(fold)).join();
  markMap();
  search(false);
}
function markMap() {
  if (data.folds.map((_, fold) => copyShown(fold)).join() !== shownCopies) {
    renderMap();
    return;
  }
  const now = currentRow(), isForward = position < 0, behind = new Set(isForward ? range(0, now) : steps.slice(0, Math.max(0, position - 1)).map(step => step.row));
  for (const [row, item] of rowElements) {
    item.classList.toggle("done", !isForward && behind.has(row));
    item.classList.toggle("seen", isForward && behind.has(row));
    item.classList.toggle("now", row === now);
    if (row === now) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  }
  const sizes = [...find("edges").children].map(path => {
    const at = Number(path.dataset.to), isPassed = !isForward && (at === now || behind.has(at));
    return isPassed ? largest(flows.get(`${path.dataset.from} ${at}`).map(name => sizeOf([name])).filter(one => one !== undefined)) : 0;
  });
  const most = largest(sizes);
  [...find("edges").children].forEach((path, k) => { // the gradient that has flowed so far: the larger, the stronger its colour
    const share = sizes[k] ? Math.max(0.15, 1 + Math.log10(sizes[k] / most) / 4) : 0;
    path.classList.toggle("flow", share > 0);
    path.classList.toggle("back", Number(path.dataset.to) === now);
    path.style.strokeWidth = share ? `${1.2 + 2 * share}px` : "";
    path.style.opacity = share ? String(0.35 + 0.65 * share) : "";
  });
  const here = rowElements.find(([row]) => row === now)?.[1];
  if (here) requestAnimationFrame(() => scrollMapTo(here)); // to measure sooner would lay the page out twice
}
function scrollMapTo(item) {
  const frame = innerWidth > 760 ? find("map-details") : find("rows");
  const [a, b] = [item.getBoundingClientRect(), frame.getBoundingClientRect()];
  if (a.top < b.top + 30 || a.bottom > b.bottom - 10) frame.scrollTop += a.top - b.top - b.height / 2;
}
let hits = [];
function search(jump) {
  const text = find("search").value.trim().toLowerCase();
  hits = !text ? [] : steps.flatMap((step, k) => {
    const words = [step.operator, step.node, ...step.inputs, ...step.outputs, ...step.emitted.flatMap(at => [nodes[at].operator, ...nodes[at].outputs])];
    return words.some(word => word.toLowerCase().includes(text)) ? [k] : [];
  });
  const rows = new Set(hits.map(k => steps[k].row));
  for (const [row, item] of rowElements) item.classList.toggle("hit", rows.has(row));
  find("found").textContent = !text ? "" : hits.length ? `${plural(hits.length, "step")}: Enter goes to the next` : "nothing is called so";
  if (jump && hits.length) go((hits.find(k => k + 1 > position) ?? hits[0]) + 1);
}

// Going

function renderNotes() {
  const about = changed.size && data.notes.length ? [element("p", { class: "soft small" }, "With the numbers before the change:")] : [];
  const notes = [...about, ...data.notes.map(text => element("p", { class: "note" }, text))], isFolded = innerWidth <= 760 && position !== firstPosition() && notes.length;
  find("notes").replaceChildren(...(isFolded ? [element("details", {}, element("summary", { class: "small" }, plural(data.notes.length, "note")), notes)] : notes));
}
function render(isNew = true) {
  const isStart = position === firstPosition(), isEnd = position === lastPosition(), scrolled = scrollY, rows = data.forward.length, now = currentRow();
  const [where, view] = isStart ? ["start", startView] : isEnd ? ["end", endView] : position === 0 ? ["output", turnView] : position < 0 ? [`forward ${now + 1} of ${rows}`, () => forwardView(now)] : [`step ${position} of ${steps.length}`, () => stepView(position - 1)];
  renderNotes();
  find("step").replaceChildren(...view().flat(Infinity).filter(Boolean));
  if (changed.size) find("step").prepend(element("p", { class: "note" }, `${plural([...changed.keys()].length, "tensor")} changed (${[...changed.keys()].join(", ")}): everything is computed here, in float64. `, button("Undo all", undo, { class: "link" })));
  find("position").textContent = where;
  const slider = find("slider");
  slider.value = String(position);
  slider.setAttribute("aria-valuetext", plain(now < 0 ? where : `${where}, ${nodes[data.forward[now]].operator}`));
  find("first").disabled = find("previous").disabled = isStart;
  find("next").disabled = find("last").disabled = isEnd;
  markMap();
  if (isNew) say(slider.getAttribute("aria-valuetext"));
  else if (scrollY !== scrolled) scrollTo(0, scrolled);
}
function go(to) {
  const next = Math.max(firstPosition(), Math.min(to, lastPosition()));
  if (next === position) return;
  position = next;
  if (position === lastPosition()) stop();
  history.replaceState(null, "", position < 0 ? `#forward=${position - firstPosition()}` : `#step=${position}`);
  render();
}
function stop() {
  clearInterval(playing);
  playing = 0;
  find("play").textContent = "▶ Play";
  find("play").setAttribute("aria-label", "Play (space)");
}
function play() {
  if (playing) {
    stop();
    return;
  }
  if (position > steps.length) go(firstPosition());
  playing = setInterval(() => go(position + 1), PLAY_MS);
  find("play").textContent = "⏸ Pause";
  find("play").setAttribute("aria-label", "Pause (space)");
}
function setQuiz(on) {
  quiz = on;
  find("quiz").setAttribute("aria-pressed", String(on));
  if (inspected) closeInspector();
  else render(false);
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  find("theme").textContent = name === "dark" ? "Light" : "Dark";
  colors = { plus: color("--plus"), minus: color("--minus") };
}
const switchTheme = () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  render(false);
};
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || find("keys").open) return;
  const isText = event.target.matches("input:not([type=range])"), isControl = event.target.matches("button, summary, input, a, [role=gridcell]");
  if (event.key === "Escape") {
    if (inspected) closeInspector();
    else if (isText) event.target.blur();
    return;
  }
  if (isText) return;
  const isRange = event.target.matches("input[type=range]");
  const action = {
    ArrowRight: () => go(position + 1), ArrowLeft: () => go(position - 1), Home: () => go(firstPosition()), End: () => go(lastPosition()), b: () => go(0), "/": () => { find("map-details").open = true; find("search").focus(); find("search").select(); },
    "?": () => find("keys").showModal(), q: () => setQuiz(!quiz), d: switchTheme, e: () => { const one = find("emitted"); if (one) one.open = !one.open; }, " ": isControl ? undefined : play,
  }[event.key];
  if (!action || (isRange && event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  action();
}
function fromHash() {
  const [, way, number] = /(step|forward)=(\d+)/.exec(location.hash) ?? [];
  if (!way) return position;
  return way === "step" ? Math.min(Number(number), lastPosition()) : Math.min(firstPosition() + Number(number), -1);
}

async function start() {
  try {
    unpack(await read());
  } catch (error) {
    put("summary", `This page cannot be read here: ${error.message}.`);
    return;
  }
  document.title = plain(`${data.title} · backward pass`);
  put("title", data.title);
  put("summary", `The gradient of ${data.of}, step by step · ${plural(data.forward.length, "node")} forward, ${plural(steps.length, "step")} back`);
  find("slider").min = String(firstPosition());
  find("slider").max = String(lastPosition());
  quiz = data.quiz;
  recall();
  for (const place of document.querySelectorAll(".of")) place.textContent = plain(data.of);
  find("quiz").setAttribute("aria-pressed", String(quiz));
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (innerWidth <= 760) find("map-details").open = false;
  position = firstPosition();
  position = fromHash();
  for (const [id, action] of Object.entries({ first: () => go(firstPosition()), previous: () => go(position - 1), next: () => go(position + 1), last: () => go(lastPosition()), play, theme: switchTheme, quiz: () => setQuiz(!quiz), help: () => find("keys").showModal() }))
    find(id).addEventListener("click", action);
  find("slider").addEventListener("input", event => go(Number(event.target.value)));
  find("search").addEventListener("input", () => search(false));
  find("search").addEventListener("keydown", event => event.key === "Enter" && search(true));
  addEventListener("keydown", keys);
  addEventListener("hashchange", () => go(fromHash()));
  document.querySelector(".skip").addEventListener("click", event => {
    event.preventDefault(); // the hash stays that of the step
    find("step").focus();
  });
  renderMap();
  render();
  document.documentElement.dataset.ready = "yes";
  setTimeout(() => {
    mayEdit = whyNot();
    document.documentElement.dataset.editable = mayEdit === "" ? "yes" : "no";
    if (position === firstPosition()) render(false);
    if (inspected) renderInspector();
  }, 30);
}
globalThis.walkPage = { // for those who look from the console
  go, undo,
  change: (name, flat, number) => {
    const wrong = change(name, flat, number);
    render(false);
    return wrong;
  },
  value: name => { const one = valueOf(name); return one.isWhole ? { dims: one.dims, data: range(0, count(one.dims)).map(one.at) } : one; },
  names: () => [...recorded.keys()], document: () => data, difference, madeOf, whyNot: () => mayEdit,
};
start();
})();
