// The videos and images of the conversation: chosen or dropped, uploaded, the last of them shown.
//
// While a file is uploaded, or after its upload was refused, no question may be sent: the answer would be about nothing.
// The user waits, tries again, or removes the file. A reload keeps the file, and its upload as long as the server has it.
import { call, upload } from "./api.js";
import { clock } from "./evidence.js";
import { keepFile, keptFile, save, saved } from "./storage.js";

const FORGOTTEN = "the server does not have it any more (it was restarted, or the upload has expired)";
const USED = 10 * 60 * 1000; // milliseconds after which an open page tells the server that the upload is still used

const $ = (id) => document.getElementById(id);
const size = (bytes) => (bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} kB` : `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`);

export class Media {
  // `changed` is called when the state changes, with true if this is another file.
  constructor(changed) {
    this._changed = changed;
    // {name, size, id, kind, seconds, fps}, `since`, the number of complete turns before it was chosen, and `chosen`, the
    // file itself if this browser has it.
    this.file = null;
    this.earlier = []; // files of earlier turns, all of them uploaded
    this.state = "none"; // none, uploading, ready, refused
    this.reason = "";
    setInterval(() => this.confirm(), USED);
  }

  // Why no question can be asked now; empty if one can.
  get obstacle() {
    if (this.state === "uploading") return `${this.file.name} is being uploaded. You can ask when it is complete.`;
    if (this.state === "refused") {
      const remedy = this.file.chosen ? "Upload it again" : "Choose it again";
      return `${this.file.name}: ${this.reason} ${remedy}, or remove it to ask without it.`;
    }
    return "";
  }

  // All files of the conversation, in their order.
  get files() {
    return this.file ? [...this.earlier, this.file] : [];
  }

  choose(chosen) {
    this._forget();
    this._drop(this.earlier.splice(0));
    return this._take(chosen, 0, true);
  }

  // Shows a further file with the next question, after `turns` complete ones about the others.
  follow(chosen, turns) {
    this._release();
    this.earlier.push(this.file);
    this.file = null; // its upload stays
    return this._take(chosen, turns, false);
  }

  // Begins a conversation about the last file alone.
  begin() {
    this._drop(this.earlier.splice(0));
    if (!this.file) return;
    this.file.since = 0;
    this._show();
    this._to(this.state);
  }

  // Removes the last file; the conversation stays if it has had at most `turns` turns, none of them about this file.
  remove(turns) {
    const unused = this.earlier.length > 0 && this.file.since >= turns;
    this._forget();
    if (!unused) this._drop(this.earlier.splice(0));
    this.file = this.earlier.pop() ?? null;
    keepFile(this.file?.chosen ?? null);
    this._show();
    this._to(this.file ? "ready" : "none", !unused);
  }

  _take(chosen, since, other) {
    const kind = chosen.type.startsWith("image/") ? "image" : "video";
    this.file = { name: chosen.name, size: chosen.size, chosen, id: null, kind, seconds: NaN, fps: NaN, since };
    keepFile(chosen);
    this._show();
    return this.start(other);
  }

  // Shows the file of before a reload; `confirm` then asks the server for its upload.
  async restore() {
    const kept = saved("file"), chosen = kept && (await keptFile());
    if (!kept || this.file) return; // without a file, or another one was chosen meanwhile
    this.file = { ...kept, chosen };
    this.earlier = saved("earlier") ?? [];
    this._show();
    if (kept.id) this._to("ready");
    else if (chosen) this.start();
    else this.refuse("the page was left before its upload was complete");
  }

  // Asks the server whether it still has the upload.
  async confirm() {
    const id = this.file?.id;
    for (const file of this.earlier) call(`v1/files/${file.id}`).catch(() => {}); // it is still used
    if (!id || this.state === "uploading") return;
    try {
      await call(`v1/files/${id}`);
      if (this.file?.id === id) this._to("ready");
    } catch (error) {
      if (this.file?.id === id && error.status === 404) this.forgotten();
    }
  }

  // Notes that the server has refused a request about the file because it does not have it.
  forgotten() {
    this.refuse(FORGOTTEN);
  }

  // The upload of the current file, from the beginning. `other`: it is another file than before.
  async start(other = false) {
    const file = this.file, controller = new AbortController();
    this._delete();
    this._controller = controller;
    this._progress(0);
    this._to("uploading", other);
    try {
      const uploaded = await upload(file.chosen, (part) => this._progress(part), controller.signal);
      if (this.file !== file) return this._discard(uploaded.id); // cancelled while the server stored it
      file.id = uploaded.id;
      Object.assign(file, await (await call(`v1/files/${file.id}/preview`, { signal: controller.signal })).json());
    } catch (error) {
      if (this.file !== file || error.name === "AbortError") return;
      this.refuse(error.message);
      return;
    }
    if (this.file !== file) return;
    this._show();
    this._to("ready");
  }

  // Notes that the server does not have, or cannot read, the file.
  refuse(reason) {
    const own = reason.startsWith(`${this.file.name}: `) ? reason.slice(this.file.name.length + 2) : reason;
    this.reason = /[.?!]$/.test(own) ? own : `${own}.`;
    this._to("refused");
  }

  // The parts of the files that were chosen after so many complete turns, or before the last of `turns` if this is that
  // one; of videos with these frames.
  parts(turn, turns, frames) {
    const shown = this.files.filter((file) => Math.min(file.since, turns) === turn);
    return shown.map(({ id, kind }) => ({ type: "file", file: { file_id: id, ...(kind === "video" ? frames : {}) } }));
  }

  _discard(id) {
    call(`v1/files/${id}`, { method: "DELETE" }).catch(() => {});
  }

  _delete() {
    if (this.file?.id) this._discard(this.file.id);
    if (this.file) this.file.id = null;
  }

  _drop(files) {
    for (const file of files) this._discard(file.id);
  }

  _forget() {
    this._controller?.abort();
    this._delete();
    this._release();
  }

  _release() {
    if (this._url) URL.revokeObjectURL(this._url);
    this._url = null;
  }

  _to(state, other = false) {
    this.state = state;
    const { chosen, ...kept } = this.file ?? {};
    save("file", this.file && kept);
    save("earlier", this.earlier.length ? this.earlier.map(({ chosen: _, ...others }) => others) : null);
    $("upload").hidden = state !== "uploading";
    $("again").hidden = state !== "refused" || !this.file.chosen;
    const missing = this.file && !this.file.chosen;
    $("unplayable").textContent = (missing ? "This browser does not have this file any more." : "This browser cannot play this video.")
      + (state === "ready" ? " The model can read it." : "");
    $("remove").textContent = state === "uploading" ? "Cancel" : "Remove";
    $("remove").setAttribute("aria-label", state === "uploading" ? "Cancel the upload" : "Remove the file");
    this._changed(other);
  }

  _progress(part) {
    $("uploaded").value = part;
    $("percent").textContent = part < 1 ? `${Math.floor(100 * part)}% of ${size(this.file.size)}` : "reading";
  }

  _show() {
    const { file } = this;
    $("drop").hidden = Boolean(file);
    $("view").hidden = !file;
    if (!file) {
      for (const id of ["player", "picture"]) $(id).removeAttribute("src");
      $("player").load();
      $("file").value = "";
      return;
    }
    if (!this._url && file.chosen) this._url = URL.createObjectURL(file.chosen);
    const image = file.kind === "image", view = $(image ? "picture" : "player");
    for (const id of ["player", "picture"]) $(id).hidden = $(id) !== view || !file.chosen;
    if (!file.chosen) $("unplayable").hidden = false;
    else if (view.src !== this._url) {
      $("unplayable").hidden = true;
      view.src = this._url;
    } else if (!$("unplayable").hidden) view.hidden = true;
    $("name").textContent = $("name").title = file.name;
    const facts = [size(file.size)];
    if (file.seconds > 0) facts.unshift(clock(Math.round(file.seconds)));
    if (this.earlier.length) facts.push(`after ${this.earlier.map(({ name }) => name).join(", ")}`);
    $("details").textContent = facts.join(", ");
  }
}

$("player").addEventListener("error", () => {
  if (!$("player").getAttribute("src")) return;
  $("player").hidden = true;
  $("unplayable").hidden = false;
});
