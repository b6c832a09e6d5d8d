// The stream of events, by fetch: an EventSource cannot send the admin token. It reconnects by itself, and says when it is not connected.

/** Without a byte for this long the gateway counts as not connected, because it sends every second. */
const SILENCE_MS = 4500;
const RETRY_MS = [500, 1000, 2000, 4000];

export class Stream {
  /** `on.event(name, data)`, `on.state(state, message)` with live, lost, locked or paused; `headers()` has the token. */
  constructor(on, headers) {
    this.on = on;
    this.headers = headers;
    this.failures = 0;
    this.number = 0;
    document.addEventListener("visibilitychange", () => document.hidden ? this.pause() : this.open());
  }

  open() {
    clearTimeout(this.timer);
    this.controller?.abort();
    const number = ++this.number;
    this.run(number).catch(error => {
      if (number !== this.number) return;
      this.on.state("lost", error.said || "The gateway does not answer. What is shown is the last that is known; trying again.");
      const wait = RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)];
      this.timer = setTimeout(() => this.open(), wait);
    });
  }

  pause() {
    this.number++;
    clearTimeout(this.timer);
    this.controller?.abort();
    this.on.state("paused");
  }

  async run(number) {
    const controller = this.controller = new AbortController();
    let watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
    const response = await fetch("admin/events", { headers: this.headers(), signal: controller.signal, cache: "no-store" });
    if (number !== this.number) return;
    if (response.status === 401) {
      clearTimeout(watchdog);
      return this.on.state("locked");
    }
    if (!response.ok) {
      const error = new Error("refused");
      error.said = await response.json().then(body => body.error.message, () => `The gateway answers with status ${response.status}.`);
      throw error;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (number !== this.number) return;
      if (done) throw new Error("ended");
      clearTimeout(watchdog);
      watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n");
        const field = name => lines.find(line => line.startsWith(name + ": "))?.slice(name.length + 2);
        this.failures = 0;
        this.on.event(field("event"), JSON.parse(field("data")));
      }
    }
  }
}
