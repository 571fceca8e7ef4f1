import { ask, byId, make, percent, track, trouble } from "./common.js";

const canvas = byId("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
const FILL = 20 / 28; // share of its picture that a digit of MNIST fills
const PATIENCE = 5; // times to ask again while another input is being tried
let subject = null, start = 0, drawn = false, latest = 0;

const chosen = () => `model=${encodeURIComponent(byId("model").value)}`;
const number = (value) => Number(value.toPrecision(3)).toString();

// Drawing

function wipe() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  drawn = false;
}

let last = null;
function point(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
}
function stroke(event) {
  if (last === null) return;
  const now = point(event);
  Object.assign(pen, { strokeStyle: "#fff", lineWidth: canvas.width / 13, lineCap: "round", lineJoin: "round" });
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...now);
  pen.stroke();
  [last, drawn] = [now, true];
}
canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = point(event); stroke(event); });
canvas.addEventListener("pointermove", stroke);
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { last = null; });

// The drawing as MNIST's digits are: as large as they are, with the centre of its ink in the middle.
function centred() {
  const { width, height } = canvas, ink = pen.getImageData(0, 0, width, height).data;
  let [left, top, right, bottom, mass, sumX, sumY] = [width, height, 0, 0, 0, 0, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const value = ink[4 * (y * width + x)];
      if (value > 20) {
        left = Math.min(left, x); right = Math.max(right, x + 1); top = Math.min(top, y); bottom = Math.max(bottom, y + 1);
        mass += value; sumX += value * x; sumY += value * y;
      }
    }
  }
  const copy = make("canvas", { width, height }), scale = FILL * width / Math.max(right - left, bottom - top);
  const brush = copy.getContext("2d");
  brush.fillRect(0, 0, width, height);
  brush.translate(width / 2 - scale * sumX / mass, height / 2 - scale * sumY / mass);
  brush.scale(scale, scale);
  brush.drawImage(canvas, 0, 0);
  return new Promise((done) => copy.toBlob(done, "image/png"));
}

// Asking

async function attempt(body, kind, text) {
  const mine = ++latest, result = byId("result"), status = byId("status");
  result.setAttribute("aria-busy", "true");
  status.textContent = `Looking at ${text}: attack, proof, attribution …`;
  trouble(null);
  try {
    const answer = await patient(`/api/try?${chosen()}&norm=${byId("norm").value}`, { method: "POST", body, headers: { "Content-Type": kind } });
    if (mine !== latest) return; // another input was asked for in the meantime
    byId("answer").replaceChildren(...show(answer));
    status.textContent = `About ${text}, in ${answer.seconds.toFixed(1)} s.`;
  } catch (error) {
    if (mine !== latest) return;
    status.textContent = `Nothing to show for ${text}.`;
    trouble(error);
  }
  result.setAttribute("aria-busy", "false");
}

async function patient(address, options) {
  for (let i = 0; ; i++) {
    try {
      return await ask(address, options);
    } catch (error) {
      if (error.status !== 503 || i === PATIENCE || error.wait > 10) throw error;
      await new Promise((done) => setTimeout(done, 1000 * (error.wait || 1)));
    }
  }
}

// Showing

function picture(source, title, text) {
  return source ? make("li", {}, make("img", { src: source, alt: "" }), make("span", {}, make("b", {}, title), make("br"), text)) : null;
}

function radius(title, kind, value, text) {
  return make("div", {}, make("dt", {}, title), make("dd", {}, make("div", { className: `value ${kind}` }, value), make("span", { className: "note" }, text)));
}

function show({ scores, prediction, label, norm, adversarial, certified, attribution, picture: input }) {
  const top = scores[0].probability, found = adversarial.distance !== null && !adversarial.error;
  const truth = label === null ? "" : label === prediction ? `Right: its label is “${label}”.` : `Wrong: its label is “${label}”.`;
  const attackText = adversarial.error || (found ? `pushes it to “${adversarial.prediction}”; found by ${adversarial.by}` : "no example was found");
  const proofText = certified.error || (certified.radius ? `proved by ${certified.by}${certified.in_time ? "" : "; more time may prove more"}` : "nothing could be proved");
  const widest = found ? adversarial.distance : null;
  const share = widest && certified.radius ? certified.radius / widest : certified.radius ? 1 : 0;
  return [
    make("p", { className: "verdict" }, `It is “${prediction}”, ${percent(top)} sure`, make("small", {}, truth)),
    make("ul", { className: "pictures" },
      picture(input, "Input", "as the model sees it"),
      found ? picture(adversarial.picture, "Nearest example", `seen as “${adversarial.prediction}”`) : null,
      found ? picture(adversarial.difference, "Difference", `${number(adversarial.enlarged)} times; grey is none`) : null,
      picture(attribution.picture, "What decides", `orange for “${prediction}”, blue against`)),
    attribution.error ? make("p", { className: "note" }, `No attribution: ${attribution.error}`) : null,
    make("h3", {}, `How far until it breaks (${norm})`),
    make("dl", { className: "radii" },
      radius("Holds at least up to", "certified", certified.error ? "–" : number(certified.radius), proofText),
      radius("Broken at", "attacked", found ? number(adversarial.distance) : "–", attackText)),
    track(share, found ? 1 : null),
    make("h3", {}, "Scores of the classes"),
    make("div", { className: "scores" }, ...scores.slice(0, 10).flatMap((score) => [
      make("span", { className: "name" }, score.name), track(score.probability, null), make("span", { className: "number" }, percent(score.probability)),
    ])),
  ].filter(Boolean);
}

// Choosing

async function inputs() {
  subject = await ask(`/api/inputs?${chosen()}&start=${start}`);
  byId("inputs").replaceChildren(...subject.inputs.map(({ position, label, picture: source }) => {
    const button = make("button", { type: "button", attributes: { "aria-label": `Test input ${position}, label ${label}` } });
    button.append(source ? make("img", { src: source, alt: "" }) : `${position}`, source ? label : "");
    button.addEventListener("click", () => attempt(JSON.stringify({ input: position }), "application/json", `test input ${position}`));
    return button;
  }));
  const end = start + subject.inputs.length;
  byId("place").textContent = subject.inputs.length ? `${start} to ${end - 1} of ${subject.total}` : "";
  byId("before").disabled = start === 0;
  byId("after").disabled = end >= subject.total;
  byId("drawing").hidden = byId("uploading").hidden = !subject.picture;
}

function turn(step) {
  start = Math.max(0, start + step * subject.inputs.length);
  inputs().catch(trouble);
}

byId("clear").addEventListener("click", wipe);
byId("go").addEventListener("click", async () => {
  if (drawn) attempt(await centred(), "image/png", "the drawing");
  else trouble(new Error("Draw something first."));
});
byId("before").addEventListener("click", () => turn(-1));
byId("after").addEventListener("click", () => turn(1));
byId("model").addEventListener("change", () => { start = 0; inputs().catch(trouble); });
byId("upload").addEventListener("change", (event) => {
  const file = event.target.files[0];
  if (file && file.size > 2 ** 20) trouble(new Error("The picture has more than 1 MB; make it smaller."));
  else if (file) attempt(file, file.type, file.name);
  event.target.value = ""; // so that the same file can be chosen again
});

async function begin() {
  wipe();
  const { models } = await ask("/api/models"), wanted = new URL(location.href).searchParams.get("model");
  byId("model").replaceChildren(...models.map(({ name, data }) => make("option", { value: name, selected: name === wanted }, `${name} (${data})`)));
  if (models.length) await inputs();
  else throw new Error("There is no model to try. Start 'holdfast serve' with --model FILE --data NAME, or train one with 'holdfast train'.");
}

begin().catch(trouble);
