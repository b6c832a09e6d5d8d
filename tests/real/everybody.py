"""The clients that people use, before real vLLM and through the gateway; `./clients` prepares and runs it.

Usage: everybody.py ROOT CLIENTS [NAME...]      (ROOT from ./setup, CLIENTS is the folder with the installed clients)

A client is a function of a URL that returns its results by the name of the call. Both results must be the same, except for
the documented differences in `DIFFERS`. The last line is `N passed, N failed`. Logs stay in CLIENTS/.
"""

import json
import pathlib
import subprocess
import sys

import clients
from engine import HERE, Failed, Vllm
from gateway import Gateway, model, pool

# How long a client may take for all its calls, seconds.
CLIENT_SECONDS = 300
# (client, call): why the gateway's result is another one. The result is shown all the same.
DIFFERS = {}
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "The quick brown fox"}], "temperature": 0, "max_tokens": 6, "ignore_eos": True})


def program(*command):
    """The results that a program prints for a URL."""
    def run(url):
        done = subprocess.run([*map(str, command), url], capture_output=True, text=True, timeout=CLIENT_SECONDS)
        if done.returncode:
            raise Failed(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    return run


def curl(*flags):
    """Statuses and contents of calls of curl."""
    def content(text):
        try:
            return json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, KeyError):
            return None

    def run(url):
        post = ["-H", "content-type: application/json", "-d"]
        calls = {
            "chat": ["/v1/chat/completions", *post, CHAT],
            "no model": ["/v1/chat/completions", *post, '{"messages":1}'],
            "not JSON": ["/v1/chat/completions", *post, "{"],
            "unknown path": ["/v1/nothing", *post, "{}"],
            "slash at the end": ["/v1/chat/completions/", "-L", *post, CHAT],
            "models": ["/v1/models"],
            "health": ["/health"],
            "unknown method": ["/v1/models", "-X", "DELETE"],
        }
        results = {}
        for name, (path, *rest) in calls.items():
            command = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", *flags, url + path, *rest]
            done = subprocess.run(command, capture_output=True, text=True)
            text, _, status = done.stdout.rpartition("\n")
            results[name] = [done.returncode, status, content(text)]
        return results
    return run


def official(engine, gate):
    """openai and anthropic, which compare by themselves."""
    count, wrong = clients.run(engine, gate)
    for line in wrong:
        print("DIFFERS", line)
    return count - len(wrong), len(wrong)


def compare(name, direct, through, engine, gate):
    want, got = direct(engine), through(gate)
    failed = 0
    for call in want.keys() | got.keys():
        same = want.get(call) == got.get(call)
        why = DIFFERS.get((name, call))
        if not same:
            print("differs as documented" if why else "DIFFERS", f"{name}, {call}: vLLM {want.get(call)!r}, the gateway {got.get(call)!r}", why or "")
        failed += not same and not why
    print(f"{name}: {len(want)} calls, {failed} differ", flush=True)
    return len(want) - failed, failed


def main(root, folder, *names):
    root, folder = pathlib.Path(root), pathlib.Path(folder)
    python, node = folder / "venv/bin/python", "node"
    frameworks = lambda name: program(python, "-B", HERE / "frameworks.py", name)
    each = {name: (run, run) for name, run in {
        "langchain": frameworks("langchain"), "litellm": frameworks("litellm"), "vercel": program(node, folder / "vercel.mjs"),
        "curl": curl("--http1.1"), "page": program(node, folder / "page.mjs"),
    }.items()}
    # vLLM has HTTP/1.1 only.
    each["curl over HTTP/2"] = (curl("--http1.1"), curl("--http2-prior-knowledge"))
    wanted = lambda name: not names or any(part in name for part in names)
    engine = Vllm("engine", root, folder, 8192, "--allowed-origins", '["*"]')
    gate, passed, failed = None, 0, 0
    try:
        engine.healthy()
        gate = Gateway(folder, "gate", [pool("only", {"engine": engine.url}, slots=32)], [model("tiny")])
        if wanted("openai and anthropic"):
            passed, failed = official(engine.url, gate.url)
            print(f"openai and anthropic: {passed + failed} calls, {failed} differ", flush=True)
        for name, (direct, through) in each.items():
            if wanted(name):
                try:
                    right, wrong = compare(name, direct, through, engine.url, gate.url)
                except (Failed, OSError, subprocess.TimeoutExpired) as error:
                    print(f"FAILED {name}: {error}", flush=True)
                    right, wrong = 0, 1
                passed, failed = passed + right, failed + wrong
        gate.idle()
    finally:
        for process in filter(None, (gate, engine)):
            process.kill()
    print(f"{passed} passed, {failed} failed")
    return bool(failed) or not passed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
