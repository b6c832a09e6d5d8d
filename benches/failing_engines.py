#!/usr/bin/env python3
"""Streams whose engines fail again and again: how many answers are whole, and how long streams
pause.

    cargo build --release && benches/failing_engines.py [--fault kill] [--streams 10000]

A gateway in front of four simulated engines serves 200 chats at a time, of 200 tokens each. Every
five seconds one engine fails: `kill` (SIGKILL, then a new start), `hang` (stopped for four seconds)
or `error` (the engine core dies, so streams end with an error event, and the engine starts again).
An answer is whole if it has one id, one role, every token, a finish reason and the usage of the
whole answer. Prints one line of JSON, which also says why answers are not whole. `SLUICE_BIN` names
another binary.
"""

import argparse
import asyncio
import collections
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = os.environ.get("SLUICE_BIN", str(ROOT / "target" / "release" / "sluice"))
ENGINES, AT_ONCE, TOKENS, EVERY_S, HANG_S, START_S = 4, 200, 200, 5, 4, 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fetch(port, path, body=None):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body, timeout=10) as response:
        return response.read().decode()


def until(port, path):
    deadline = time.monotonic() + START_S
    while True:
        try:
            return fetch(port, path)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Engine:
    """One simulated engine."""

    def __init__(self, folder):
        self.port, self.log = free_port(), open(folder / "engines.log", "ab")
        self.start()

    def start(self):
        self.child = subprocess.Popen([BINARY, "sim", "llama-3.1-8b", "--served-model-name", "m", "--port", str(self.port),
                                       "--sim-startup", "0"], stdout=self.log, stderr=self.log)

    def fail(self, fault):
        """Lets the engine fail, and return to service after a while."""
        if fault == "hang":
            self.child.send_signal(signal.SIGSTOP)
            time.sleep(HANG_S)
            self.child.send_signal(signal.SIGCONT)
            return
        if fault == "error":
            fetch(self.port, "/sim/fault", b"die")
            self.child.wait(timeout=START_S)
        else:
            self.child.kill()
            self.child.wait()
        self.start()


async def ask(port, number, results):
    body = json.dumps({"model": "m", "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
                       "stream_options": {"include_usage": True},
                       "messages": [{"role": "user", "content": f"question {number}"}]}).encode()
    # HTTP/1.0, so that the body is not cut into chunks.
    head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    ids, roles, texts, finishes, usage, fault, last, gap = set(), 0, 0, 0, None, None, None, 0.0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line[6:])
        except ValueError:
            fault = "broken event"
            break
        if "error" in event:
            fault = "error event"
            break
        ids.add(event["id"])
        for choice in event["choices"]:
            roles += "role" in choice["delta"]
            texts += bool(choice["delta"].get("content"))
            finishes += choice["finish_reason"] is not None
            now = time.monotonic()
            gap, last = max(gap, now - (last or now)), now
        usage = event.get("usage") or usage
    else:
        fault = "no end"
    writer.close()
    tokens = (usage or {}).get("completion_tokens")
    if fault is None and (len(ids), roles, finishes, tokens) != (1, 1, 1, TOKENS):
        fault = f"{len(ids)} ids, {roles} roles, {finishes} finish reasons, {tokens} tokens"
    results.append((fault, texts, gap))


async def load(port, streams, results):
    numbers = iter(range(streams))

    async def client():
        for number in numbers:
            await ask(port, number, results)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def run(args, folder):
    engines = [Engine(folder) for _ in range(ENGINES)]
    port, admin = free_port(), free_port()
    log = folder / "access.log"
    config = folder / "sluice.toml"
    backends = "".join(f'[[pool.backend]]\nname = "gpu{index}"\nurl = "http://127.0.0.1:{engine.port}"\n'
                       for index, engine in enumerate(engines))
    config.write_text(f'[server]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{admin}"\n'
                      f'[timeouts]\nidle = "2s"\n[access_log]\npath = "{log}"\n'
                      f'[[pool]]\nname = "all"\nmodels = ["*"]\nusage = "continuous"\n{backends}')
    for engine in engines:
        until(engine.port, "/health")
    gateway = subprocess.Popen([BINARY, "serve", str(config)], stdout=open(folder / "gateway.log", "wb"), stderr=subprocess.STDOUT)
    try:
        until(port, "/ready")
        results, begun, faults = [], time.monotonic(), 0
        running = asyncio.create_task(load(port, args.streams, results))
        while not running.done():
            await asyncio.wait([running], timeout=EVERY_S)
            if not running.done():
                await asyncio.to_thread(engines[faults % ENGINES].fail, args.fault)
                faults += 1
        await running
        seconds = time.monotonic() - begun
        await asyncio.sleep(1)
        page = fetch(admin, "/metrics")
        left = sum(float(value) for value in re.findall(r"^sluice_(?:in_flight|outstanding_tokens)\{.*\} (.+)$", page, re.M))
        memory = float(re.search(r"^process_resident_memory_bytes (.+)$", page, re.M)[1])
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        report = {
            "fault": args.fault, "faults": faults, "streams": len(results), "seconds": round(seconds),
            "whole": sum(fault is None for fault, *_ in results),
            "not whole": collections.Counter(fault for fault, *_ in results if fault),
            "continued": sum(line.get("continued", 0) for line in lines),
            "not continued": collections.Counter(line["not_continued"] for line in lines if line.get("not_continued")),
            "outcomes": collections.Counter(line["outcome"] for line in lines),
            "longest pause s": round(max(gap for *_, gap in results), 1),
            "held at the end": left, "gateway MiB": round(memory / 2**20),
        }
        print(json.dumps(report))
    finally:
        gateway.terminate()
        gateway.wait()
        for engine in engines:
            engine.child.kill()
            engine.child.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("kill", "hang", "error"), default="kill")
    parser.add_argument("--streams", type=int, default=10_000)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
