// The video or image of the conversation: chosen or dropped, uploaded, shown.
//
// While a file is uploaded, or after its upload was refused, no question may be sent: the answer would be about nothing.
// The user waits, tries again, or removes the file.
import { call, upload } from "./api.js";
import { clock } from "./evidence.js";

const $ = (id) => document.getElementById(id);
const size = (bytes) => (bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} kB` : `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`);

export class Media {
  // `changed` is called when the state changes, with true if this is another file.
  constructor(changed) {
    this._changed = changed;
    this.file = null; // {name, id, kind, seconds, fps}
    this.state = "none"; // none, uploading, ready, refused
    this.reason = "";
  }

  // Why no question can be asked now; empty if one can.
  get obstacle() {
    if (this.state === "uploading") return `${this.file.name} is being uploaded. You can ask when it is complete.`;
    if (this.state === "refused") return `${this.file.name}: ${this.reason} Try again, or remove it to ask without it.`;
    return "";
  }

  choose(chosen) {
    this._forget();
    this.file = { name: chosen.name, chosen, id: null, kind: chosen.type.startsWith("image/") ? "image" : "video", seconds: NaN, fps: NaN };
    this._show();
    return this.start();
  }

  remove() {
    this._forget();
    this.file = null;
    this._show();
    this._to("none", true);
  }

  // The upload of the current file, from the beginning.
  async start() {
    const file = this.file, controller = new AbortController();
    this._delete();
    this._controller = controller;
    this._progress(0);
    this._to("uploading", true);
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

  // The part of a message that shows the file; null without one.
  part(fps) {
    if (!this.file) return null;
    const file = { file_id: this.file.id };
    if (this.file.kind === "video" && fps) file.fps = fps;
    return { type: "file", file };
  }

  // Deletes the upload when the page is left.
  leave() {
    if (this.file?.id) this._discard(this.file.id, true);
  }

  _discard(id, keepalive = false) {
    call(`v1/files/${id}`, { method: "DELETE", keepalive }).catch(() => {});
  }

  _delete() {
    if (this.file?.id) this._discard(this.file.id);
    if (this.file) this.file.id = null;
  }

  _forget() {
    this._controller?.abort();
    this._delete();
    if (this._url) URL.revokeObjectURL(this._url);
    this._url = null;
  }

  _to(state, other = false) {
    this.state = state;
    $("upload").hidden = state !== "uploading";
    $("again").hidden = state !== "refused";
    $("unplayable").textContent = "This browser cannot play this video." + (state === "ready" ? " The model can read it." : "");
    $("remove").textContent = state === "uploading" ? "Cancel" : "Remove";
    $("remove").setAttribute("aria-label", state === "uploading" ? "Cancel the upload" : "Remove the file");
    this._changed(other);
  }

  _progress(part) {
    $("uploaded").value = part;
    $("percent").textContent = part < 1 ? `${Math.floor(100 * part)}% of ${size(this.file.chosen.size)}` : "reading";
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
    if (!this._url) this._url = URL.createObjectURL(file.chosen);
    const image = file.kind === "image", view = $(image ? "picture" : "player");
    for (const id of ["player", "picture"]) $(id).hidden = $(id) !== view;
    if (view.src !== this._url) {
      $("unplayable").hidden = true;
      view.src = this._url;
    } else if (!$("unplayable").hidden) view.hidden = true;
    $("name").textContent = $("name").title = file.name;
    const facts = [size(file.chosen.size)];
    if (file.seconds > 0) facts.unshift(clock(Math.round(file.seconds)));
    $("details").textContent = facts.join(", ");
  }
}

$("player").addEventListener("error", () => {
  if (!$("player").getAttribute("src")) return;
  $("player").hidden = true;
  $("unplayable").hidden = false;
});
