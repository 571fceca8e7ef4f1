// What both pages need. Text reaches the page as text nodes alone, never as HTML.

// The token is in a cookie by now; it need not stay in the history or on the screen.
const here = new URL(location.href);
if (here.searchParams.has("token")) {
  here.searchParams.delete("token");
  history.replaceState(null, "", here);
}

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const { attributes = {}, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// One word for a shell, whatever it is called.
export const word = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Shares of the whole: what is sure, and what may still be; `open` has the mark of the attack at its end.
export function track(sure, open) {
  const parts = [["open", open], ["sure", sure]].filter(([, share]) => share !== null);
  return make("div", { className: "track", attributes: { "aria-hidden": "true" } }, ...parts.map(([name, share]) => {
    const part = make("i", { className: name });
    part.style.width = `${100 * share}%`;
    return part;
  }));
}

export async function ask(address, options = {}) {
  let response;
  try {
    response = await fetch(address, options);
  } catch {
    throw new Error("There is no answer. Is 'holdfast serve' still running?");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const wait = Number(response.headers.get("Retry-After"));
    throw Object.assign(new Error(body.error || `The answer was ${response.status}.`), { status: response.status, wait });
  }
  return body;
}

export function trouble(error) {
  const text = error ? error.message : "";
  const place = byId("trouble");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !error;
}
