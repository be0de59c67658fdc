// A run: one answer with its rounds, as it came. It can be summed up, saved, opened and replayed.

export const FORMAT = "ddtree-run";
export const VERSION = 1;

export class Run {
  constructor(request, model) {
    this.format = FORMAT;
    this.version = VERSION;
    this.made = new Date().toISOString();
    this.model = model;
    this.request = request;
    this.events = []; // { at: seconds since the start, text, round }
    this.usage = null;
    this.finish = null;
    this.plain = null; // the same request, decoded plainly: { speed, tokens, text }
  }

  add(at, text, round) {
    this.events.push({ at, text, round });
  }

  get text() { return this.events.map((event) => event.text).join(""); }

  get rounds() { return this.events.filter((event) => event.round).map((event) => event.round); }
}

// A recorded run from a file's text. Throws an Error that says what is wrong with it.
export function readRun(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("this file is no JSON");
  }
  if (found?.format !== FORMAT) throw new Error("this file is no recorded run of ddtree");
  if (found.version !== VERSION) throw new Error(`this run has version ${found.version}; this page reads ${VERSION}`);
  if (!Array.isArray(found.events) || !found.events.every(isEvent)) throw new Error("this run's events are damaged");
  return Object.assign(new Run(found.request ?? {}, String(found.model)), found);
}

function isEvent(event) {
  return typeof event?.at === "number" && typeof event.text === "string" && (event.round == null || isRound(event.round));
}

function isRound(round) {
  const { tokens, texts, parents, depths, probabilities, path, emitted } = round;
  const lists = [tokens, texts, parents, depths, probabilities, path, emitted];
  if (!lists.every(Array.isArray) || tokens.length === 0 || path.length === 0) return false;
  const size = tokens.length;
  return [texts, parents, depths, probabilities].every((list) => list.length === size)
    && parents.every((parent, id) => Number.isInteger(parent) && parent >= 0 && (id === 0 ? parent === 0 : parent < id))
    && path.every((id) => Number.isInteger(id) && id >= 0 && id < size);
}

// Emitted tokens after the first over the seconds that they took.
export function speedOf(usage) {
  const tokens = usage.completion_tokens - 1;
  return tokens > 0 && usage.ddtree.decode_s > 0 ? tokens / usage.ddtree.decode_s : null;
}

// How often a drafted token of each depth was accepted, over the rounds that drafted that deep.
export function acceptanceByPosition(rounds) {
  const offered = [], accepted = [];
  for (const round of rounds) {
    const deepest = Math.max(...round.depths);
    const reached = Math.min(round.path.length - 1, round.emitted.length);
    for (let depth = 1; depth <= deepest; depth++) {
      offered[depth - 1] = (offered[depth - 1] ?? 0) + 1;
      accepted[depth - 1] = (accepted[depth - 1] ?? 0) + (depth <= reached ? 1 : 0);
    }
  }
  return offered.map((count, place) => accepted[place] / count);
}

// How many characters two texts have in common at their beginnings.
export function commonLength(a, b) {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length;
}
