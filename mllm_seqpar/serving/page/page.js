// The page of the server: a player, a question, and the streamed answer. It uses only the server's public interface.
"use strict";

const $ = (id) => document.getElementById(id);
let model = "";
let media = null; // {part, kind}: the uploaded file of the conversation
let messages = []; // in the form of /v1/chat/completions
let answering = null; // the AbortController of the current answer

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  }
  return response;
}

function say(text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  return item;
}

// Draws the moments of the video that an answer attends to; a click plays from there.
function showEvidence(given) {
  const duration = $("player").duration;
  const moments = given?.filter((moment) => moment.start !== null && !moment.medium);
  $("evidence").replaceChildren();
  $("evidence").hidden = !moments?.length || !Number.isFinite(duration);
  if ($("evidence").hidden) return;
  const most = Math.max(...moments.map((moment) => moment.share));
  for (const { start, end, share } of moments) {
    const mark = document.createElement("button");
    mark.title = `${start.toFixed(1)} s to ${end.toFixed(1)} s: ${(100 * share).toFixed(1)}%`;
    mark.style.left = `${(100 * start) / duration}%`;
    mark.style.width = `${(100 * (end - start)) / duration}%`;
    mark.style.opacity = 0.2 + (0.8 * share) / most;
    mark.addEventListener("click", () => { $("player").currentTime = start; $("player").play(); });
    $("evidence").append(mark);
  }
}

function reset() {
  answering?.abort();
  messages = [];
  $("messages").replaceChildren();
  showEvidence([]);
  say("");
}

async function choose(file) {
  reset();
  if (media) call(`v1/files/${media.id}`, { method: "DELETE" }).catch(() => {});
  media = null;
  for (const id of ["player", "picture"]) $(id).hidden = true;
  if (!file) return;
  const image = file.type.startsWith("image/");
  const view = $(image ? "picture" : "player");
  view.src = URL.createObjectURL(file);
  view.hidden = false;
  say(`uploading ${file.name}`);
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("file", file);
  const uploaded = await (await call("v1/files", { method: "POST", body: form })).json();
  media = { id: uploaded.id, image };
  say(`${file.name} is uploaded`);
}

// Yields the data of server-sent events, and calls `comment` with comments.
async function* events(response, comment) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(":")) comment(block.slice(1).trim());
      else if (block === "data: [DONE]") return;
      else yield JSON.parse(block.slice("data: ".length));
    }
  }
}

function content(question) {
  const parts = [{ type: "text", text: question }];
  if (media && !messages.length) {
    const file = { file_id: media.id };
    if (!media.image && $("fps").value) file.fps = Number($("fps").value);
    parts.unshift({ type: "file", file });
  }
  return parts;
}

async function ask(question) {
  const asked = { role: "user", content: content(question) };
  show("user", question);
  const item = show("assistant", "");
  const body = { model, messages: [...messages, asked], stream: true, evidence: 5 };
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("tokens").value) body.max_tokens = Number($("tokens").value);
  say("waiting for the model");
  showEvidence([]);
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: answering.signal,
    });
    for await (const chunk of events(response, say)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (choice?.delta?.content) {
        item.textContent += choice.delta.content;
        say("");
      }
      if (choice?.finish_reason === "length") say("the answer was cut at its maximum length");
      else if (choice?.finish_reason) say("");
      if (chunk.evidence) showEvidence(chunk.evidence);
      if (chunk.evidence_note) say(chunk.evidence_note);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      say(error.message, true);
      if (!item.textContent) item.remove();
      return;
    }
    say("stopped");
  }
  if (item.isConnected) messages.push(asked, { role: "assistant", content: item.textContent });
}

$("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const question = $("question").value.trim();
  if (!question || answering) return;
  answering = new AbortController();
  $("question").value = "";
  $("ask").disabled = true;
  $("stop").disabled = false;
  await ask(question);
  answering = null;
  $("ask").disabled = false;
  $("stop").disabled = true;
});

$("question").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && !pressed.shiftKey) {
    pressed.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => answering?.abort());
$("reset").addEventListener("click", reset);
$("file").addEventListener("change", () => choose($("file").files[0]).catch((error) => say(error.message, true)));
for (const id of ["fps"]) $(id).addEventListener("change", reset);

async function connect() {
  try {
    model = (await (await call("v1/models")).json()).data[0].id;
    $("model").textContent = model;
    say("");
  } catch (error) {
    say(`${error.message}; set the API key in the settings`, true);
  }
}
$("key").addEventListener("change", connect);
connect();
