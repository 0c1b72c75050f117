// Elements built node by node. Whatever comes from a file is set as text, never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;

// Control, bidirectional, zero-width and unassigned characters become visible escapes.
export function visible(value) {
  return String(value).replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (key === "style") for (const [p, v] of Object.entries(value)) node.style.setProperty(p, v);
    else if (key === "tip") node.dataset.tip = visible(value);
    else node.setAttribute(key, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return node;
}

export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((c) => c));
  return node;
}

let serial = 0;

export function uid(prefix) {
  serial += 1;
  return `${prefix}-${serial}`;
}

// A labelled <select>; options are strings or [value, label] pairs.
export function picker(label, options, value, onChange) {
  const id = uid("pick");
  const select = h("select", { id, on: { change: () => onChange(select.value) } },
    options.map((o) => {
      const [key, text] = Array.isArray(o) ? o : [o, o];
      return h("option", { value: key, selected: key === value }, text);
    }));
  return h("div", { class: "control" }, h("label", { for: id }, label), select);
}

// A row of buttons of which one is pressed.
export function choice(label, options, value, onChange) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label, "data-initial": value });
  options.forEach(([key, text]) => {
    const button = h("button", { type: "button", "data-value": key, "aria-pressed": String(key === value) }, text);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      onChange(key);
    });
    group.append(button);
  });
  return group;
}

export function slider(label, { min, max, step, value, show }, onInput) {
  const id = uid("slide");
  const output = h("output", { for: id }, show(value));
  const input = h("input", { id, type: "range", min, max, step, value });
  input.addEventListener("input", () => {
    output.textContent = visible(show(Number(input.value)));
    onInput(Number(input.value));
  });
  const node = h("div", { class: "control slider" }, h("span", {}, h("label", { for: id }, label), " ", output), input);
  node.set = (v) => {
    input.value = v;
    output.textContent = visible(show(Number(input.value)));
  };
  return node;
}

// Play through `count` steps; the button turns into a pause while it runs.
export function player(count, milliseconds, onStep) {
  let timer = null;
  let at = count - 1;
  const button = h("button", { type: "button", class: "play", "aria-label": "Play" }, "▶");
  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "▶";
    button.setAttribute("aria-label", "Play");
  };
  const step = () => {
    at += 1;
    onStep(at);
    if (at >= count - 1) stop();
  };
  button.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (at >= count - 1) at = -1;
    button.textContent = "❚❚";
    button.setAttribute("aria-label", "Pause");
    timer = setInterval(step, milliseconds);
    return step();
  });
  return { button, at: (i) => { at = i; }, stop };
}

// A part of the page; `lead` is what it says where the result holds no sentence of its own.
export function section(id, title, lead, ...children) {
  const body = h("section", { id, "aria-labelledby": `${id}-title` },
    h("div", { class: "section-head" }, h("h2", { id: `${id}-title` }, title), h("p", { class: "lead" }, lead || "")));
  body.append(...children.flat(Infinity).filter((c) => c));
  body.dataset.title = title;
  return body;
}

// Something a reader must know; `mood` is good, bad or, by default, a caution.
export function note(mood, ...children) {
  return h("p", { class: mood ? `note ${mood}` : "note" }, children);
}

export function fold(summary, ...children) {
  return h("details", { class: "fold" }, h("summary", {}, summary), children);
}

// A number set large, its name below.
export function stat(name, value, note) {
  return h("div", { class: "stat" }, h("b", {}, value), h("span", {}, name), note ? h("small", {}, note) : null);
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}
