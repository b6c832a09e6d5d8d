#!/usr/bin/env python3
"""The cost of the metrics page with 200 backends, 50 models, 8 classes and 100 keys:
`cargo build --release && benches/metrics_page.py`.

Two gateways are in front of one simulated engine at 200 loopback addresses (Linux). One gateway has
50 pools: for every two models, a pool for short prompts and a pool for long ones. The other gateway
has 2 pools, which serve all models. First come requests of every model, class and key, so that all
series exist. Prints the size of the page, the time of a scrape and the gateway's CPU time for it.
SLUICE_BIN names another binary.
"""
import concurrent.futures
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

BINARY = os.environ.get("SLUICE_BIN", "target/release/sluice")
SHAPES = ((25, 4, 2), (1, 100, 50))  # pairs of pools, backends of a pool, models of a pair
CLASSES, KEYS = 8, 100
CLASS_TOKENS = 500
WORDS = [50 + CLASS_TOKENS * index for index in range(CLASSES)]  # of prompts; a word is about a token
SCRAPES = 100
DEADLINE = 60.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def configuration(shape, client, admin, engine):
    pairs, backends, models_of_a_pair = shape
    text = f'[server]\nlisten = "127.0.0.1:{client}"\nadmin = "127.0.0.1:{admin}"\n[slo]\nttft = "1s"\n'
    for model in range(pairs * models_of_a_pair):
        text += f'[[model]]\nname = "m{model}"\n'
    for index in reversed(range(CLASSES)):
        text += f'[[class]]\nname = "class-{index}"\nprompt_tokens = {{ min = {CLASS_TOKENS * index} }}\n'
    for index in range(KEYS):
        digest = hashlib.sha256(f"key-{index}".encode()).hexdigest()
        text += f'[[auth.keys]]\nname = "key-{index}"\nsha256 = "{digest}"\nlimit = {{ in_flight = 64, tokens_per_minute = "9M" }}\n'
    host = 0
    for pair in range(pairs):
        models = json.dumps([f"m{models_of_a_pair * pair + index}" for index in range(models_of_a_pair)])
        for kind, bound in (("short", "max"), ("long", "min")):
            text += f'[[pool]]\nname = "{kind}-{pair}"\nmodels = {models}\nprompt_tokens = {{ {bound} = "2k" }}\n'
            text += 'long_prefix = { threshold = "2k", slots = 1 }\n'
            text += f'spill = ["short-{pair}"]\n' if kind == "long" else ""
            for index in range(backends):
                host += 1
                text += f'[[pool.backend]]\nname = "{kind}-{pair}-gpu{index}"\nurl = "http://127.0.0.{host}:{engine}"\n'
    return text


def fetch(url, body=None, key=""):
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, body, headers if key else {})
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        return response.read().decode()


def wait_for_backends(url, count):
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            if len(re.findall(r'state="ready"} 1', fetch(url))) == count:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the backends are not ready within {DEADLINE:.0f} s")


def cpu_seconds(process):
    with open(f"/proc/{process.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(gateway, url):
    begun, before = time.monotonic(), cpu_seconds(gateway)
    time.sleep(3)
    idle = (cpu_seconds(gateway) - before) / (time.monotonic() - begun)
    times, begun, before = [], time.monotonic(), cpu_seconds(gateway)
    for _ in range(SCRAPES):
        start = time.perf_counter()
        page = fetch(url)
        times.append(time.perf_counter() - start)
    cpu = (cpu_seconds(gateway) - before - idle * (time.monotonic() - begun)) / SCRAPES
    series = sum(not line.startswith("#") for line in page.splitlines())
    print(f"{series} series, {len(page)} bytes; scrape: median {statistics.median(times) * 1e3:.1f} ms, "
          f"longest of {SCRAPES} {max(times) * 1e3:.1f} ms; CPU {cpu * 1e3:.1f} ms")


def run(shape):
    client, admin, engine = free_port(), free_port(), free_port()
    pairs, backends, models_of_a_pair = shape
    models = [f"m{index}" for index in range(pairs * models_of_a_pair)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(configuration(shape, client, admin, engine))
        file.flush()
        sim = [BINARY, "sim", "m0", "--host", "0.0.0.0", "--port", str(engine), "--served-model-name", *models]
        processes = [subprocess.Popen(sim, **quiet), subprocess.Popen([BINARY, "serve", "--config", file.name], **quiet)]
        try:
            url = f"http://127.0.0.1:{admin}/metrics"
            wait_for_backends(url, 2 * pairs * backends)

            def ask(what):
                number, (model, words) = what
                body = {"model": model, "prompt": "word " * words, "max_tokens": 8, "stream": True}
                fetch(f"http://127.0.0.1:{client}/v1/completions", json.dumps(body).encode(), f"key-{number % KEYS}")

            with concurrent.futures.ThreadPoolExecutor(6) as clients:
                list(clients.map(ask, enumerate((model, words) for model in models for words in WORDS)))
            print(f"{2 * pairs} pools: ", end="")
            measure(processes[1], url)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


if __name__ == "__main__":
    for each in SHAPES:
        run(each)
