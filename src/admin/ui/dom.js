// From descriptions of elements to elements. A view is a function from the state to descriptions; `draw` changes what differs and leaves
// the rest, so that focus, selection and open details stay. Texts are only ever set as text.

const SVG = new Set(["svg", "path", "line", "rect", "g", "circle"]);

/** Describes an element. Attributes that are undefined, null or false are left out; `vars` are CSS variables; "on.." are handlers. */
export function h(tag, attributes, ...children) {
  return { tag, attributes: attributes || {}, children: children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false) };
}

/** Makes the children of `parent` look as described. */
export function draw(parent, children) {
  const old = parent.childNodes;
  children.forEach((child, index) => {
    const present = old[index];
    if (typeof child !== "object") {
      const text = String(child);
      if (present && present.nodeType === Node.TEXT_NODE) { if (present.nodeValue !== text) present.nodeValue = text; }
      else place(parent, document.createTextNode(text), present);
    } else if (present && present.described === child.tag && present.keyed === child.attributes.key) {
      update(present, child);
    } else {
      const made = SVG.has(child.tag) ? document.createElementNS("http://www.w3.org/2000/svg", child.tag) : document.createElement(child.tag);
      made.described = child.tag;
      made.keyed = child.attributes.key;
      made.last = {};
      update(made, child);
      place(parent, made, present);
    }
  });
  while (old.length > children.length) parent.lastChild.remove();
}

function place(parent, made, present) {
  if (present) present.replaceWith(made); else parent.append(made);
}

function update(element, { attributes, children }) {
  for (const name of new Set([...Object.keys(element.last), ...Object.keys(attributes)])) {
    const value = attributes[name];
    if (name === "key") continue;
    if (name.startsWith("on")) element[name] = value || null;
    else if (name === "vars") for (const [key, text] of Object.entries(value || {})) element.style.setProperty(key, text);
    else if (value === element.last[name]) continue;
    else if (value === undefined || value === null || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.last = attributes;
  draw(element, children);
}

export const byId = id => document.getElementById(id);
