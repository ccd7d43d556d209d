// The moments of the video that an answer attends to: a time line below the player, and images below the answer.
import { call } from "./api.js";

const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}%`;

export function clock(seconds) {
  const tenths = Math.round(10 * seconds), whole = Math.floor(tenths / 10);
  const parts = [Math.floor(whole / 60) % 60, whole % 60];
  if (whole >= 3600) parts.unshift(Math.floor(whole / 3600));
  const text = parts.map((part, place) => (place ? String(part).padStart(2, "0") : part)).join(":");
  return tenths % 10 ? `${text}.${tenths % 10}` : text;
}

function seek(seconds) {
  const player = $("player");
  if (player.hidden) return;
  player.currentTime = seconds;
  player.play().catch(() => {}); // another seek may come first
}

// The upper end of the scale: a share that is easy to read.
function top(shares) {
  return [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].find((limit) => limit >= Math.max(...shares) - 1e-9) ?? 1;
}

// Draws moments with their ranks on the time line of a video of this many seconds; none: hides it.
export function showTimeline(moments, seconds) {
  $("timeline").hidden = !moments?.length || !(seconds > 0);
  $("bars").replaceChildren();
  $("ticks").replaceChildren();
  if ($("timeline").hidden) return;
  const limit = top(moments.map((moment) => moment.share));
  $("scale").textContent = `${100 * limit}%`;
  for (const { rank, start, end, share } of moments) {
    const bar = document.createElement("button");
    bar.type = "button";
    bar.title = `${clock(start)} to ${clock(end)}: ${percent(share)}`;
    bar.setAttribute("aria-label", `Play from ${clock(start)}: moment ${rank + 1}, ${percent(share)} of the attention`);
    bar.style.left = `${(100 * start) / seconds}%`;
    bar.style.width = `${(100 * (Math.min(end, seconds) - start)) / seconds}%`;
    bar.style.height = `${(100 * share) / limit}%`;
    const number = document.createElement("span");
    number.textContent = rank + 1;
    bar.append(number);
    bar.addEventListener("click", (clicked) => { clicked.stopPropagation(); seek(start); });
    $("bars").append(bar);
  }
  for (const place of [0, 0.25, 0.5, 0.75, 1]) {
    const tick = document.createElement("span");
    tick.textContent = clock(seconds > 40 ? Math.round(place * seconds) : place * seconds);
    tick.style.left = `${100 * place}%`;
    $("ticks").append(tick);
  }
}

async function picture(image, path) {
  try {
    image.src = URL.createObjectURL(await (await call(path)).blob());
  } catch {
    image.hidden = true; // the time and the share remain
  }
}

// Returns the list of moments of an answer about the files of `media`; `choose` is called before one is played, which only
// those of the file that is shown are.
export function momentList(moments, media, choose) {
  const { files } = media;
  const made = document.createElement("div"), title = document.createElement("h3"), list = document.createElement("ul");
  made.className = "moments";
  title.textContent = "Moments that the answer attends to";
  for (const [rank, moment] of moments.entries()) {
    const file = files[moment.medium ?? 0];
    const button = document.createElement("button"), shot = document.createElement("span"), image = document.createElement("img");
    const number = document.createElement("b"), when = document.createElement("span"), share = document.createElement("span");
    const item = document.createElement("li");
    button.type = "button";
    button.setAttribute("aria-label", `Moment ${rank + 1}: ${clock(moment.start)} to ${clock(moment.end)}, ${percent(moment.share)} of the attention. Play from there.`);
    shot.className = "shot";
    when.className = "when";
    image.alt = "";
    number.textContent = rank + 1;
    share.textContent = percent(moment.share);
    shot.append(image, number);
    when.append(`${clock(moment.start)} to ${clock(moment.end)}${files.length > 1 ? ` of ${file.name}` : ""}`, share);
    button.append(shot, when);
    button.addEventListener("click", () => {
      if (file !== media.file) return;
      choose();
      seek(moment.start);
    });
    const frame = (moment.end - moment.start) / (moment.last - moment.first + 1);
    picture(image, `v1/files/${file.id}/frame?seconds=${moment.start + (moment.peak - moment.first) * frame + 0.5 / file.fps}`);
    item.append(button);
    list.append(item);
  }
  made.append(title, list);
  return made;
}

$("plot").addEventListener("click", (clicked) => {
  const { left, width } = $("plot").getBoundingClientRect();
  seek(((clicked.clientX - left) / width) * $("player").duration);
});
$("player").addEventListener("timeupdate", () => {
  $("playhead").style.left = `${(100 * $("player").currentTime) / $("player").duration}%`;
});
