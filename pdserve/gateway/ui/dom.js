// Small helpers around the DOM. Text goes in by textContent only, because ids and tenants may contain anything.

export function element(tag, { className = "", text = "", attributes = {}, on = {} } = {}, children = []) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const [name, handler] of Object.entries(on)) node.addEventListener(name, handler);
  node.append(...children);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

// Writes only what changed, so that a quiet page causes no layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setClass(node, name, isOn) {
  if (node.classList.contains(name) !== isOn) node.classList.toggle(name, isOn);
}

export function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

// Appends a small chart, 100 wide and 20 high whatever its size on the screen, and returns its line.
export function curveLine(parent, className) {
  const space = "http://www.w3.org/2000/svg";
  const line = document.createElementNS(space, "polyline");
  const svg = document.createElementNS(space, "svg");
  for (const [name, value] of [["class", className], ["viewBox", "0 0 100 20"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]])
    svg.setAttribute(name, value);
  svg.append(line);
  parent.append(svg);
  return line;
}

// Makes `parent` hold one node per item, in order, and reuses nodes by key.
export function reconcile(parent, items, { key, create, update }) {
  const known = parent.nodesByKey ?? (parent.nodesByKey = new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const id = key(item);
    if (wanted.has(id)) continue;
    wanted.add(id);
    let node = known.get(id);
    if (!node) {
      node = create(item);
      known.set(id, node);
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const [id, node] of known) {
    if (wanted.has(id)) continue;
    // The keyboard's place must not be lost with the node that had it.
    if (node.contains(document.activeElement)) (node.nextElementSibling ?? node.previousElementSibling)?.focus?.();
    node.remove();
    known.delete(id);
  }
}

// Arrow keys, Home and End move among the items; only one of them is reached by Tab.
export function roving(parent, selector) {
  const items = () => [...parent.querySelectorAll(selector)];
  parent.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
    let to = -1;
    if (event.key in steps) to = Math.min(all.length - 1, Math.max(0, at + steps[event.key]));
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = all.length - 1;
    if (to < 0) return;
    event.preventDefault();
    all[to].focus();
  });
  parent.addEventListener("focusin", (event) => {
    for (const item of items()) item.tabIndex = item === event.target ? 0 : -1;
  });
  // Called after the items changed.
  return () => {
    const all = items();
    if (all.length && !all.some((item) => item.tabIndex === 0)) all[0].tabIndex = 0;
  };
}
