import { curvesOf } from "./curves.js";
import { ask, byId, make, percent, track, trouble, word } from "./common.js";

const SOON = 1000, LATER = 4000; // milliseconds between looks, while something is going on and otherwise
const STATES = { running: "running", silent: "no news", finished: "finished", failed: "failed", stopped: "stopped", unreadable: "cannot be read" };
const LINKS = { "results.csv": "CSV", "audit.json": "JSON", "model-card.md": "Model card", "badge.svg": "Badge" };
const cards = new Map();

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function moment(text) {
  const date = new Date(text);
  return text && !isNaN(date) ? date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "";
}

const address = (run, file) => `/runs/${run.name.split("/").map(encodeURIComponent).join("/")}/${file}`;

// Each part of a card is made again only if what it shows has changed, so that a focused link stays where it is.
const PARTS = {
  head: {
    of: (run) => [run.name, run.state, run.model, run.data, run.created, run.updated && run.kind === "train" ? run.updated : ""],
    show: (run) => [
      make("div", { className: "head" }, make("h2", {}, run.name), make("span", { className: `pill ${run.state}` }, STATES[run.state] || run.state)),
      make("p", { className: "note facts" }, [run.kind === "train" ? "training run" : "audit", run.model && `model ${run.model}`, run.data && `on ${run.data}`, moment(run.created || run.updated)].filter(Boolean).join(" · ")),
    ],
  },
  progress: {
    of: (run) => [run.state, run.step, run.done, run.total, run.seconds, run.headline, run.error],
    show: (run) => {
      if (run.state === "failed") return [make("p", { className: "error" }, run.error || "It failed.")];
      if (run.state === "silent") return [make("p", { className: "error" }, `Nothing heard since ${moment(run.updated) || "its start"}. If it was killed, start it again: it goes on where it stopped.`)];
      if (run.state !== "running") return run.headline ? [make("p", { className: "headline" }, run.headline)] : [];
      const bar = run.total ? make("progress", { max: run.total, value: run.done, attributes: { "aria-label": `Progress of ${run.name}` } }) : null;
      const parts = [run.step, run.total && `${run.done} of ${run.total}`, run.seconds && duration(run.seconds)];
      return [make("div", { className: "progress" }, bar, make("p", { className: "note" }, parts.filter(Boolean).join(" · ")))];
    },
  },
  brackets: {
    of: (run) => [run.brackets],
    show: (run) => run.brackets.length === 0 ? [] : [make("div", { className: "brackets" }, ...run.brackets.map(bracket))],
  },
  curves: {
    of: (run) => [run.curves],
    show: curvesOf,
  },
  links: {
    of: (run) => [run.files, run.kind, run.state],
    show: (run) => [make("div", { className: "links" }, ...links(run))],
  },
};

function bracket({ threat, inputs, clean, certified, attacked }) {
  const share = (count) => (count === null ? null : count / inputs);
  const numbers = [
    certified === null ? "" : `certified ${percent(share(certified))}`,
    attacked === null ? "" : `under attack ${percent(share(attacked))}`,
    clean === null ? "" : `clean ${percent(share(clean))}`,
    `${inputs} inputs`,
  ];
  return make("div", { className: "bracket" },
    make("span", { className: "threat" }, threat), track(share(certified), share(attacked)),
    make("span", { className: "numbers" }, numbers.filter(Boolean).join(" · ")));
}

function links(run) {
  const found = [];
  if (run.files.includes("report.html")) found.push(make("a", { className: "button primary", href: address(run, "report.html") }, "Open the report"));
  for (const [file, text] of Object.entries(LINKS)) {
    if (run.files.includes(file)) found.push(make("a", { href: address(run, file), attributes: { "aria-label": `${text} of ${run.name}` } }, text));
  }
  if (run.kind === "train" && run.state === "finished") found.push(make("a", { className: "button", href: `/try?model=${encodeURIComponent(run.name)}` }, "Try an input"));
  return found;
}

function update(run) {
  let card = cards.get(run.name);
  if (!card) {
    card = { element: make("article", { className: "card run" }), parts: {}, state: run.state };
    for (const name of Object.keys(PARTS)) card.parts[name] = { element: card.element.appendChild(make("div")), seen: "" };
    cards.set(run.name, card);
  }
  for (const [name, { of, show }] of Object.entries(PARTS)) {
    const part = card.parts[name], now = JSON.stringify(of(run));
    if (part.seen !== now) part.element.replaceChildren(...show(run));
    part.seen = now;
  }
  if (card.state !== run.state) byId("status").textContent = `${run.name}: ${STATES[run.state] || run.state}`;
  card.state = run.state;
  return card.element;
}

async function look() {
  let wait = LATER;
  try {
    const { folder, runs } = await ask("/api/runs");
    const list = byId("runs"), names = new Set(runs.map((run) => run.name));
    for (const [name, card] of cards) {
      if (!names.has(name)) { card.element.remove(); cards.delete(name); }
    }
    runs.map(update).forEach((element, i) => {
      if (list.children[i] !== element) list.insertBefore(element, list.children[i] || null);
    });
    const going = runs.filter((run) => run.state === "running").length;
    const text = runs.length === 0 ? `There are no runs in “${folder}” yet. Start one: holdfast audit MODEL --out ${word(`${folder}/first`)}`
      : `${runs.length} ${runs.length === 1 ? "run" : "runs"} in “${folder}”${going ? `, ${going} going on` : ""}.`;
    if (byId("summary").textContent !== text) byId("summary").textContent = text;
    if (going) wait = SOON;
    trouble(null);
  } catch (error) {
    trouble(error);
  }
  setTimeout(next, wait);
}

// A page that nobody sees asks for nothing.
function next() {
  if (document.hidden) document.addEventListener("visibilitychange", next, { once: true });
  else look();
}

look();
