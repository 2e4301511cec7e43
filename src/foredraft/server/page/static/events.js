// Server-sent events over fetch, which unlike EventSource can send an API key, and errors in words.

/** The key lives in this tab only. */
export const key = {
  get: () => sessionStorage.getItem("foredraft-key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("foredraft-key", value) : sessionStorage.removeItem("foredraft-key")),
};

/** An answer of the server that is no success; `status` is that of HTTP, 0 inside a stream. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Requests `path`; anything but success is a ServerError that says why. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const sent = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(path, { method: sent ? "POST" : "GET", headers, body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  throw new ServerError(words(found?.error, answer.status), answer.status);
}

/** The JSON objects of an event stream, until its end. */
export async function* stream(path, options) {
  const answer = await request(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data: "));
        const data = lines.map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ServerError(words(parsed.error, 0), 0);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function words(error, status) {
  const said = typeof error?.message === "string" ? error.message : `The server answered with status ${status}.`;
  return error?.request_id ? `${said} (${error.request_id})` : said;
}
