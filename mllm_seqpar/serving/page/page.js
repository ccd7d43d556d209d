// The page of the server: a video, questions, and streamed answers. It uses only the server's public interface.
import { call, events } from "./api.js";
import { momentList, showTimeline } from "./evidence.js";
import { render } from "./markdown.js";
import { Media } from "./media.js";
import { save, saved } from "./storage.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["fps", "frames", "start", "end", "temperature", "tokens"];
const SETTINGS = [...NUMBERS, "system", "key"];
const IDEAS = ["Describe the video.", "What happens first, and what last?", "List the people and things that appear."];
const MOMENTS = 5;
const LEFT = "The page was left before the answer was complete.";

let model = "";
let turns = []; // of the conversation: the items on the page, each with its question and what became of it
let answering = null; // the AbortController of the current answer
let editing = null; // the turn whose question is being changed
let draft = ""; // what was typed before that
let connectedWith = null; // the API key of the last attempt to connect
let restored = false; // whether what a reload has kept is shown; until then, nothing else is kept
let leaving = 0; // until when nothing is kept because the page is being left, which makes its requests fail

function say(text, error = false) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

function add(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function button(parent, text, act, label = text) {
  const made = add(parent, "button", "", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

// Runs a change of the conversation, and stays at its end if the user was there.
function following(change) {
  const box = $("scroll"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const result = change();
  if (atEnd) box.scrollTop = box.scrollHeight;
  return result;
}

function refresh() {
  const obstacle = media.obstacle, busy = Boolean(answering);
  enable();
  $("ask").hidden = busy;
  $("stop").hidden = !busy;
  $("editing").hidden = !editing;
  for (const turn of turns) turn.asked.classList.toggle("edited", turn === editing);
  for (const made of $("messages").querySelectorAll("button.change")) made.disabled = busy;
  $("welcome").hidden = $("messages").childElementCount > 0;
  $("reset").disabled = $("messages").childElementCount === 0;
  $("further").hidden = media.state !== "ready" || completed() <= media.file.since;
  $("further").disabled = busy;
  if (obstacle || restored) say(obstacle, media.state === "refused");
  persist();
}

function enable() {
  $("ask").disabled = Boolean(media.obstacle) || Boolean(answering) || !$("question").value.trim();
}

function persist() {
  if (!restored || performance.now() < leaving) return;
  save("turns", turns.length ? turns.map((turn) => turn.kept()) : null);
  save("draft", $("question").value || null);
}

function reset() {
  answering?.abort();
  turns = [];
  editing = null;
  $("messages").replaceChildren();
  showTimeline([]);
  refresh();
}

const media = new Media((other) => (other ? reset() : refresh()));

function number(id) {
  const input = $(id);
  return input.value && input.validity.valid ? Number(input.value) : null;
}

// The frames of the video that the settings ask for, with the names of the server's interface.
function frames() {
  const chosen = { num_frames: number("frames"), start: number("start"), end: number("end") };
  chosen.fps = chosen.num_frames === null ? number("fps") : null;
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null));
}

function completed() {
  return turns.filter((turn) => turn.complete).length;
}

function request(question) {
  const messages = [], complete = turns.filter((turn) => turn.complete), shown = frames();
  const asked = (text, turn) => {
    const parts = media.parts(turn, complete.length, shown);
    messages.push({ role: "user", content: [...parts, { type: "text", text }] });
  };
  for (const [number, turn] of complete.entries()) {
    asked(turn.question, number);
    messages.push({ role: "assistant", content: turn.text });
  }
  asked(question, complete.length);
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value.trim() });
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, evidence: MOMENTS };
  if (number("temperature") !== null) body.temperature = number("temperature");
  if (number("tokens") !== null) body.max_tokens = number("tokens");
  return body;
}

// A question and its answer on the page: waiting, encoding, writing, and then complete or failed.
class Turn {
  constructor(question) {
    this.question = question;
    this.complete = false;
    this.replaced = []; // turns that come back if this one has no answer
    this.asked = add($("messages"), "li", "asked");
    add(this.asked, "div", "user", question);
    button(this.asked, "Edit", () => edit(this), "Edit the question and ask again").classList.add("change");
    this.item = add($("messages"), "li", "assistant");
    this.item.setAttribute("aria-busy", "true");
    this._wait = add(this.item, "p", "wait");
    this._waiting = add(this._wait, "span", "", "Waiting for the model");
    this._text = add(this.item, "div", "text");
    this.text = "";
    this._began = performance.now();
    this._drawing = 0;
  }

  // What a reload keeps.
  kept() {
    const { question, text, complete, end, reason } = this;
    return { question, text, complete, end, reason };
  }

  // Shows a turn as it was before a reload.
  static restored({ question, text, complete, end, reason }) {
    const turn = new Turn(question);
    turn.text = text;
    if (complete) turn.finish(end);
    else if (text && !reason) turn.finish({ moments: [], note: `Stopped. ${LEFT}` });
    else turn.fail(reason ?? LEFT);
    return turn;
  }

  wait(text) {
    this._waiting.textContent = text;
  }

  // Shows the progress that the server reports in comments: "frames encoded: 8 of 300".
  progress(comment) {
    const found = comment.match(/^frames encoded: (\d+) of (\d+)$/);
    if (!found) return;
    const [done, all] = [Number(found[1]), Number(found[2])];
    following(() => {
      this._bar ??= add(this._wait, "progress");
      this._bar.setAttribute("aria-label", "Frames encoded");
      this._bar.max = all;
      this._bar.value = done;
      this.wait(done < all ? `Frames encoded: ${done} of ${all}` : `${all} frames encoded; answering`);
    });
  }

  write(piece) {
    this._wait.hidden = true;
    this.text += piece;
    this._text.classList.add("writing");
    this._drawing ||= requestAnimationFrame(() => this._draw());
  }

  // `end`: {moments, note, usage, seconds}
  finish(end) {
    this.complete = true;
    this.end = { seconds: (performance.now() - this._began) / 1000, ...end };
    const { moments, note, usage, seconds } = this.end;
    following(() => {
      this._end();
      if (note) add(this.item, "p", "note", note);
      if (moments.length && media.file) {
        const ranked = moments.map((moment, rank) => ({ rank, ...moment }));
        const shown = () => ranked.filter(({ medium }) => media.files[medium ?? 0] === media.file);
        const show = () => showTimeline(shown(), media.file.seconds);
        this.item.append(momentList(moments, media, show));
        show();
      }
      const foot = add(this.item, "p", "foot");
      if (navigator.clipboard) {
        const copy = () => navigator.clipboard.writeText(this.text).then(() => say("The answer is copied."), () => {});
        button(foot, "Copy", copy, "Copy the answer");
      }
      const again = button(foot, "Regenerate", () => regenerate(this), "Ask this question again");
      again.classList.add("change");
      again.title = "With temperature 0 the answer stays the same";
      if (usage) add(foot, "span", "", `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`);
    });
  }

  fail(reason) {
    this.reason = reason;
    following(() => {
      this._end();
      const box = add(this.item, "div", "failed");
      box.setAttribute("role", "alert");
      add(box, "div", "", reason);
      button(box, "Try again", () => retry(this));
      if (this.replaced.length) button(box, "Bring back the earlier answer", () => bringBack(this));
    });
  }

  show() {
    $("messages").append(this.asked, this.item);
  }

  remove() {
    this.asked.remove();
    this.item.remove();
  }

  _draw() {
    this._drawing = 0;
    following(() => this._text.replaceChildren(...render(this.text)));
  }

  _end() {
    cancelAnimationFrame(this._drawing);
    this._draw();
    this._wait.remove();
    this._text.classList.remove("writing");
    this.item.setAttribute("aria-busy", "false");
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); });
  });
}

// Sends a request, again while the server asks to try again later.
async function send(body, turn, signal) {
  const headers = { "Content-Type": "application/json" };
  for (;;) {
    try {
      return await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    } catch (error) {
      if (error.status !== 429 || !error.retryAfter) throw error;
      turn.wait(`The server is busy. The next attempt is in ${error.retryAfter} s`);
      await pause(error.retryAfter, signal);
      turn.wait("Waiting for the model");
    }
  }
}

// Receives an answer into its turn; returns what its last chunks state.
async function receive(body, turn, signal) {
  const end = { usage: null, moments: [], note: "" };
  for await (const chunk of events(await send(body, turn, signal), (comment) => turn.progress(comment))) {
    const choice = chunk.choices[0];
    if (choice?.delta?.content) turn.write(choice.delta.content);
    if (choice?.finish_reason === "length") end.note = "The answer was cut at its longest length (Settings).";
    end.usage = chunk.usage ?? end.usage;
    end.moments = (chunk.evidence ?? []).filter((moment) => moment.start !== null).concat(end.moments);
    end.note = chunk.evidence_note ?? end.note;
  }
  return end;
}

// Asks a question in place of the turns from `from` on.
async function ask(question, from = turns.length, replaced = turns.slice(from)) {
  const controller = (answering = new AbortController());
  for (const turn of turns.splice(from)) turn.remove();
  const body = request(question), turn = new Turn(question);
  turn.replaced = replaced;
  turns.push(turn);
  refresh();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  try {
    const end = await receive(body, turn, controller.signal);
    if (turns.includes(turn)) turn.finish(end);
  } catch (error) {
    if (turns.includes(turn)) fail(error, turn);
  } finally {
    if (answering === controller) answering = null;
    refresh();
    $("messages").lastElementChild?.scrollIntoView({ block: "nearest" });
  }
}

function fail(error, turn) {
  if (error.name !== "AbortError") {
    const forgotten = media.files.find(({ id }) => id && error.message.includes(id));
    if (forgotten && forgotten === media.file) media.forgotten();
    if ([401, 404].includes(error.status)) connect(); // the server may have been started again, with other options
    const remedy = forgotten === media.file ? "Upload it again first." : "Choose the files again in a new conversation.";
    turn.fail(forgotten ? `The server does not have ${forgotten.name} any more. ${remedy}` : error.message);
  } else if (turn.text) {
    turn.finish({ moments: [], note: "Stopped." });
  } else {
    if (!turn.replaced.length && !$("question").value) $("question").value = turn.question;
    bringBack(turn);
  }
}

// Removes a turn, and shows those that it had replaced.
function bringBack(turn) {
  turn.remove();
  turns.splice(turns.indexOf(turn), 1);
  for (const earlier of turn.replaced) {
    earlier.show();
    turns.push(earlier);
  }
  refresh();
}

function possible() {
  return !answering && !media.obstacle;
}

function retry(turn) {
  if (!possible()) return;
  turn.remove();
  turns.splice(turns.indexOf(turn), 1);
  ask(turn.question, turns.length, turn.replaced);
}

function regenerate(turn) {
  if (possible()) ask(turn.question, turns.indexOf(turn));
}

function edit(turn) {
  if (answering) return;
  if (!editing) draft = $("question").value;
  editing = turn;
  $("question").value = turn.question;
  grow();
  refresh();
  $("question").focus();
}

function stopEditing() {
  if (!editing) return;
  editing = null;
  $("question").value = draft;
  grow();
  refresh();
}

// Asks a question if one can be asked now; returns whether it was sent.
function submit(question) {
  if (!question || !possible()) return false;
  const from = editing ? turns.indexOf(editing) : turns.length;
  editing = null;
  $("question").value = "";
  ask(question, from);
  return true;
}

function grow() {
  $("question").style.height = "auto";
  $("question").style.height = `${$("question").scrollHeight}px`;
}

$("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  submit($("question").value.trim());
  grow();
  $("question").focus();
});
$("question").addEventListener("input", () => { grow(); enable(); save("draft", $("question").value || null); });
$("question").addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Escape" || $("settings").open) return;
  if (answering) answering.abort();
  else stopEditing();
});
$("keep").addEventListener("click", stopEditing);
$("stop").addEventListener("click", () => answering?.abort());
$("reset").addEventListener("click", () => { media.begin(); reset(); $("question").focus(); });

for (const idea of IDEAS) {
  button($("ideas"), idea, () => { $("question").value = idea; grow(); enable(); $("question").focus(); });
}

$("file").addEventListener("change", () => { if ($("file").files[0]) media.choose($("file").files[0]); });
$("next").addEventListener("change", () => {
  if ($("next").files[0]) media.follow($("next").files[0], completed());
  $("next").value = "";
});
$("further").addEventListener("click", () => $("next").click());
$("again").addEventListener("click", () => media.start());
$("remove").addEventListener("click", () => media.remove(completed()));
addEventListener("beforeunload", (unloading) => {
  if (answering || media.state === "uploading") unloading.preventDefault(); // what is not complete is lost
  persist();
  leaving = performance.now() + 3000;
  setTimeout(persist, 3100); // if the page was not left after all
});

let dragged = 0; // elements that the pointer has entered with files, and not left
const hasFiles = (drag) => drag.dataTransfer?.types.includes("Files");
addEventListener("dragenter", (drag) => { if (hasFiles(drag)) $("dropping").hidden = !++dragged; });
addEventListener("dragleave", (drag) => { if (hasFiles(drag) && !--dragged) $("dropping").hidden = true; });
addEventListener("dragover", (drag) => { if (hasFiles(drag)) drag.preventDefault(); });
addEventListener("drop", (drag) => {
  if (!hasFiles(drag)) return;
  drag.preventDefault();
  dragged = 0;
  $("dropping").hidden = true;
  const [file] = drag.dataTransfer.files;
  if (file && /^(video|image)\//.test(file.type || "video/")) media.choose(file);
  else if (file) say(`${file.name} is not a video or an image (${file.type}).`, true);
});

// The settings are kept while they are typed, so that no way to close the dialog drops them.

function check() {
  const both = $("fps").value && $("frames").value;
  $("frames").setCustomValidity(both ? "Give the frames per second or their number, not both." : "");
  const clip = number("start") !== null && $("end").value && Number($("end").value) <= number("start");
  $("end").setCustomValidity(clip ? "The end must be after the start." : "");
}

function keep() {
  check();
  for (const id of SETTINGS) if ($(id).validity.valid) save(`setting-${id}`, $(id).value || null);
}

function showSettings() {
  if (!$("settings").open) $("settings").showModal();
}

$("configure").addEventListener("click", showSettings);
$("defaults").addEventListener("click", () => {
  for (const id of SETTINGS) if (id !== "key") $(id).value = "";
  keep();
});
$("settings").addEventListener("cancel", (closing) => {
  if (!$("settings").querySelector("form").reportValidity()) closing.preventDefault();
});
$("settings").addEventListener("close", () => {
  const refused = NUMBERS.filter((id) => !$(id).validity.valid);
  for (const id of refused) {
    const label = $(id).closest("label").firstChild.textContent.trim();
    say(`Settings: ${label}: ${$(id).value || "this"} is not used; ${$(id).validationMessage}`, true);
    $(id).value = saved(`setting-${id}`) ?? "";
  }
  check();
  if ($("key").value !== connectedWith) connect();
});

for (const id of SETTINGS) {
  $(id).value = saved(`setting-${id}`) ?? "";
  for (const kind of ["input", "change"]) $(id).addEventListener(kind, keep);
}

function keyFault(text) {
  $("key-fault").textContent = text;
  $("key").setAttribute("aria-invalid", String(Boolean(text)));
}

async function connect() {
  const key = (connectedWith = $("key").value);
  try {
    const { data } = await (await call("v1/models")).json();
    if (key !== connectedWith) return; // another key was given meanwhile
    model = data[0].id;
    $("model").textContent = model;
    keyFault("");
    refresh();
    await media.confirm();
  } catch (error) {
    if (key !== connectedWith) return;
    $("model").textContent = "not connected";
    const fault = key ? "This is not the key of this server." : "This server needs its API key.";
    say(error.status === 401 ? `${fault} Enter it in the settings.` : error.message, true);
    if (error.status === 401) {
      keyFault(fault);
      showSettings();
      $("key").select();
    }
  }
}
$("key").addEventListener("change", connect);

// Shows what a reload has kept.
async function restore() {
  const kept = saved("turns") ?? [], typed = saved("draft") ?? "";
  await media.restore();
  await connect();
  turns = [...kept.map(Turn.restored), ...turns];
  for (const turn of turns) turn.show();
  if (!$("question").value) $("question").value = typed;
  grow();
  restored = true;
  refresh();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}
restore();
