// What a reload must not lose. The conversation is in the storage of the tab; the chosen file, which may be large, in the
// browser's database, under a name of the tab. Without storage (a full disk, a private window) the page works without it.

const DAY = 24 * 3600 * 1000;

export function save(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
  } catch { /* full, or not allowed */ }
}

export function saved(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

function tab() {
  const name = saved("tab") ?? crypto.getRandomValues(new Uint32Array(4)).join("-");
  save("tab", name);
  return name;
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function files(mode, use) {
  const opening = indexedDB.open("mllm-seqpar", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("files");
  const database = await done(opening);
  try {
    return await use(database.transaction("files", mode).objectStore("files"));
  } finally {
    database.close();
  }
}

// Keeps the chosen file; null: no file any more.
export function keepFile(file) {
  const change = (store) => done(file ? store.put({ file, time: Date.now() }, tab()) : store.delete(tab()));
  return files("readwrite", change).catch(() => {});
}

// Returns the kept file, or null, and removes the files of tabs that were closed long ago.
export function keptFile() {
  return files("readwrite", async (store) => {
    for (const name of await done(store.getAllKeys())) {
      if (name !== tab() && (await done(store.get(name))).time < Date.now() - DAY) store.delete(name);
    }
    return (await done(store.get(tab())))?.file ?? null;
  }).catch(() => null);
}
