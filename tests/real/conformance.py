"""Compares the simulator with a real vLLM on the CPU, with the same flags and requests, and lists
every difference.

Usage: conformance.py ROOT [PART...]                      (ROOT from ./setup; all parts if none)
       conformance.py ROOT --against REAL_URL SIM_URL     (running servers; requests, metrics)
Parts: requests, metrics, process, arguments, starts

Known differences have a reason in ACCEPTED and are counted. Any other difference is printed and
fails the run, and so does an unused entry of ACCEPTED. Last line:
`N compared, N accepted, N different`.
"""

import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import compare
from engine import Failed, Process, Vllm, free_port, get, until
from gateway import binary
from script import BASE, TEXT, script
from wire import Call, call

# Each line has the name of a request and the part that differs, both as regular expressions, and
# the reason for which the difference is accepted.
ACCEPTED = [
    (r"metrics", r"python_.*", "there is no Python"),
    # Three results occur with the same server: an error event, a chunk whose finish reason is
    # "abort", and silence until the client leaves.
    (r"process", r"end of a stream at SIGTERM", "vLLM races: the engine's last word is an abort or the news of its death"),
    (r"process", r"child VLLM::Worker", "on a CPU the engine always has a worker process; one GPU has none"),
]
FLAGS = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--enable-request-id-headers"]
LENGTH = "8192"
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
START_SECONDS = 240
# A stream without bytes for this long after a SIGTERM counts as ended.
SILENCE_SECONDS = 15


class Tally:
    """Counts of compared and accepted values, and the differences."""

    def __init__(self):
        self.compared, self.accepted, self.different, self.used = 0, 0, 0, set()

    def differ(self, name, part, real, sim):
        for at, (names, parts, _) in enumerate(ACCEPTED):
            if re.search(names, name) and re.fullmatch(parts, part):
                self.accepted += 1
                self.used.add(at)
                return
        self.different += 1
        print(f"- {name}: {part}\n    real {str(real)[:700]}\n    sim  {str(sim)[:700]}", flush=True)

    def same(self, name, part, real, sim):
        self.compared += 1
        if real != sim:
            self.differ(name, part, real, sim)


class Sim(Process):
    """`sluice sim` with the flags of the real server."""

    def __init__(self, root, folder, *flags, name="sim", port=None, env=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [binary(), "sim", root / "tiny", "--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager", "--seed", "0"]
        # At full speed, steps of such a small model would be shorter than the timer's resolution.
        # At 6 ms a step, each token is a separate event.
        command += ["--host", "127.0.0.1", "--port", self.port, "--sim-speed", "0.1", "--sim-startup", "1", *flags]
        super().__init__(name, command, pathlib.Path(folder) / f"{name}.log", {"VLLM_CACHE_ROOT": str(root / "cache"), **(env or {})})

    def healthy(self):
        self.ready(self.url + "/health", 30)
        return self


def ask(url, method, path, body, headers):
    headers = dict(headers)
    if body == b"" and method == "POST":
        headers.setdefault("content-type", "application/json")
    return call(url, method, path, body, headers, timeout=60)


def requests(tally, real, sim, lora):
    for name, method, path, body, headers in script(lora):
        tally.compared += 1
        a, b = (ask(url, method, path, body, headers) for url in (real, sim))
        if a.status >= 500 and a.status != b.status:
            raise Failed(f"the real server responds to {name} with {a.status}: {a.text()[:300]}")
        for part, x, y in compare.differences(compare.reduced(a, path), compare.reduced(b, path)):
            tally.differ(name, part, x, y)


def families(page):
    """Name -> type, labels and bucket bounds of a Prometheus page."""
    found = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            found[name] = {"type": kind, "labels": set(), "buckets": []}
    for line in page.splitlines():
        hit = re.match(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? \S+$", line)
        if not hit:
            continue
        name = hit[1]
        owner = next((name.removesuffix(end) for end in ("_bucket", "_count", "_sum") if name.removesuffix(end) in found), name)
        family = found.setdefault(owner if owner in found else name, {"type": "untyped", "labels": set(), "buckets": []})
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', hit[2] or ""))
        if "le" in labels and name.endswith("_bucket"):
            bound = labels.pop("le")
            if bound not in family["buckets"]:
                family["buckets"].append(bound)
        # The values of a label are compared only if they are known in advance.
        family["labels"].add(tuple(sorted((k, v if k in ("reason", "source", "finished_reason", "sleep_state", "engine", "model_name") else "") for k, v in labels.items())))
    return found


def metrics(tally, real, sim):
    a, b = families(get(real + "/metrics", 30)[1]), families(get(sim + "/metrics", 30)[1])
    for name in sorted(set(a) | set(b)):
        tally.same("metrics", name, a.get(name, {}).get("type"), b.get(name, {}).get("type"))
        if name in a and name in b:
            tally.same("metrics", f"buckets of {name}", a[name]["buckets"], b[name]["buckets"])
            if name == "vllm:cache_config_info":
                tally.same("metrics", f"labels of {name}", [[k for k, _ in row] for row in a[name]["labels"]], [[k for k, _ in row] for row in b[name]["labels"]])
            elif not name.startswith("http_"):
                tally.same("metrics", f"labels of {name}", sorted(a[name]["labels"]), sorted(b[name]["labels"]))


def children(pid):
    """The sorted names of all processes below `pid`, without Python's own helpers."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    below = collections.defaultdict(list)
    for line in table.splitlines():
        child, parent, args = line.split(None, 2)
        below[int(parent)].append((int(child), args))
    found, left = [], [pid]
    while left:
        for child, args in below[left.pop()]:
            left.append(child)
            found.append(args)
    return sorted(name for name in found if name.startswith("VLLM::"))


def kinds(log):
    """The lines of a log without numbers, paths and addresses, as process, level and text."""
    found = []
    for line in log.splitlines():
        hit = re.match(r"^\((\w+) pid=\d+\) (\w+) \d\d-\d\d \d\d:\d\d:\d\d \[([\w.]+):\d+\] ?(.*)$", line)
        if hit:
            found.append((hit[1], hit[2], hit[3], re.sub(r"pid \d+|[\d.]+", "#", hit[4])))
    return found


# Lines that show the progress of a start or a shutdown: the process that logs them, and the text at
# their beginning.
LANDMARKS = [
    ("APIServer", "non-default args: "), ("APIServer", "Using max model len #"), ("EngineCore", "Initializing a V1 LLM engine (v#) with config: model="),
    ("EngineCore", "init engine (profile, create kv cache, warmup model) took # s"), ("APIServer", "Supported tasks: ['generate']"),
    ("APIServer", "Loaded new LoRA adapter: name 'ad'"), ("APIServer", "Starting vLLM server on http://"), ("APIServer", "Available routes are:"),
    ("APIServer", "[shutdown] API server: shutdown triggered"), ("APIServer", "[shutdown] API server: stopping engine client mode=abort timeout=#s"),
    ("APIServer", "[shutdown] API server: engine client stopped"), ("APIServer", "[shutdown] API server: shutting down FastAPI HTTP server"),
]


def landmarks(log):
    lines = kinds(log)
    return [text for who, text in LANDMARKS if any(w == who and t.startswith(text) for w, _, _, t in lines)]


def process(tally, real, sim):
    """Child processes, a stream during SIGTERM, the exit status, the log."""
    names = [children(server.pid) for server in (real, sim)]
    for name in sorted(set(names[0]) | set(names[1])):
        tally.same("process", f"child {name}", names[0].count(name), names[1].count(name))
    ends, codes = [], []
    for server in (real, sim):
        stream = Call(server.url, "POST", TEXT, {**BASE, "prompt": "x", "max_tokens": 8000, "stream": True})
        pieces = stream.stream()
        next(pieces)
        server.child.send_signal(signal.SIGTERM)
        stream.socket.settimeout(SILENCE_SECONDS)
        try:
            for _ in pieces:
                pass
        except TimeoutError:
            pass
        tail = stream.answer.text().split("\n\n")[-3:]
        ends.append((stream.answer.whole, [compare.shape(json.loads(t[6:])) if t.startswith("data: {") else t for t in tail]))
        stream.close()
        codes.append(server.child.wait(30))
    tally.same("process", "end of a stream at SIGTERM", *ends)
    tally.same("process", "exit status after SIGTERM", *codes)
    tally.same("process", "landmarks of the log", landmarks(real.text()), landmarks(sim.text()))


# Command lines that only the parser sees. If the simulator's parser accepts one, the simulator then
# refuses its port, with another status.
ARGUMENTS = """
m --port http | m --port | m --what 3 | m --what=3 x --foo | m extra | m --max-num-s 4 | m --max-num 4 | m --max-num-seqs=0 | m --max-num-seqs 1k
m --max-num-seqs auto | m --max-num-seqs 1.5 | m --max-model-len auto | m --max-model-len -1 | m --max-model-len 1.5K | m --max-model-len 32k
m --max-model-len abc | m --gpu-memory-utilization x | m --dtype foo | m --kv-cache-dtype foo | m --load-format foo | m --scheduling-policy foo
m --performance-mode foo | m --enforce-eager=yes | m --enforce-eager yes | m --no-enforce-eager | m --no-enforce-eager=1 | m --disable-log-requests
m --swap-space 4 | m --num-scheduler-steps 4 | m --task embed | m --max_num_seqs 4 | m --lora-modules | m --lora-modules a | m --lora-modules a=b c=d
m --lora-modules {"name":"a","path":"b"} | m --lora-modules {"name":"a"} | m --max-lora-rank 7 | m --max-lora-rank 64 | m -O3 | m -O 3 | m -tp 2 | m -tp=2
m -tp2 | m --tensor-parallel-size x | m --api-key a b | m --api-key | m --stream-interval x | m --shutdown-timeout 1.5 | m --block-size x
m --uvicorn-log-level foo | m --sse-keep-alive-interval x | m --watermark x | m --chat-template-content-format foo | m --long-prefill-token-threshold x
m --max-num-queued-reqs x | m --max-num-queued-reqs 0 | m --served-model-name | m --served-model-name a b | m --model x | m --seed x
m --prefix-caching-hash-algo foo | m --prefix-caching-hash-algo sha256 | m --no-enable-prefix-caching | m -q fp8 | m --max-num-partial-prefills 2
m --device cuda | m --use-v2-block-manager | m --guided-decoding-backend x | m --cuda-graph-sizes 1 2 | m --cudagraph-capture-sizes 1 2
m --cudagraph-capture-sizes x | m --data-parallel-size x | m --trust-remote-code | m --max-logprobs x | m --runner foo | m --convert foo | m --host
m --pipeline-parallel-size x | m --dis | m --enable-l | m --enable-lor | m --no-port | m --quant fp8 | m --enable-lora false | m --speculative-model x
m --kv-cache-memory-bytes 10G | m --max-num-batched-tokens 8k | m --max-num-batched-tokens x | m --max-cpu-loras x | m --disable-log-stats
m --no-disable-log-stats | m --enable-log-requests | m --max-seq-len-to-capture 5 | m --preemption-mode swap | m --disable-frontend-multiprocessing
"""


def arguments(tally, root):
    table = [one.split() for line in ARGUMENTS.strip().splitlines() for one in line.split(" | ")]
    here = pathlib.Path(__file__).resolve().parent
    said = subprocess.run([root / "venv/bin/python", "-B", here / "arguments.py"], input=json.dumps(table), capture_output=True, text=True,
                          check=True, timeout=START_SECONDS, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    for argv, (code, words) in zip(table, json.loads(said.stdout.splitlines()[-1])):
        sim = subprocess.run([binary(), "sim", *argv, "--sim-startup=0", "--port=70000"], capture_output=True, text=True, timeout=30)
        name = f"arguments: {' '.join(argv)}"
        tally.same(name, "refused", code == 2, sim.returncode == 2)
        if code == 2 and sim.returncode == 2:
            # The port that makes accepted command lines fail is not a flag of the script.
            tally.same(name, "words", words, next((line for line in reversed(sim.stderr.splitlines()) if "error: " in line), ""))


def refusals(root, port):
    """Flags with which neither server starts: name, flags, environment, and flags for the simulator
    only."""
    tiny = [str(root / "tiny"), "--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager"]
    return [
        ("removed flags", [*tiny, "--swap-space", "4", "--disable-log-requests"], {}, []),
        ("batched < seqs", [*tiny, "--max-model-len", "8192", "--max-num-batched-tokens", "64", "--max-num-seqs", "128"], {}, []),
        ("longer than the model", [*tiny, "--max-model-len", "999999"], {}, []),
        ("utilisation", [*tiny, "--gpu-memory-utilization", "1.5"], {}, []),
        ("no such model", ["/nope/model"], {}, []),
        ("port in use", [*tiny, "--port", str(port)], {}, []),
        # Both have a cache of 1 GiB.
        ("longer than the cache", [*tiny, "--max-model-len", "4000000"], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, ["--kv-cache-memory-bytes", "1G"]),
    ]


# The pattern of a reason, which is searched from the end of the log.
REASON = re.compile(r"(\w[\w.]*(?:Error|Exception): .*|vllm(?: serve)?: error: .*|  (?:Value error, |Input should).*)")
NUMBERS = re.compile(r"\d+(?:\.\d+)?")
# All versions of Python refuse the same arguments; the rest of the message depends on the version.
CUT = re.compile(r" \[type=.*| See https?:.*| \(which also controls CPU memory on the CPU backend\)")


def last_words(text, numbers):
    found = [CUT.sub("", line) for line in REASON.findall(text) if "ulimit" not in line]
    # The error of the parent process says only that the engine failed, so it is left out.
    causes = [line for line in found if "initialization failed" not in line] or found
    words = causes[-1] if causes else ""
    return words if numbers else NUMBERS.sub("#", words)


def starts(tally, root, folder):
    port = free_port()
    holder = subprocess.Popen([sys.executable, "-c", f"import socket,time\ns=socket.socket()\ns.setsockopt(1,2,1)\ns.bind(('0.0.0.0',{port}))\ns.listen()\ntime.sleep(900)"])
    try:
        for name, flags, env, own in refusals(root, port):
            texts, codes = [], []
            for who, command in (("real", [root / "venv/bin/vllm", "serve"]), ("sim", [binary(), "sim"])):
                env_of = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(root / "cache"), **env}
                one = Process(f"start-{who}", [*command, *flags, *(own if who == "sim" else [])], pathlib.Path(folder) / f"start-{who}.log", env_of)
                try:
                    until(f"{who} ends with {name}", lambda: not one.alive(), START_SECONDS)
                finally:
                    one.kill()
                texts.append(last_words(one.text(), numbers=name != "longer than the cache"))
                codes.append(one.child.returncode)
            tally.same(f"start: {name}", "exit status", *codes)
            tally.same(f"start: {name}", "reason", *texts)
    finally:
        holder.kill()
        holder.wait()


def run(root, parts):
    tally, folder = Tally(), root / "conformance"
    folder.mkdir(exist_ok=True)
    wanted = lambda part: not parts or part in parts
    lora = str(root / "lora")
    flags = [*FLAGS, "--lora-modules", f"ad={lora}"]
    if wanted("requests") or wanted("metrics") or wanted("process"):
        real = Vllm("real", root, folder, LENGTH, *flags, env=ENV)
        sim = Sim(root, folder, "--max-model-len", LENGTH, *flags, env=ENV)
        try:
            real.healthy()
            sim.healthy()
            if wanted("requests"):
                requests(tally, real.url, sim.url, lora)
            if wanted("metrics"):
                metrics(tally, real.url, sim.url)
            if wanted("process"):
                process(tally, real, sim)
        finally:
            real.terminate()
            sim.terminate()
    if wanted("arguments"):
        arguments(tally, root)
    if wanted("starts"):
        starts(tally, root, folder)
    return tally


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    rest = sys.argv[2:]
    began = time.monotonic()
    if rest[:1] == ["--against"]:
        tally = Tally()
        requests(tally, rest[1], rest[2], str(root / "lora"))
        metrics(tally, rest[1], rest[2])
    else:
        tally = run(root, rest)
        if not rest:
            for at in set(range(len(ACCEPTED))) - tally.used:
                if "races" in ACCEPTED[at][2]:
                    continue
                tally.different += 1
                print(f"- accepted but never seen: {ACCEPTED[at]}")
    print(f"{tally.compared} compared, {tally.accepted} accepted, {tally.different} different ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if tally.different else 0)


if __name__ == "__main__":
    main()
