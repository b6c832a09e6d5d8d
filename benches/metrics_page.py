#!/usr/bin/env python3
"""The cost of the metrics page with 200 backends and 50 models:
`cargo build --release && benches/metrics_page.py`.

A gateway with 50 pools of 4 backends, one pair of pools for short and long prompts per two models,
in front of one simulated engine at 200 loopback addresses (Linux). Requests of every model come
first, so that all series exist. Prints the size of the page, the time of a scrape and the gateway's
CPU time for it. SLUICE_BIN names another binary.
"""
import concurrent.futures
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
PAIRS, BACKENDS, MODELS = 25, 4, 2
PROMPTS = (50, 3000, 3000)  # words; the long ones need a permit, so some spill
SCRAPES = 100
DEADLINE = 60.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def configuration(client, admin, engine):
    text = f'[server]\nlisten = "127.0.0.1:{client}"\nadmin = "127.0.0.1:{admin}"\n[slo]\nttft = "1s"\n'
    for model in range(PAIRS * MODELS):
        text += f'[[model]]\nname = "m{model}"\n'
    host = 0
    for pair in range(PAIRS):
        models = json.dumps([f"m{MODELS * pair + index}" for index in range(MODELS)])
        for kind, bound in (("short", "max"), ("long", "min")):
            text += f'[[pool]]\nname = "{kind}-{pair}"\nmodels = {models}\nprompt_tokens = {{ {bound} = "2k" }}\n'
            text += 'long_prefix = { threshold = "2k", slots = 1 }\n'
            text += f'spill = ["short-{pair}"]\n' if kind == "long" else ""
            for index in range(BACKENDS):
                host += 1
                text += f'[[pool.backend]]\nname = "{kind}-{pair}-gpu{index}"\nurl = "http://127.0.0.{host}:{engine}"\n'
    return text


def fetch(url, body=None):
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        return response.read().decode()


def wait_for_backends(url):
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            if len(re.findall(r'state="ready"} 1', fetch(url))) == 2 * PAIRS * BACKENDS:
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


def main():
    client, admin, engine = free_port(), free_port(), free_port()
    models = [f"m{index}" for index in range(PAIRS * MODELS)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(configuration(client, admin, engine))
        file.flush()
        sim = [BINARY, "sim", "m0", "--host", "0.0.0.0", "--port", str(engine), "--served-model-name", *models]
        processes = [subprocess.Popen(sim, **quiet), subprocess.Popen([BINARY, "serve", "--config", file.name], **quiet)]
        try:
            url = f"http://127.0.0.1:{admin}/metrics"
            wait_for_backends(url)

            def ask(what):
                model, words = what
                body = {"model": model, "prompt": "word " * words, "max_tokens": 8, "stream": True}
                fetch(f"http://127.0.0.1:{client}/v1/completions", json.dumps(body).encode())

            with concurrent.futures.ThreadPoolExecutor(6) as clients:
                list(clients.map(ask, [(model, words) for model in models for words in PROMPTS]))
            measure(processes[1], url)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


if __name__ == "__main__":
    main()
