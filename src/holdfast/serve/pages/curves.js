// The curves of a training run as inline SVG: shares on the left, the loss on the right.
import { make, percent } from "./common.js";

const WIDTH = 320, HEIGHT = 170, LEFT = 48, RIGHT = 12, TOP = 10, BOTTOM = 30;

function drawn(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// Larger values higher up; a scale of one value is drawn in the middle.
function scale(low, high, from, to) {
  return (value) => (high === low ? (from + to) / 2 : from + ((value - low) / (high - low)) * (to - from));
}

function panel(curves, label, shown, low, high) {
  const epochs = curves.flatMap((curve) => curve.epochs), first = Math.min(...epochs), last = Math.max(...epochs);
  const x = scale(first, last, LEFT, WIDTH - RIGHT), y = scale(low, high, HEIGHT - BOTTOM, TOP);
  const ends = curves.map((curve) => `${curve.name} ${shown(curve.values[curve.values.length - 1])}`);
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label} over epochs ${first} to ${last}; at the end: ${ends.join(", ")}` });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(drawn("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
  }
  for (const [epoch, anchor] of first === last ? [[first, "middle"]] : [[first, "start"], [last, "end"]]) {
    svg.append(drawn("text", { x: x(epoch), y: HEIGHT - 10, "text-anchor": anchor }, `epoch ${epoch}`));
  }
  for (const curve of curves) {
    const points = curve.epochs.map((epoch, i) => `${x(epoch).toFixed(1)},${y(curve.values[i]).toFixed(1)}`);
    svg.append(drawn("polyline", { class: `curve ${kind(curve)}`, points: points.join(" ") }));
    const [cx, cy] = points[points.length - 1].split(",");
    svg.append(drawn("circle", { class: `end ${kind(curve)}`, cx, cy, r: 3 }));
  }
  const legend = curves.map((curve, i) => make("span", { className: `key curve-key ${kind(curve)}` }, ends[i]));
  return make("figure", { className: "curves" }, svg, make("figcaption", {}, ...legend));
}

const kind = (curve) => curve.loss ? "loss" : curve.name.split(" ").pop();

export function curvesOf(run) {
  const shares = run.curves.filter((curve) => !curve.loss), losses = run.curves.filter((curve) => curve.loss);
  const found = [];
  if (shares.length) found.push(panel(shares, "Accuracy", (value) => percent(value).replace(".0 %", " %"), 0, 1));
  if (losses.length) {
    const values = losses.flatMap((curve) => curve.values);
    found.push(panel(losses, "Loss", (value) => String(Number(value.toPrecision(3))), Math.min(0, ...values), Math.max(...values)));
  }
  return found.length ? [make("div", { className: "plots" }, ...found)] : [];
}
