// The page: chat on one side, the rounds of the answer on the other.

import { Run, acceptanceByPosition, commonLength, readRun, speedOf } from "/ui/run.js";
import { TreeView, percent } from "/ui/tree.js";

const MODES = ["off", "chain", "shadow", "tree"]; // a request's mode is a cap on the server's, in this order
const COMPARED_TOKENS = 96;
const $ = (id) => document.getElementById(id);

const view = new TreeView($("tree"), (text) => { $("detail").textContent = text; }, $("tip"));
const state = { info: null, messages: [], run: null, shown: 0, follow: true, busy: null, replay: null };

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function complain(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  return new Error(message);
}

// ---- the server -------------------------------------------------------------------------------------------------

async function connect() {
  try {
    const response = await fetch("/server_info", { headers: headers() });
    if (response.status === 401) {
      $("model").textContent = "an API key is needed: More → API key";
      document.querySelector("details").open = true;
      return;
    }
    if (response.status === 503) {
      $("model").textContent = "loading the model …";
      setTimeout(connect, 1000);
      return;
    }
    if (!response.ok) throw await failure(response);
    state.info = await response.json();
  } catch (error) {
    $("model").textContent = `no connection: ${error.message}`;
    setTimeout(connect, 2000);
    return;
  }
  const { info } = state;
  $("model").textContent = `${info.model} · ${info.mode} of ${info.budget} · ${info.dtype ?? ""} on ${info.device}`;
  $("budget").max = Math.max(info.budget, 1);
  $("budget").value = $("budget").max;
  showBudget();
  offerModes(info.mode);
}

function offerModes(own) {
  const allowed = MODES.slice(0, MODES.indexOf(own) + 1);
  const switches = ["off", "chain", "tree", "shadow"].map((mode) => {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), {
      type: "radio", name: "mode", value: mode, checked: mode === own, disabled: !allowed.includes(mode),
    });
    label.append(input, mode);
    return label;
  });
  $("modes").replaceChildren(...switches);
}

function showBudget() {
  $("budget-shown").textContent = $("budget").value;
}

// The documents of a streamed answer, one by one.
async function* stream(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }), signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection broke off before the answer was finished");
    pending += value;
    const frames = pending.split("\n\n");
    pending = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const document = JSON.parse(data);
      if (document.error) throw new Error(document.error.message);
      yield document;
    }
  }
}

function requestOf(messages) {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const mode = document.querySelector('input[name="mode"]:checked')?.value ?? state.info.mode;
  return {
    model: state.info.model,
    messages,
    temperature: number("temperature") ?? 0,
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0], // so that plain decoding can say the same
    max_tokens: number("tokens") ?? 128,
    ddtree: { mode, budget: Number($("budget").value), rounds: true },
  };
}

// ---- asking -----------------------------------------------------------------------------------------------------

async function ask(words) {
  complain("");
  stopReplay();
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  const turn = [...state.messages, { role: "user", content: words }];
  const request = requestOf([...system, ...turn]);
  const run = state.run = new Run(request, state.info.model);
  state.follow = true;
  state.shown = 0;
  view.clear();
  clearFigures();
  addTurn("user", words);
  const answer = addTurn("assistant", "");
  const controller = state.busy = new AbortController();
  setBusy(true);
  const began = performance.now();
  try {
    for await (const document of stream(request, controller.signal)) {
      take(run, document, (performance.now() - began) / 1000);
      showAnswer(answer, run);
    }
    state.messages = [...turn, { role: "assistant", content: run.text }];
    showFigures(run);
    if ($("compare").checked && request.ddtree.mode !== "off") await compare(run, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") complain("stopped; that turn is not kept");
    else complain(error.message);
  } finally {
    state.busy = null;
    setBusy(false);
    showAnswer(answer, run, true);
    showPlayer();
    $("save").disabled = run.events.length === 0;
  }
}

function take(run, document, at) {
  if (document.usage) run.usage = document.usage;
  for (const choice of document.choices) {
    if (choice.delta.content || choice.ddtree_round) run.add(at, choice.delta.content ?? "", choice.ddtree_round ?? null);
    if (choice.finish_reason) run.finish = choice.finish_reason;
  }
  if (state.follow && run.rounds.length) showRound(run.rounds.length - 1);
  liveFigures(run, at);
}

async function compare(run, signal) {
  $("plain").textContent = "…";
  const tokens = Math.min(run.usage.completion_tokens, COMPARED_TOKENS);
  const request = { ...run.request, max_tokens: tokens, ddtree: { mode: "off" } };
  let text = "", usage = null;
  for await (const document of stream(request, signal)) {
    text += document.choices[0]?.delta.content ?? "";
    usage = document.usage ?? usage;
  }
  run.plain = { speed: speedOf(usage), tokens: usage.completion_tokens, text };
  showFigures(run);
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function addTurn(role, text) {
  document.querySelector("#talk .hint")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  $("talk").append(turn);
  $("talk").scrollTop = $("talk").scrollHeight;
  return turn;
}

// The answer so far, what the newest round brought marked.
function showAnswer(turn, run, finished = false, upTo = run.events.length) {
  const texts = run.events.slice(0, upTo).map((event) => event.text);
  const newest = finished ? "" : texts.pop() ?? "";
  const mark = document.createElement("span");
  mark.className = "new";
  mark.textContent = newest;
  turn.replaceChildren(texts.join(""), mark);
  $("talk").scrollTop = $("talk").scrollHeight;
}

// ---- rounds and figures -----------------------------------------------------------------------------------------

function showRound(place) {
  const rounds = state.run.rounds;
  state.shown = Math.max(0, Math.min(place, rounds.length - 1));
  const round = rounds[state.shown];
  view.show(round);
  $("round").max = rounds.length;
  $("round").value = state.shown + 1;
  const drafted = round.tokens.length - 1;
  const said = round.emitted.length === 1 ? "1 token" : `${round.emitted.length} tokens`;
  $("round-shown").textContent = `round ${state.shown + 1} of ${rounds.length}: ${said}, ${drafted} drafted`;
}

function showPlayer() {
  const some = state.run !== null && state.run.rounds.length > 0;
  for (const id of ["back", "play", "next", "round"]) $(id).disabled = !some;
  if (!some) $("round-shown").textContent = "no round yet";
}

function clearFigures() {
  for (const id of ["speed", "plain", "gain", "length"]) $(id).textContent = "–";
  $("same").textContent = "";
  showPositions([]);
}

function liveFigures(run, at) {
  const rounds = run.rounds;
  if (!rounds.length) return;
  const tokens = rounds.reduce((sum, round) => sum + round.emitted.length, 0);
  const first = run.events[0].at;
  $("length").textContent = (tokens / rounds.length).toFixed(2);
  if (at > first) $("speed").textContent = (tokens / (at - first)).toFixed(1);
  showPositions(acceptanceByPosition(rounds));
}

function showFigures(run) {
  const speed = run.usage && speedOf(run.usage);
  $("speed").textContent = speed ? speed.toFixed(1) : "–";
  $("length").textContent = run.usage?.ddtree.acceptance_length?.toFixed(2) ?? "–";
  showPositions(acceptanceByPosition(run.rounds));
  if (!run.plain) return;
  $("plain").textContent = run.plain.speed ? run.plain.speed.toFixed(1) : "–";
  $("gain").textContent = speed && run.plain.speed ? `${(speed / run.plain.speed).toFixed(2)} ×` : "–";
  const same = commonLength(run.plain.text, run.text);
  $("same").textContent = same === run.plain.text.length
    ? `Plain decoding said the same, to the letter (${run.plain.tokens} tokens compared).`
    : `Plain decoding said the same for ${same} characters; from there, two tokens were as good as equal and rounding chose.`;
}

function showPositions(rates) {
  const bars = rates.map((rate, place) => {
    const bar = document.createElement("div");
    bar.className = "bar";
    const filled = document.createElement("i");
    filled.style.height = `${Math.round(78 * rate)}px`;
    bar.append(percent(rate), filled, String(place + 1));
    return bar;
  });
  $("positions").replaceChildren(...bars);
  const words = rates.map((rate, place) => `position ${place + 1}: ${percent(rate)}`).join(", ");
  $("positions").setAttribute("aria-label", words || "No rounds yet");
}

// ---- recording and replaying ------------------------------------------------------------------------------------

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(state.run, null, 1)], { type: "application/json" }));
  link.download = `ddtree-run-${state.run.made.replaceAll(/[:.]/g, "-")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function openFile(file) {
  complain("");
  try {
    const run = readRun(await file.text());
    stopReplay();
    state.run = run;
    state.messages = [];
    $("talk").replaceChildren();
    for (const message of run.request.messages ?? []) addTurn(message.role, String(message.content));
    showAnswer(addTurn("assistant", ""), run, true);
    clearFigures();
    showFigures(run);
    if (run.rounds.length) showRound(0);
    else view.clear();
    showPlayer();
    $("save").disabled = false;
  } catch (error) {
    complain(`${file.name}: ${error.message}`);
  }
}

function replay() {
  if (state.replay) {
    stopReplay();
    return;
  }
  const { run } = state;
  const turns = document.querySelectorAll("#talk .turn.assistant");
  const turn = turns[turns.length - 1];
  let place = 0, rounds = 0;
  $("play").textContent = "■ Stop";
  const step = () => {
    const event = run.events[place];
    if (event.round) showRound(rounds++);
    place++;
    showAnswer(turn, run, place === run.events.length, place);
    if (place === run.events.length) {
      stopReplay();
      return;
    }
    // Never so fast that a round cannot be seen, never a long wait.
    const wait = Math.min(Math.max(1000 * (run.events[place].at - event.at), 120), 1500);
    state.replay = setTimeout(step, wait);
  };
  state.replay = setTimeout(step, 0);
}

function stopReplay() {
  clearTimeout(state.replay);
  state.replay = null;
  $("play").textContent = "▶ Replay";
}

// ---- wiring -----------------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${theme || "automatic"}`);
  $("theme").textContent = { light: "☀", dark: "☾" }[theme] ?? "◐";
  localStorage.setItem("ddtree-theme", theme);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = $("say").value.trim();
  if (!words || state.busy) return;
  if (!state.info) {
    complain("the server is not ready yet");
    return;
  }
  $("say").value = "";
  ask(words);
});
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => state.busy?.abort());
$("fresh").addEventListener("click", () => {
  state.busy?.abort();
  state.messages = [];
  $("talk").replaceChildren();
  complain("");
  $("say").focus();
});
$("budget").addEventListener("input", showBudget);
$("save").addEventListener("click", save);
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  if ($("file").files.length) openFile($("file").files[0]);
  $("file").value = "";
});
$("play").addEventListener("click", replay);
for (const [id, step] of [["back", -1], ["next", 1]]) {
  $(id).addEventListener("click", () => {
    state.follow = false;
    showRound(state.shown + step);
  });
}
$("round").addEventListener("input", () => {
  state.follow = false;
  showRound(Number($("round").value) - 1);
});
$("theme").addEventListener("click", () => {
  const order = ["", "light", "dark"];
  setTheme(order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % order.length]);
});
$("key").value = sessionStorage.getItem("ddtree-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("ddtree-key", $("key").value);
  if (!state.info) connect();
});
setTheme(localStorage.getItem("ddtree-theme") ?? "");
connect();
