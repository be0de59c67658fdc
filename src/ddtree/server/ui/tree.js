// Drawing one round's draft tree, and moving about in it. Nothing here knows of the network.

const SVG = "http://www.w3.org/2000/svg";
const STEP_X = 118, STEP_Y = 34, BOX_W = 96, BOX_H = 24, EDGE = 16, LONGEST = 11;

// A token as it can be seen: spaces, line breaks and tabs made visible.
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(/^ | $/g, "␣");
}

function short(text) {
  const shown = [...visible(text)];
  return shown.length > LONGEST ? shown.slice(0, LONGEST - 1).join("") + "…" : shown.join("");
}

// Nodes with their places: depth to the right, leaves one below the other, parents beside the middle of their children.
export function layOut(round) {
  // What lies on the path behind the answer's end was verified, but never said.
  const taken = new Set(round.path.slice(1, round.emitted.length + 1));
  const nodes = round.tokens.map((token, id) => ({
    id, token, text: round.texts[id], depth: round.depths[id], parent: id === 0 ? null : round.parents[id],
    probability: round.probabilities[id], kind: id === 0 ? "root" : taken.has(id) ? "taken" : "left", children: [],
  }));
  for (const node of nodes.slice(1)) nodes[node.parent].children.push(node.id);
  const last = round.path[round.path.length - 1];
  // What was said after the last accepted node is the model's own choice; an end may have cut it off.
  if (round.emitted.length === round.path.length) {
    const bonus = {
      id: nodes.length, token: null, text: round.emitted[round.emitted.length - 1], depth: nodes[last].depth + 1,
      parent: last, probability: null, kind: "bonus", children: [],
    };
    nodes.push(bonus);
    nodes[last].children.unshift(bonus.id);
  }
  let row = 0;
  const place = (node) => {
    const rows = node.children.map((id) => place(nodes[id]));
    node.row = rows.length ? (rows[0] + rows[rows.length - 1]) / 2 : row++;
    return node.row;
  };
  place(nodes[0]);
  return { nodes, rows: row, depth: Math.max(...nodes.map((node) => node.depth)) };
}

export function describe(node, nodes) {
  const parts = [`“${visible(node.text)}”`];
  if (node.kind === "root") parts.push("the anchor: the last committed token");
  else if (node.kind === "bonus") parts.push("chosen by the model itself");
  else {
    const parent = nodes[node.parent].probability;
    parts.push(`depth ${node.depth}`, node.kind === "taken" ? "accepted" : "rejected");
    parts.push(`path ${percent(node.probability)}`);
    if (node.parent !== 0 && parent > 0) parts.push(`after its parent ${percent(Math.min(node.probability / parent, 1))}`);
  }
  return parts.join(" · ");
}

export function percent(value) {
  return value >= 0.0995 ? `${(100 * value).toFixed(0)} %` : `${(100 * value).toFixed(1)} %`;
}

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

export class TreeView {
  // tell: what to say about a node. tip: the floating note.
  constructor(svg, tell, tip) {
    this.svg = svg;
    this.tell = tell;
    this.tip = tip;
    this.drawn = null;
    this.here = 0;
    svg.addEventListener("keydown", (event) => this.move(event));
    svg.addEventListener("focus", () => this.drawn && this.point(this.here));
    svg.addEventListener("pointermove", (event) => this.hover(event));
    svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    svg.addEventListener("click", (event) => {
      const id = this.nodeAt(event);
      if (id !== null) this.point(id);
    });
  }

  clear() {
    this.svg.replaceChildren();
    this.drawn = null;
  }

  show(round) {
    this.clear();
    const drawn = this.drawn = layOut(round);
    this.here = 0;
    const x = (node) => EDGE + node.depth * STEP_X;
    const y = (node) => EDGE + node.row * STEP_Y;
    const width = 2 * EDGE + drawn.depth * STEP_X + BOX_W, height = 2 * EDGE + (drawn.rows - 1) * STEP_Y + BOX_H;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    for (const node of drawn.nodes) {
      if (node.parent === null) continue;
      const parent = drawn.nodes[node.parent];
      const x1 = x(parent) + BOX_W, y1 = y(parent) + BOX_H / 2, x2 = x(node), y2 = y(node) + BOX_H / 2, mid = (x1 + x2) / 2;
      make("path", { d: `M${x1} ${y1} C${mid} ${y1} ${mid} ${y2} ${x2} ${y2}`, class: `link ${node.kind}` }, this.svg);
    }
    for (const node of drawn.nodes) {
      const group = make("g", {
        class: `node ${node.kind}`, role: "treeitem", "data-id": node.id, "aria-level": node.depth + 1,
        "aria-label": describe(node, drawn.nodes), transform: `translate(${x(node)} ${y(node)})`,
      }, this.svg);
      make("rect", { width: BOX_W, height: BOX_H, rx: 6 }, group);
      make("text", { x: 8, y: 16 }, group).textContent = short(node.text);
    }
  }

  nodeAt(event) {
    const group = event.target.closest("[data-id]");
    return group ? Number(group.dataset.id) : null;
  }

  hover(event) {
    const id = this.drawn ? this.nodeAt(event) : null;
    this.tip.hidden = id === null;
    if (id === null) return;
    this.tip.textContent = describe(this.drawn.nodes[id], this.drawn.nodes).replaceAll(" · ", "\n");
    this.tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - 200)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }

  point(id) {
    this.here = id;
    for (const group of this.svg.querySelectorAll(".node")) group.classList.toggle("here", Number(group.dataset.id) === id);
    this.tell(describe(this.drawn.nodes[id], this.drawn.nodes));
    this.svg.querySelector(`[data-id="${id}"]`).scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  move(event) {
    if (!this.drawn) return;
    const { nodes } = this.drawn;
    const node = nodes[this.here];
    const level = nodes.filter((one) => one.depth === node.depth).sort((a, b) => a.row - b.row);
    const place = level.indexOf(node);
    const goal = {
      ArrowLeft: () => node.parent,
      ArrowRight: () => node.children[0],
      ArrowUp: () => level[place - 1]?.id,
      ArrowDown: () => level[place + 1]?.id,
      Home: () => 0,
    }[event.key];
    if (!goal) return;
    event.preventDefault();
    const id = goal();
    if (id !== null && id !== undefined) this.point(id);
  }
}
