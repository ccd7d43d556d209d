// The page of the server: a video, questions, and streamed answers. It uses only the server's public interface.
import { call, events } from "./api.js";
import { momentList, showTimeline } from "./evidence.js";
import { render } from "./markdown.js";
import { Media } from "./media.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["fps", "temperature", "tokens", "key"];
const IDEAS = ["Describe the video.", "What happens first, and what last?", "List the people and things that appear."];
const MOMENTS = 5;

let model = "";
let turns = []; // {question, answer} of the conversation
let answering = null; // the AbortController of the current answer

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

// Runs a change of the conversation, and stays at its end if the user was there.
function following(change) {
  const box = $("scroll"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  const result = change();
  if (atEnd) box.scrollTop = box.scrollHeight;
  return result;
}

function refresh() {
  const obstacle = media.obstacle;
  $("ask").disabled = Boolean(obstacle) || Boolean(answering);
  $("ask").hidden = Boolean(answering);
  $("stop").hidden = !answering;
  $("welcome").hidden = $("messages").childElementCount > 0;
  $("reset").disabled = $("messages").childElementCount === 0;
  say(obstacle, media.state === "refused");
}

function reset() {
  answering?.abort();
  turns = [];
  $("messages").replaceChildren();
  showTimeline([]);
  refresh();
}

const media = new Media((other) => (other ? reset() : refresh()));

function number(id) {
  const input = $(id);
  return input.value && input.validity.valid ? Number(input.value) : null;
}

// The request for the answer to a question after the turns so far; the first message shows the file.
function request(question) {
  const messages = turns.flatMap((turn) => [
    { role: "user", content: [{ type: "text", text: turn.question }] },
    { role: "assistant", content: turn.answer },
  ]);
  messages.push({ role: "user", content: [{ type: "text", text: question }] });
  const part = media.part(number("fps"));
  if (part) messages[0].content.unshift(part);
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, evidence: MOMENTS };
  if (number("temperature") !== null) body.temperature = number("temperature");
  if (number("tokens") !== null) body.max_tokens = number("tokens");
  return body;
}

// One answer on the page: waiting, encoding, writing, complete.
class AnswerItem {
  constructor(question) {
    this.asked = add($("messages"), "li", "user", question);
    this.item = add($("messages"), "li", "assistant");
    this.item.setAttribute("aria-busy", "true");
    this._wait = add(this.item, "p", "wait");
    this._waiting = add(this._wait, "span", "", "Waiting for the model");
    this._text = add(this.item, "div", "text");
    this.text = "";
    this._began = performance.now();
    this._drawing = 0;
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
      this._waiting.textContent = done < all ? `Frames encoded: ${done} of ${all}` : `${all} frames encoded; answering`;
    });
  }

  write(piece) {
    this._wait.hidden = true;
    this.text += piece;
    this._text.classList.add("writing");
    this._drawing ||= requestAnimationFrame(() => this._draw());
  }

  complete({ usage, moments, note }) {
    const seconds = (performance.now() - this._began) / 1000;
    following(() => {
      this._end();
      if (note) add(this.item, "p", "note", note);
      if (moments.length && media.file) {
        const show = () => showTimeline(moments, media.file.seconds);
        this.item.append(momentList(moments, media.file, show));
        show();
      }
      const foot = add(this.item, "p", "foot");
      if (navigator.clipboard) {
        const copy = add(foot, "button", "", "Copy");
        copy.type = "button";
        copy.setAttribute("aria-label", "Copy the answer");
        copy.addEventListener("click", () => navigator.clipboard.writeText(this.text).then(() => say("The answer is copied."), () => {}));
      }
      if (usage) add(foot, "span", "", `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`);
    });
  }

  fail(reason, again) {
    following(() => {
      this._end();
      const box = add(this.item, "div", "failed");
      box.setAttribute("role", "alert");
      add(box, "div", "", reason);
      const button = add(box, "button", "", "Try again");
      button.type = "button";
      button.addEventListener("click", again);
    });
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

// Receives an answer into its item; returns what its last chunks state.
async function receive(body, item, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const end = { usage: null, moments: [], note: "" };
  for await (const chunk of events(response, (comment) => item.progress(comment))) {
    const choice = chunk.choices[0];
    if (choice?.delta?.content) item.write(choice.delta.content);
    if (choice?.finish_reason === "length") end.note = "The answer was cut at its longest length (Settings).";
    end.usage = chunk.usage ?? end.usage;
    end.moments = (chunk.evidence ?? []).filter((moment) => moment.start !== null).concat(end.moments);
    end.note = chunk.evidence_note ?? end.note;
  }
  return end;
}

async function ask(question) {
  const controller = (answering = new AbortController());
  const item = new AnswerItem(question);
  refresh();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  try {
    const end = await receive(request(question), item, controller.signal);
    if (item.item.isConnected) {
      item.complete(end);
      turns.push({ question, answer: item.text });
    }
  } catch (error) {
    if (item.item.isConnected) fail(error, question, item);
  } finally {
    if (answering === controller) answering = null;
    refresh();
    $("messages").lastElementChild?.scrollIntoView({ block: "nearest" });
  }
}

function fail(error, question, item) {
  const retry = () => { if (submit(question)) item.remove(); };
  if (error.name !== "AbortError") {
    if (media.file?.id && error.message.includes(media.file.id)) media.refuse("the server does not have it any more");
    item.fail(error.message, retry);
  } else if (item.text) {
    item.complete({ moments: [], note: "Stopped." });
    turns.push({ question, answer: item.text });
  } else {
    item.remove();
    if (!$("question").value) $("question").value = question;
  }
}

// Asks a question if one can be asked now; returns whether it was sent.
function submit(question) {
  if (!question || answering || media.obstacle) return false;
  ask(question);
  return true;
}

function grow() {
  $("question").style.height = "auto";
  $("question").style.height = `${$("question").scrollHeight}px`;
}

$("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  if (submit($("question").value.trim())) $("question").value = "";
  grow();
  $("question").focus();
});
$("question").addEventListener("input", grow);
$("question").addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key === "Escape" && !$("settings").open) answering?.abort();
});
$("stop").addEventListener("click", () => answering?.abort());
$("reset").addEventListener("click", () => { reset(); $("question").focus(); });

for (const idea of IDEAS) {
  const button = add($("ideas"), "button", "", idea);
  button.type = "button";
  button.addEventListener("click", () => { $("question").value = idea; grow(); $("question").focus(); });
}

$("file").addEventListener("change", () => { if ($("file").files[0]) media.choose($("file").files[0]); });
$("again").addEventListener("click", () => media.start());
$("remove").addEventListener("click", () => media.remove());
addEventListener("pagehide", (left) => { if (!left.persisted) media.leave(); });

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

$("configure").addEventListener("click", () => $("settings").showModal());
$("defaults").addEventListener("click", () => {
  for (const id of ["fps", "temperature", "tokens"]) $(id).value = "";
  keep();
});

function keep() {
  for (const id of SETTINGS) sessionStorage.setItem(id, $(id).value);
}

for (const id of SETTINGS) {
  $(id).value = sessionStorage.getItem(id) ?? "";
  $(id).addEventListener("change", keep);
}

async function connect() {
  try {
    model = (await (await call("v1/models")).json()).data[0].id;
    $("model").textContent = model;
    refresh();
  } catch (error) {
    $("model").textContent = "not connected";
    say(error.status === 401 ? "This server needs its API key; enter it in the settings." : error.message, true);
    if (error.status === 401 && !$("settings").open) {
      $("settings").showModal();
      $("key").focus();
    }
  }
}
$("key").addEventListener("change", connect);
connect();
