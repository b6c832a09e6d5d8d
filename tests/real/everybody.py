"""Clients in common use, in front of real vLLM and through the gateway; `./clients` runs this
script.

Usage: everybody.py ROOT CLIENTS [NAME...]   (ROOT from ./setup; CLIENTS from ./clients)

A client is a function of a URL that returns its results by the name of the call. Both results must
be equal, except for the calls in `DIFFERS`, whose results must differ. The last line is
`N passed, N failed`. Logs stay in CLIENTS/.
"""

import functools
import gzip
import json
import pathlib
import subprocess
import sys
import time

import clients
from engine import HERE, Failed, Vllm
from gateway import Gateway, certificate, model, pool

# Time limit of a client for all its calls, seconds.
CLIENT_SECONDS = 120
# Calls whose results differ, each with the place in .github/docs/clients.md that explains the
# difference.
DIFFERS = {
    "one model": "Paths: the gateway serves /v1/models/{id}",
    "readiness": "Paths: the gateway serves /ready",
    "control route": "Paths: everything else is 404",
    "compressed body": "Compressed bodies: vLLM itself does not decode",
}
CHAT = {
    "model": "tiny", "messages": [{"role": "user", "content": "The quick brown fox"}],
    "temperature": 0, "max_tokens": 6, "ignore_eos": True,
}
# Bytes of a large body: twice the size from which curl asks before it sends (`Expect:
# 100-continue`).
LARGE = 2 << 20
FLAGS = [
    "--allowed-origins", '["*"]',
    # These flags are for agents. They let the model call tools, and make token counts independent
    # of earlier calls.
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--logits-processors", "parrot:Parrot", "--no-enable-prefix-caching",
]


def program(*command):
    """The results that a program prints for a URL."""
    def run(url):
        done = subprocess.run(
            [*map(str, command), url], capture_output=True, text=True, timeout=CLIENT_SECONDS)
        if done.returncode:
            raise Failed(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    return run


def content(text):
    """The text of a chat, from one object or from a stream. None if the body is neither."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    try:
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
        choices = [choice for part in parts for choice in part["choices"]]
        return "".join((c.get("message") or c["delta"]).get("content") or "" for c in choices)
    except (ValueError, KeyError, TypeError):
        return None


def curl(*flags):
    """Statuses and contents of calls of curl."""
    def run(url):
        silent = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}"]
        post = ["-H", "content-type: application/json", "--data-binary", "@-"]
        packed = gzip.compress(json.dumps(CHAT).encode())
        calls = {
            "chat": ("/v1/chat/completions", CHAT),
            "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
            "chat, large body": ("/v1/chat/completions", {**CHAT, "metadata": {"x": "x" * LARGE}}),
            "no model": ("/v1/chat/completions", {"messages": 1}),
            "not JSON": ("/v1/chat/completions", b"{"),
            "unknown path": ("/v1/nothing", {}),
            "slash at the end": ("/v1/chat/completions/", CHAT, "-L"),
            "compressed body": ("/v1/chat/completions", packed, "-H", "content-encoding: gzip"),
            "models": ("/v1/models", None),
            "one model": ("/v1/models/tiny", None),
            "readiness": ("/ready", None),
            "control route": ("/version", None),
            "health": ("/health", None),
            "unknown method": ("/v1/models", None, "-X", "DELETE"),
        }
        results = {}
        for name, (path, body, *more) in calls.items():
            command = [*silent, *flags, *more, *([] if body is None else post), url + path]
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            done = subprocess.run(command, input=sent, capture_output=True)
            text, _, status = done.stdout.decode().rpartition("\n")
            results[name] = [done.returncode, status, content(text)]
        return results
    return run


def official(engine, gate):
    """Runs openai and anthropic, which make the comparison themselves."""
    count, wrong = clients.run(engine, gate)
    for line in wrong:
        print("DIFFERS", line)
    print(f"openai and anthropic: {count} calls, {len(wrong)} wrong", end="")
    return count - len(wrong), len(wrong)


def compare(name, direct, through, engine, gate):
    want, got = direct(engine), through(gate)
    calls, documented, failed = want.keys() | got.keys(), 0, 0
    for call in sorted(calls):
        same = want.get(call) == got.get(call)
        why = DIFFERS.get(call)
        documented += not same and bool(why)
        if same == bool(why):
            failed += 1
            print(f"DOES NOT DIFFER {name}, {call} ({why})" if why else f"DIFFERS {name}, {call}")
            print(f"    vLLM {want.get(call)!r}\n    the gateway {got.get(call)!r}")
    print(f"{name}: {len(calls)} calls, {documented} differ as documented, {failed} wrong", end="")
    return len(calls) - failed, failed


def comparisons(folder, engine, plain, secure):
    """A function for every client, by its name."""
    python = folder / "venv/bin/python"
    script = lambda file, *arguments: program("node", folder / file, *arguments)
    frameworks = lambda name: program(python, "-B", HERE / "frameworks.py", name)
    agent = lambda name: program(sys.executable, "-B", HERE / "agents.py", name, folder)
    # vLLM speaks HTTP/1.1 only.
    old = curl("--http1.1")
    trusted = ("--cacert", f"{folder / 'gate'}.pem")
    each = {
        "langchain": frameworks("langchain"), "litellm": frameworks("litellm"),
        "vercel": script("vercel.mjs"), "codex": agent("codex"), "claude": agent("claude"),
        "page": script("page.mjs"), "curl": old,
        "curl over HTTP/2": (old, curl("--http2-prior-knowledge")),
        "curl that offers HTTP/2": (old, curl("--http2")),
        "curl over HTTP/2 and TLS": (old, curl("--http2", *trusted), secure),
        "curl over TLS": (old, curl("--http1.1", *trusted), secure),
    }
    yield "openai and anthropic", functools.partial(official, engine, plain)
    for name, how in each.items():
        direct, through, *gate = how if isinstance(how, tuple) else (how, how)
        yield name, functools.partial(compare, name, direct, through, engine, *gate or [plain])


def main(root, folder, *names):
    root, folder = pathlib.Path(root), pathlib.Path(folder)
    running, passed, failed = [], 0, 0
    try:
        # `parrot` is in this folder.
        engine = Vllm("engine", root, folder, 32768, *FLAGS, env={"PYTHONPATH": str(folder)})
        running.append(engine)
        engine.healthy()
        path = certificate(folder, "gate")
        for name, tls in (("gate", None), ("secure", path)):
            pools = [pool("only", {"engine": engine.url}, slots=32)]
            running.append(Gateway(folder, name, pools, [model("tiny")], tls=tls))
        gates = running[1:]
        for name, run in comparisons(folder, engine.url, *(gate.url for gate in gates)):
            if names and not any(part in name for part in names):
                continue
            began = time.monotonic()
            try:
                right, wrong = run()
            except (Failed, OSError, subprocess.TimeoutExpired) as error:
                print(f"FAILED {name}: {error}", end="")
                right, wrong = 0, 1
            print(f" ({time.monotonic() - began:.0f} s)", flush=True)
            passed, failed = passed + right, failed + wrong
        for gate in gates:
            gate.idle()
    finally:
        for process in reversed(running):
            process.kill()
    print(f"{passed} passed, {failed} failed")
    return bool(failed) or not passed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
