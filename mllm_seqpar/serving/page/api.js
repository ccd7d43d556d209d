// The server's public interface: requests with the API key, uploads with their progress, server-sent events.

const UNREACHABLE = "the server cannot be reached; is it still running?";

const KEPT = 3600; // seconds for which the server keeps an upload after its last use: the page does not know if it is reloaded

const LAST_BYTES = 4e6; // more than a browser sends between two reports of its progress

export class ApiError extends Error {
  // `retryAfter`: seconds after which the server asks to try again; 0: it does not.
  constructor(message, status, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function authorization() {
  const key = document.getElementById("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function failure(status, text, retryAfter = 0) {
  let message = null;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* not this server's JSON: a proxy's page, for example */ }
  return new ApiError(message ?? `the server answered with status ${status}`, status, retryAfter);
}

export async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization() } });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE, 0);
  }
  if (!response.ok) {
    throw failure(response.status, await response.text(), Number(response.headers.get("Retry-After")) || 0);
  }
  return response;
}

// Uploads a file; `progress` is called with the part that is sent, 0 to 1. Only XMLHttpRequest reports that. `signal` ends
// it unless the server may have stored the file already: the caller then needs its id, to delete it.
export function upload(file, progress, signal) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("expires_after[anchor]", "last_active_at");
    form.append("expires_after[seconds]", KEPT);
    form.append("file", file);
    const request = new XMLHttpRequest();
    request.open("POST", "v1/files");
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (sent) => progress(sent.total ? sent.loaded / sent.total : 0));
    request.addEventListener("load", () => {
      if (request.status === 200) resolve(JSON.parse(request.responseText));
      else reject(failure(request.status, request.responseText));
    });
    request.addEventListener("error", () => reject(new ApiError(UNREACHABLE, 0)));
    request.addEventListener("abort", () => reject(new DOMException("cancelled", "AbortError")));
    let sent = 0;
    request.upload.addEventListener("progress", ({ loaded }) => { sent = loaded; });
    signal.addEventListener("abort", () => { if (file.size - sent > LAST_BYTES) request.abort(); });
    request.send(form);
  });
}

// Yields the data of server-sent events, and calls `comment` with comments.
export async function* events(response, comment) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE, 0);
    }
    if (part.done) throw new ApiError("the connection ended before the answer was complete", 0);
    buffer += part.value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(":")) comment(block.slice(1).trim());
      else if (block === "data: [DONE]") return;
      else {
        const value = JSON.parse(block.slice("data: ".length));
        if (value.error) throw new ApiError(value.error.message, 200);
        yield value;
      }
    }
  }
}
