"""Captures the responses and logs of a real vLLM, byte for byte, into
tests/fixtures/vllm-<version>/.

Usage: capture.py ROOT OUT [PART...]      (./setup prints ROOT)
Parts: main, engine_death, busy, refused, refused_things

Every case writes NAME.head (status line and headers) and NAME.sse | .json | .txt (body after
de-chunking, unchanged); index.json lists the requests. Fixtures are captured output, so never edit
one, but capture again. Sampling is seeded; ids, times and (for n > 1) the interleaving of choices
differ between runs.
"""

import json
import pathlib
import re
import signal
import socket
import sys
import time

from engine import Vllm, until
from wire import Call, call, post

# Longer bodies are cut in the middle, to keep the repository small.
KEEP_BYTES = 30_000
PROMPT = "The quick brown fox jumps over the lazy dog."
MESSAGES = [{"role": "user", "content": PROMPT}]
# Temperature 1 with a seed: noise weights under greedy search repeat one token for ever.
SAMPLING = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True}
# With a seed, this version crashes on a prompt that is prefilled in chunks ("CPU Generator does not
# use offset"), so requests that may share a step with others are sent without a seed.
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
USAGE, CONTINUOUS = {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}

ROOT = pathlib.Path(sys.argv[1]).resolve()


class Shelf:
    """The output folder and its index."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / "index.json"
        self.index = json.loads(index.read_text()) if index.exists() else []

    def add(self, entry):
        """Replaces the entry of an earlier run for the same case."""
        self.index = [e for e in self.index if (e["name"], "exit" in e) != (entry["name"], "exit" in entry)] + [entry]

    def write(self, name, data):
        if isinstance(data, str):
            data = data.encode()
        # Local paths, which occur only in /v1/models, are replaced.
        data = data.replace(str(ROOT).encode(), b"/cache").replace(str(pathlib.Path.home()).encode(), b"/home/user")
        if len(data) > KEEP_BYTES:
            half = KEEP_BYTES // 2
            data = data[:half] + b"\n[... %d bytes left out ...]\n" % (len(data) - 2 * half) + data[-half:]
        (self.folder / name).write_bytes(data)

    def keep(self, name, answer, method, path, body, note=""):
        kind = answer.headers.get("content-type", "")
        suffix = "sse" if "event-stream" in kind else "json" if "json" in kind else "txt"
        self.write(f"{name}.head", answer.head)
        self.write(f"{name}.{suffix}", answer.body)
        asked = body if not isinstance(body, bytes) else body.decode("latin-1")
        if len(json.dumps(asked)) > 2000:
            asked = json.dumps(asked)[:200] + " ... (cut)"
        entry = {"name": name, "method": method, "path": path, "request": asked, "status": answer.status}
        entry |= {"body": f"{name}.{suffix}", "whole": answer.whole}
        self.add(entry | ({"note": note} if note else {}))
        print(f"{answer.status} {name} {len(answer.body)} B")

    def close(self):
        lines = ",\n".join(" " + json.dumps(e, ensure_ascii=False) for e in self.index)
        self.write("index.json", f"[\n{lines}\n]\n")


def ask(shelf, server, name, path, body, method="POST", headers=None, note=""):
    shelf.keep(name, call(server.url, method, path, body, headers), method, path, body, note)


def chats(shelf, server):
    path, base = "/v1/chat/completions", {**SAMPLING, "messages": MESSAGES}
    ask(shelf, server, "chat", path, base)
    ask(shelf, server, "chat-n2", path, {**base, "n": 2})
    for name, options in (("plain", None), ("usage", USAGE), ("continuous", CONTINUOUS)):
        extra = {"stream": True} | ({"stream_options": options} if options else {})
        ask(shelf, server, f"chat-stream-{name}", path, {**base, **extra})
        ask(shelf, server, f"chat-stream-n2-{name}", path, {**base, **extra, "n": 2})
    false = {"include_usage": False}
    ask(shelf, server, "chat-stream-usage-false", path, {**base, "stream": True, "stream_options": false})
    ask(shelf, server, "chat-stream-null-options", path, {**base, "stream": True, "stream_options": None})
    only = {"continuous_usage_stats": True}
    ask(shelf, server, "chat-stream-continuous-only", path, {**base, "stream": True, "stream_options": only})
    logprobs = {"stream": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 4}
    ask(shelf, server, "chat-stream-logprobs", path, {**base, **logprobs})
    eos = {"stream": True, "ignore_eos": False, "min_tokens": 3, "logit_bias": {"1": 100}}
    ask(shelf, server, "chat-stream-eos", path, {**base, **eos}, note="ends by the end token: finish_reason stop")
    stop = {"stream": True, "logit_bias": {"1000": 100}, "stop": ["steyste"]}
    ask(shelf, server, "chat-stream-stop-string", path, {**base, **stop}, note="ends by a stop string of two tokens")
    ask(shelf, server, "chat-stream-token-ids", path, {**base, "stream": True, "return_token_ids": True, "max_tokens": 3})
    multi = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    ask(shelf, server, "chat-parts", path, {**base, "messages": multi})


def tool_calls(shelf, server, key):
    """A tool call that the grammar forces, and that random weights fill with noise."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": "f"}}
    base = {**SAMPLING, "messages": MESSAGES, "tools": [tool], "tool_choice": named, "ignore_eos": False}
    for name, extra in (("chat-tools", {}), ("chat-stream-tools", {"stream": True})):
        ask(shelf, server, name, "/v1/chat/completions", {**base, **extra}, headers=key, note="--tool-call-parser hermes")


def completions(shelf, server):
    path, base = "/v1/completions", {**SAMPLING, "prompt": PROMPT}
    ask(shelf, server, "completion", path, base)
    for name, options in (("plain", None), ("usage", USAGE), ("continuous", CONTINUOUS)):
        extra = {"stream": True} | ({"stream_options": options} if options else {})
        ask(shelf, server, f"completion-stream-{name}", path, {**base, **extra})
        ask(shelf, server, f"completion-stream-n2-{name}", path, {**base, **extra, "n": 2, "max_tokens": 5})
        lists = {"prompt": [PROMPT, "Another prompt."], "max_tokens": 5}
        ask(shelf, server, f"completion-stream-list-{name}", path, {**base, **extra, **lists})
    ids = list(range(100, 140))
    ask(shelf, server, "completion-token-ids", path, {**base, "prompt": ids})
    ask(shelf, server, "completion-stream-token-ids", path, {**base, "prompt": ids, "stream": True, "stream_options": USAGE})
    ask(shelf, server, "completion-token-id-lists", path, {**base, "prompt": [ids, ids[:7]], "max_tokens": 3})
    ask(shelf, server, "completion-list", path, {**base, "prompt": [PROMPT, "Another prompt."], "max_tokens": 3})
    ask(shelf, server, "completion-stream-echo", path, {**base, "echo": True, "stream": True, "max_tokens": 3})
    ask(shelf, server, "completion-stream-one-token", path, {**base, "stream": True, "max_tokens": 1})
    ask(shelf, server, "completion-default-max-tokens", path, {"prompt": PROMPT}, note="no model, no max_tokens")


def other_routes(shelf, server):
    answer = {"model": "tiny", "input": PROMPT, "max_output_tokens": 6, "temperature": 1}
    ask(shelf, server, "responses", "/v1/responses", answer)
    ask(shelf, server, "responses-stream", "/v1/responses", {**answer, "stream": True})
    message = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 1}
    ask(shelf, server, "messages", "/v1/messages", message)
    ask(shelf, server, "messages-stream", "/v1/messages", {**message, "stream": True})
    ask(shelf, server, "messages-unknown-model", "/v1/messages", {**message, "model": "nope"})
    ask(shelf, server, "messages-count-tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES})
    ask(shelf, server, "tokenize-prompt", "/tokenize", {"model": "tiny", "prompt": PROMPT})
    ask(shelf, server, "tokenize-messages", "/tokenize", {"model": "tiny", "messages": MESSAGES})
    ask(shelf, server, "detokenize", "/detokenize", {"model": "tiny", "tokens": [100, 1000, 2000]})
    ask(shelf, server, "embeddings-unsupported", "/v1/embeddings", {"model": "tiny", "input": PROMPT})
    for name in ("health", "version", "load", "v1/models", "ping", "kv_event_sources"):
        ask(shelf, server, name.removeprefix("v1/").replace("_", "-"), f"/{name}", b"", "GET")


def errors(shelf, server):
    chat, text = "/v1/chat/completions", "/v1/completions"
    base, long = {**SAMPLING, "messages": MESSAGES}, "dog " * 9000

    def bad(name, path, body, headers=None, method="POST"):
        ask(shelf, server, f"error-{name}", path, body, method, headers)

    bad("unknown-model", chat, {**base, "model": "nope"})
    bad("unknown-model-stream", chat, {**base, "model": "nope", "stream": True})
    bad("overflow-chat", chat, {**base, "messages": [{"role": "user", "content": long}]})
    bad("overflow-chat-stream", chat, {**base, "messages": [{"role": "user", "content": long}], "stream": True})
    bad("overflow-completion", text, {**SAMPLING, "prompt": long})
    bad("overflow-token-ids", text, {**SAMPLING, "prompt": [100] * 9000})
    bad("overflow-characters", text, {**SAMPLING, "prompt": "x" * 2_000_000})
    bad("max-tokens-over-context", chat, {**base, "max_tokens": 100_000})
    bad("not-json", chat, b"{\"model\": \"tiny\", ")
    bad("not-json-at-all", chat, b"hello")
    bad("empty-body", chat, b"")
    bad("array-body", chat, b"[]")
    bad("no-messages", chat, {"model": "tiny"})
    bad("wrong-types", chat, {**base, "max_tokens": "many", "temperature": "hot", "stream": 3})
    bad("negative-max-tokens", chat, {**base, "max_tokens": -1})
    bad("prompt-is-number", text, {**SAMPLING, "prompt": 5})
    bad("token-id-out-of-range", text, {**SAMPLING, "prompt": [100, 99999]})
    bad("n-too-large", text, {**SAMPLING, "prompt": PROMPT, "n": 20000})
    bad("stream-options-without-stream", chat, {**base, "stream_options": USAGE})
    bad("invalid-utf8", chat, b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}')
    bad("wrong-content-type", chat, json.dumps(base).encode(), {"content-type": "text/plain"})
    bad("no-content-type", chat, json.dumps(base).encode(), {"content-type": None})
    bad("unknown-route", "/v1/nope", b"", method="GET")
    bad("wrong-method", chat, b"", method="GET")


def raw(shelf, server):
    """One stream with its chunk framing and its request, exactly as on the wire."""
    body = {**SAMPLING, "messages": MESSAGES, "stream": True, "max_tokens": 4}
    answer = post(server.url, "/v1/chat/completions", body)
    shelf.write("raw-chat-stream.http", answer.head + answer.raw)
    answer = post(server.url, "/v1/chat/completions", {**body, "stream": False})
    shelf.write("raw-chat.http", answer.head + answer.raw)


def load(server):
    """Makes some traffic, so that the metrics page has values: 24 concurrent streams, of which a
    few are aborted."""
    calls = []
    for i in range(24):
        length = 4000 if i % 8 == 7 else 64
        body = {**GREEDY, "max_tokens": length, "prompt": f"{i} " * (20 * i + 1), "stream": True}
        calls.append(Call(server.url, "POST", "/v1/completions", body))
    for i, one in enumerate(calls):
        if i % 8 == 7:
            next(one.stream())
            one.close()
        else:
            one.finish()


def until_idle(server):
    until("the engine is idle", lambda: server.running() == 0, 30)


def metrics(shelf, server):
    load(server)
    until_idle(server)
    text = call(server.url, "GET", "/metrics").text()
    # Histograms of three dozen buckets each would fill the page. So the capture keeps the buckets
    # only of the histograms that a proxy reads, and all other series.
    wanted = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency")
    lines = [x for x in text.splitlines() if "_bucket{" not in x or any(w in x for w in wanted)]
    shelf.write("metrics.txt", "\n".join(lines) + "\n")
    shelf.write("metrics-full-names.txt", "\n".join(sorted(set(re.findall(r"^# TYPE (.*)$", text, re.M)))) + "\n")
    print("metrics", len(text))


def death(shelf, server, name, sign, folder):
    """A stream whose server is stopped or killed during it."""
    body = {**GREEDY, "messages": MESSAGES, "stream": True, "max_tokens": 8000}
    one = Call(server.url, "POST", "/v1/chat/completions", body)
    pieces = one.stream()
    for _ in range(4):
        next(pieces)
    started = time.monotonic()
    if sign == signal.SIGKILL:
        server.kill()
    else:
        server.child.send_signal(sign)
    error = ""
    try:
        one.finish()
    except OSError as problem:
        error = repr(problem)
    ended = time.monotonic() - started
    status = server.child.wait(60)
    exited = time.monotonic() - started
    server.kill()
    note = f"stream ended {ended:.2f} s after the signal {error}; process exit status {status} after {exited:.2f} s"
    shelf.keep(name, one.answer, "POST", "/v1/chat/completions", body, note)
    shelf.write(f"{name}.tail.http", one.answer.raw[-1500:])
    text = server.text()
    shelf.write(f"{name}.log", tidy(text[text.rfind("POST /v1/chat/completions") :]))


def engine_death(shelf, root, folder):
    """The engine process is killed while the API server lives on. Captures a running stream, the
    next request and /health."""
    server = Vllm("fatal", root, folder, 8192).healthy()
    body = {**GREEDY, "messages": MESSAGES, "stream": True, "max_tokens": 8000}
    path = "/v1/chat/completions"
    try:
        one = Call(server.url, "POST", path, body)
        pieces = one.stream()
        for _ in range(4):
            next(pieces)
        started = time.monotonic()
        fatal = {**SAMPLING, "prompt": [100] * 5000}
        killer = post(server.url, "/v1/completions", fatal)
        shelf.keep("death-engine-cause", killer, "POST", "/v1/completions", fatal, "a seed and a prompt prefilled in pieces")
        one.finish()
        note = f"stream ended {time.monotonic() - started:.2f} s after the request that killed the engine"
        shelf.keep("death-engine", one.answer, "POST", path, body, note)
        shelf.write("death-engine.tail.http", one.answer.raw[-1500:])
        for name, method, where, what in (("health", "GET", "/health", b""), ("next", "POST", path, body)):
            try:
                shelf.keep(f"death-engine-{name}", call(server.url, method, where, what), method, where, what)
            except OSError as problem:
                print("after the death", name, problem)
        status = server.child.wait(60)
        note = f"process ended {time.monotonic() - started:.1f} s after"
        shelf.add({"name": "death-engine", "exit": status, "note": note})
    finally:
        server.kill()
    log = tidy(server.text())
    shelf.write("death-engine.log", log[log.find("WorkerProc hit an exception") - 100 :])


def refused(shelf, root, folder):
    """Starts that must fail: output and exit status."""
    cases = {
        # 1 GiB of cache holds 2,097,152 tokens of this model.
        "start-refused-context-over-kv": (4000000, "--hf-overrides", '{"max_position_embeddings": 4000000}'),
        "start-refused-unknown-flag": (8192, "--disable-log-requests"),
        "start-refused-batched-under-seqs": (8192, "--max-num-batched-tokens", "64", "--max-num-seqs", "128"),
        "start-refused-context-over-model": (65536,),
    }
    for name, (length, *flags) in cases.items():
        refusal(shelf, root, folder, name, length, *flags)


def refused_things(shelf, root, folder):
    """Starts that must fail because of their environment: a model, an adapter, a port."""
    refusal(shelf, root, folder, "start-refused-no-model-folder", 8192, model="/nonexistent/model")
    refusal(shelf, root, folder, "start-refused-unknown-model", 8192, model="nobody/no-such-model")
    lora = ["--enable-lora", "--max-lora-rank", "1", "--lora-modules", f"ad={root / 'lora'}"]
    refusal(shelf, root, folder, "start-refused-lora-rank", 8192, *lora)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        refusal(shelf, root, folder, "start-refused-port-in-use", 8192, port=holder.getsockname()[1])


def refusal(shelf, root, folder, name, length, *flags, **where):
    """One start that must fail."""
    started = time.monotonic()
    server = Vllm(name, root, folder, length, *flags, **where)
    try:
        until(f"{name} gives up", lambda: not server.alive(), 300, 0.2)
    finally:
        server.kill()
    status = server.child.returncode
    shelf.write(f"{name}.log", tidy(server.text()))
    note = f"ended after {time.monotonic() - started:.0f} s"
    shelf.add({"name": name, "flags": [str(length), *flags], "exit": status, "body": f"{name}.log", "note": note})
    print("exit", status, name)


def tidy(log):
    """A log without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log)


def busy(shelf, root, folder):
    """A server with one slot, a queue of two, a key, adapters, keep-alive comments and its own
    request metrics."""
    flags = ["--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--api-key", "k", "--sse-keep-alive-interval", "1"]
    flags += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules", f"ad={root / 'lora'}"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--enable-per-request-metrics", "--enable-prompt-tokens-details", "--enable-request-id-headers"]
    server = Vllm("busy", root, folder, 8192, *flags).healthy()
    key = {"authorization": "Bearer k"}
    path, body = "/v1/completions", {**SAMPLING, "prompt": PROMPT, "stream": True}
    try:
        ask(shelf, server, "error-no-key", path, body)
        ask(shelf, server, "models-lora", "/v1/models", b"", "GET", key)
        ask(shelf, server, "completion-stream-lora", path, {**body, "model": "ad", "stream_options": USAGE}, headers=key,
            note="adapter; --enable-per-request-metrics, --enable-prompt-tokens-details")
        ask(shelf, server, "completion-request-id", path, {**body, "stream": False}, headers={**key, "x-request-id": "mine-1"},
            note="--enable-request-id-headers, X-Request-Id: mine-1")
        tool_calls(shelf, server, key)
        first = Call(server.url, "POST", path, {**GREEDY, "prompt": PROMPT, "stream": True, "max_tokens": 8000}, key)
        next(first.stream())
        second = Call(server.url, "POST", path, body, key)
        until("one waits", lambda: server.metric("vllm:num_requests_waiting") == 1, 10)
        ask(shelf, server, "error-queue-full", path, body, headers=key, note="--max-num-queued-reqs 2, both seats taken")
        second.read_head()
        stop = time.monotonic() + 2.5
        while time.monotonic() < stop and second.pending.count(b": keep-alive") < 2:
            second.receive()
        first.close()
        second.finish()
        shelf.keep("completion-stream-keep-alive", second.answer, "POST", path, body, "--sse-keep-alive-interval 1, queued")
        until_idle(server)
        shelf.write("metrics-lora.txt", "\n".join(
            x for x in call(server.url, "GET", "/metrics").text().splitlines()
            if "lora" in x or "admission" in x or "num_requests" in x) + "\n")
    finally:
        server.terminate()
    shelf.write("start-up-lora.log", tidy(server.text()[: server.text().find("Application startup complete") + 30]))


def main():
    root, out = ROOT, pathlib.Path(sys.argv[2])
    folder = root / "capture"
    folder.mkdir(exist_ok=True)
    shelf = Shelf(out)
    try:
        for part in sys.argv[3:] or list(PARTS):
            PARTS[part](shelf, root, folder)
    finally:
        shelf.close()


def one_server(shelf, root, folder):
    """Captures every case of a server without special flags. The last case kills the server."""
    server = Vllm("main", root, folder, 8192)
    other = Vllm("other", root, folder, 8192)
    try:
        server.healthy()
        other.healthy()
        shelf.write("start-up.log", tidy(server.text()))
        for part in (chats, completions, other_routes, errors, raw, metrics):
            part(shelf, server)
        death(shelf, server, "death-sigterm", signal.SIGTERM, folder)
        death(shelf, other, "death-sigkill", signal.SIGKILL, folder)
    finally:
        server.terminate()
        other.terminate()


PARTS = {"main": one_server, "engine_death": engine_death, "busy": busy, "refused": refused,
         "refused_things": refused_things}

if __name__ == "__main__":
    main()
