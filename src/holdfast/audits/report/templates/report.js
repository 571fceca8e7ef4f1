"use strict";
(() => {
  const PAGE = 24;
  const SIGNS = { misclassified: "✕", broken: "●", undecided: "◐", certified: "■" };
  const data = JSON.parse(document.getElementById("data").textContent);
  const dialog = document.getElementById("input");
  const nameOf = (number) => data.classes[number] ?? "";
  // A size as the threat is written: 1.4/255, or 0.0055.
  const short = (value, bracket) => {
    const parts = bracket.parts;
    return String(Number((parts ? value * parts : value).toPrecision(4))) + (parts ? "/" + parts : "");
  };

  // An element with properties and children; text is never taken for markup.
  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  function drawn(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  const picture = (source, alt) => make("img", { src: "data:image/png;base64," + source, alt });
  const pill = (state) => make("span", { className: "pill " + state }, SIGNS[state] + " " + state);

  function change(row) {
    const before = nameOf(row.is);
    if (row.state === "misclassified") return nameOf(row.label) + " taken for " + before;
    return row.becomes === undefined ? before : before + " → " + nameOf(row.becomes);
  }

  function radii(row, bracket) {
    if (row.state === "misclassified") return "wrong unchanged";
    const low = row.low ? "holds to " + short(row.low, bracket) + " (" + row.proof + ")" : "nothing proved";
    return low + (row.high === undefined ? ", not broken" : ", broken at " + short(row.high, bracket) + " (" + row.attack + ")");
  }

  function entry(row, bracket, open) {
    const original = data.originals[row.at];
    const thumbs = make("span", { className: "thumbs" });
    if (original) thumbs.append(picture(original, ""));
    if (row.adv) thumbs.append(picture(row.adv, ""));
    if (!original) thumbs.append(make("span", { className: "blank" }, nameOf(row.label)));
    const button = make("button", { type: "button", className: "entry" },
      thumbs, make("strong", {}, change(row)), pill(row.state), make("small", {}, "input " + row.at + ", " + radii(row, bracket)));
    button.addEventListener("click", open);
    return make("li", {}, button);
  }

  // The radius of one input: proved, unknown, broken, from 0 to the largest budget.
  function ruler(row, bracket) {
    const budget = bracket.budget;
    const x = (value) => 300 * Math.min(value / budget, 1);
    const low = x(row.low ?? 0), high = x(row.high ?? budget);
    const svg = drawn("svg", { class: "ruler", viewBox: "0 0 300 14", preserveAspectRatio: "none", role: "img", "aria-label": "radius: " + radii(row, bracket) });
    svg.append(
      drawn("rect", { class: "proved", x: 0, y: 0, width: low, height: 14 }),
      drawn("rect", { class: "unknown", x: low, y: 0, width: Math.max(high - low, 0), height: 14 }),
      drawn("rect", { class: "lost", x: high, y: 0, width: 300 - high, height: 14 }));
    const key = [["proved", "holds"], ["unknown", "not known"], ["lost", "breaks"]].map(([name, text]) => make("span", { className: "key " + name }, text));
    return make("div", { className: "radius" }, svg, make("div", { className: "scale" }, make("span", {}, "0"), ...key, make("span", {}, short(budget, bracket))));
  }

  function details(row, bracket) {
    const shown = [["original", data.originals[row.at]], ["attacked", row.adv],
      ["difference, " + row.times + " times", row.diff], ["what decides", row.why]];
    const pictures = make("div", { className: "pictures" });
    for (const [text, source] of shown) {
      if (source) pictures.append(make("figure", {}, picture(source, text + " of input " + row.at), make("figcaption", {}, text)));
    }
    const facts = [
      ["label", nameOf(row.label)],
      ["prediction", nameOf(row.is)],
      ["state at " + bracket.threat, pill(row.state)],
      ["certified radius", row.low === undefined ? "–" : row.low ? short(row.low, bracket) + " by " + row.proof : "0: nothing proved"],
      ["smallest example", row.high ? short(row.high, bracket) + " by " + row.attack : row.high === 0 ? "0: wrong unchanged" : "none found"],
      ["gap", row.gap === undefined ? "open above" : short(row.gap, bracket)],
    ];
    if (row.becomes !== undefined) facts.push(["taken for", nameOf(row.becomes)]);
    data.columns.forEach((column, k) => facts.push([column, data.groups[row.order][k]]));
    const list = make("dl");
    for (const [key, value] of facts) list.append(make("dt", {}, key), make("dd", {}, value));
    const notes = [];
    if (row.diff) notes.push("Difference: grey is no change, the largest one is black or white.");
    if (row.why) notes.push("What decides: orange speaks for the label, blue against it, on the way from the example to the input.");
    if (row.adv === undefined) notes.push(row.high ? "The example's pictures are not part of this file." : "There is no adversarial example to show.");
    return [pictures, row.state === "misclassified" ? null : ruler(row, bracket), list, make("p", { className: "note" }, notes.join(" "))];
  }

  let seen = null; // what the dialog shows: rows in their order, the place among them, their bracket

  function show(rows, place, bracket) {
    seen = { rows, place, bracket };
    document.getElementById("input-title").textContent = "Input " + rows[place].at;
    dialog.querySelector(".content").replaceChildren(...details(rows[place], bracket).filter((part) => part !== null));
    dialog.querySelector("[name=before]").disabled = place === 0;
    dialog.querySelector("[name=after]").disabled = place === rows.length - 1;
    if (!dialog.open) dialog.showModal();
  }

  function turn(by) {
    const place = seen.place + by;
    if (place >= 0 && place < seen.rows.length) show(seen.rows, place, seen.bracket);
  }

  dialog.querySelector("[name=before]").addEventListener("click", () => turn(-1));
  dialog.querySelector("[name=after]").addEventListener("click", () => turn(1));
  dialog.querySelector("[name=close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  function choices(select, values, all) {
    const counts = new Map();
    for (const value of values) if (value !== undefined) counts.set(value, (counts.get(value) ?? 0) + 1);
    select.append(new Option(all, ""));
    const sorted = [...counts].sort((a, b) => (a[0] < b[0] ? -1 : 1));
    for (const [value, count] of sorted) {
      select.append(new Option((select.name === "label" ? nameOf(value) : value) + " (" + count + ")", value));
    }
    select.disabled = counts.size === 0;
  }

  function start(root, bracket) {
    const control = Object.fromEntries([...root.querySelectorAll("[name]")].map((element) => [element.name, element]));
    const rows = bracket.rows;
    rows.forEach((row, i) => {
      row.order = i;
      row.text = [row.at, nameOf(row.label), nameOf(row.is), nameOf(row.becomes), ...(data.groups[i] ?? [])].join(" ").toLowerCase();
    });
    choices(control.state, rows.map((row) => row.state), "all");
    choices(control.label, rows.map((row) => row.label), "all");
    choices(control.attack, rows.map((row) => row.attack), "any or none");
    choices(control.proof, rows.map((row) => row.proof), "any or none");
    if (rows.some((row) => row.adv)) {
      control.state.value = "broken";
      control.sort.value = "high";
    }
    let page = 0;

    function chosen() {
      const words = control.text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const keep = (row) => words.every((word) => (/^\d+$/.test(word) ? row.text.split(" ").includes(word) : row.text.includes(word)))
        && ["state", "label", "attack", "proof"].every((key) => !control[key].value || String(row[key]) === control[key].value);
      const key = control.sort.value, sign = Number(control.order.value);
      // What has no such number comes last in either order.
      return rows.filter(keep).sort((a, b) => {
        if (a[key] === undefined || b[key] === undefined) return (a[key] === undefined) - (b[key] === undefined) || a.order - b.order;
        return sign * (a[key] - b[key]) || a.order - b.order;
      });
    }

    function update() {
      const found = chosen();
      const pages = Math.max(1, Math.ceil(found.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      const from = page * PAGE, part = found.slice(from, from + PAGE);
      root.querySelector(".entries").replaceChildren(...part.map((row, i) => entry(row, bracket, () => show(found, from + i, bracket))));
      root.querySelector(".count").textContent = found.length
        ? "Inputs " + (from + 1) + " to " + (from + part.length) + " of " + found.length + (found.length < rows.length ? " (of " + rows.length + " in all)" : "")
        : "No input fits; widen the filter.";
      root.querySelector(".page").textContent = "page " + (page + 1) + " of " + pages;
      control.back.disabled = page === 0;
      control.on.disabled = page === pages - 1;
    }

    root.querySelector(".controls").addEventListener("input", () => { page = 0; update(); });
    control.back.addEventListener("click", () => { page -= 1; update(); });
    control.on.addEventListener("click", () => { page += 1; update(); });
    root.hidden = false;
    update();
  }

  for (const root of document.querySelectorAll("[data-gallery]")) start(root, data.brackets[Number(root.dataset.gallery)]);
})();
