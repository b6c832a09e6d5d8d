"""The gateway runs two real vLLM servers: restarts under load, crashes, and a gateway that is
killed.

Usage: fleet.py ROOT      (ROOT from ./setup; `./fleet` does both steps)

Steps, in this order, on the same two engines:

1. both start, with an adapter that the gateway loads;
2. under a steady load of streams, on the base model and on the adapter, with some long prompts,
   each engine is restarted in turn with `sluice backend restart NAME --set max-num-seqs=32 --wait`.
   No request may fail, be cut or be refused, and both engines must run with the new value;
3. invalid changes are refused before any engine is stopped;
4. the API server of one engine gets SIGKILL. Its EngineCore and workers end soon, and the engine
   comes back with its adapter. Another process whose command line contains "vllm serve" survives;
5. the gateway gets SIGKILL. The next gateway finds both engines and starts no others next to them;
6. the gateway stops, and no process is left.

The last line is `N passed, N failed`; the exit status is 1 when a step failed. Logs stay in
ROOT/fleet/.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback

from engine import START_SECONDS, Failed, Process, check, environment, free_port, get, until
from gateway import binary
from wire import post

CHAT = "/v1/chat/completions"
CLIENTS = 4
# Pause of a client between two requests, because starting engines need a share of the machine's two
# cores.
PAUSE_SECONDS = 0.2
# Time limit of a change. An engine starts next to an engine under load, on two shared cores.
CHANGE_SECONDS = 900
SEQS = 32
# Time from SIGKILL of the API server until no process of that engine is left.
GONE_SECONDS = 25
NAMES = ("b0", "b1")


class Fleet:
    """A gateway that runs two engines, and their state as seen from outside."""

    def __init__(self, root):
        self.root, self.folder = root, root / "fleet"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.client, self.admin = free_port(), free_port()
        self.url, self.admin_url = f"http://127.0.0.1:{self.client}", f"http://127.0.0.1:{self.admin}"
        self.ports = [free_port() for _ in NAMES]
        self.file = self.folder / "sluice.toml"
        self.file.write_text(self.text())
        self.gate = None

    def text(self):
        env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in {**environment(self.root), "FLEET_TEST": str(self.folder)}.items())
        command = json.dumps([str(self.root / "venv/bin/vllm"), "serve", str(self.root / "tiny")])
        args = ('served-model-name = "tiny", load-format = "dummy", enforce-eager = true, seed = 0, max-model-len = 8192, '
                'max-num-seqs = 64, enable-lora = true, max-loras = 2, max-lora-rank = 8')
        lines = [
            "[server]", f'listen = "127.0.0.1:{self.client}"', f'admin = "127.0.0.1:{self.admin}"', 'drain_timeout = "30s"',
            "[health]", 'probe_interval = "500ms"', 'probe_timeout = "10s"',
            "[fleet]", 'ramp = "2s"', 'backoff = "500ms"', "warm_up = 3", 'drain = "2m"', "start_timeout_scale = 4",
            "[[model]]", 'name = "tiny"', 'golden = ["The quick brown fox jumps over the lazy dog."]',
            "[[model]]", 'name = "ad"', f"adapter = {json.dumps(str(self.root / 'lora'))}",
            "[[pool]]", 'name = "p"', 'models = ["tiny", "ad"]', 'queue = { length = 512, timeout = "120s" }',
        ]
        for name, port in zip(NAMES, self.ports):
            lines += ["[[pool.backend]]", f'name = "{name}"', "[pool.backend.launch]", f"command = {command}",
                      f"port = {port}", f"env = {{ {env} }}", f"args = {{ {args} }}"]
        return "\n".join(lines) + "\n"

    def run(self, name):
        self.gate = Process(name, [binary(), "serve", "--config", self.file], self.folder / f"{name}.log")
        self.gate.ready(self.admin_url + "/health", 60)

    def sluice(self, *arguments, seconds=CHANGE_SECONDS):
        """Runs a subcommand; returns exit status and output."""
        done = subprocess.run([binary(), "backend", "--admin", self.admin_url, *arguments], capture_output=True, text=True,
                              timeout=seconds, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    def backends(self):
        pools = json.loads(get(self.admin_url + "/admin/status", 10)[1])["pools"]
        return {b["name"]: b for b in pools[0]["backends"]}

    def serving(self, seconds=CHANGE_SECONDS):
        """Waits until both engines serve."""

        def both():
            held = [b for b in self.backends().values() if b["engine"]["step"] == "hold"]
            check(not held, f"held: {held}")
            return all(b["engine"]["step"] == "serve" and b["state"] == "ready" for b in self.backends().values())

        until("both engines serve", both, seconds, 0.2)

    def processes(self):
        """pid -> command line of every process of the test's engines, found by their environment.
        """
        mark, found = f"FLEET_TEST={self.folder}".encode(), {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                except OSError:
                    pass
        return found

    def leaders(self):
        """Process ids of the engines' leaders, by name, from the journal."""
        last = {}
        for line in (self.folder / ".sluice/journal.jsonl").read_text().splitlines():
            record = json.loads(line)
            last[record["backend"].split("/")[1]] = record.get("trace", {}).get("pid")
        return last

    def stop(self):
        if self.gate and self.gate.alive():
            self.gate.terminate(60)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


class Load:
    """Clients that never pause and read every stream to its end."""

    def __init__(self, url):
        self.url, self.over = url, threading.Event()
        self.done, self.failures = [0] * CLIENTS, []
        self.threads = [threading.Thread(target=self.client, args=(i,)) for i in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, which):
        number = which
        while not self.over.is_set():
            words = 600 if number % 7 == 0 else 10
            body = {"model": "ad" if number % 3 == 0 else "tiny", "stream": True, "max_tokens": 16 + number * 13 % 100,
                    "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": "fox " * words}]}
            try:
                answer = post(self.url, CHAT, body)
                if answer.status != 200 or not answer.whole or b'"finish_reason":"length"' not in answer.body or b"data: [DONE]" not in answer.body:
                    self.failures.append((answer.status, answer.body[-300:]))
                else:
                    self.done[which] += 1
            except Exception as error:  # any failure of a client counts
                self.failures.append((0, repr(error)))
            number += CLIENTS
            self.over.wait(PAUSE_SECONDS)

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        return sum(self.done), self.failures


def both_start_with_their_adapter(fleet):
    fleet.run("gate")
    fleet.serving()
    for port in fleet.ports:
        names = {card["id"] for card in json.loads(get(f"http://127.0.0.1:{port}/v1/models")[1])["data"]}
        check(names == {"tiny", "ad"}, f"port {port} serves {names}")


def restarts_in_turn_under_load_lose_nothing(fleet):
    before = fleet.leaders()
    load = Load(fleet.url)
    until("requests come through", lambda: sum(load.done) > 3 * CLIENTS, 60)
    for name in NAMES:
        began = time.monotonic()
        status, said = fleet.sluice("restart", name, "--set", f"max-num-seqs={SEQS}", "--wait")
        print(f"  {name}: {said.splitlines()[0]} ({time.monotonic() - began:.0f} s)")
        check(status == 0, f"restart of {name} ended with {status}: {said}\n{fleet.gate.tail()}")
    more = sum(load.done) + 3 * CLIENTS
    until("requests come through afterwards", lambda: sum(load.done) > more, 60)
    done, failures = load.end()
    print(f"  {done} streams, {len(failures)} failed, cut or refused")
    check(not failures, f"{len(failures)} of {done} requests failed: {failures[:5]}\n{fleet.gate.tail()}")
    after = fleet.leaders()
    for name in NAMES:
        check(before[name] != after[name], f"{name} is the same process")
        log = (fleet.folder / f".sluice/p.{name}.log").read_text(errors="replace")
        args = re.search(r"non-default args: (.*)", log)
        check(args and f"'max_num_seqs': {SEQS}" in args[1], f"{name} runs with {args and args[1]}")
        limit = fleet.backends()[name]["slots"]["limit"]
        check(limit == SEQS, f"{name} has {limit} slots in the gateway")
    for port in fleet.ports:
        names = {card["id"] for card in json.loads(get(f"http://127.0.0.1:{port}/v1/models")[1])["data"]}
        check("ad" in names, f"port {port} lost its adapter: {names}")


def invalid_changes_are_refused_before_any_engine_stops(fleet):
    before = fleet.leaders()
    for change, word in (("max-num-sqes=32", "max-num-s"), ("max-num-seqs=many", "max-num-seqs"), ("max-num-batched-tokens=4", "max")):
        status, said = fleet.sluice("restart", "b0", "--set", change)
        print(f"  {change}: {said.strip()}")
        check(status == 1 and word in said, f"{change}: {status} {said}")
    status, said = fleet.sluice("restart", "b7")
    check(status == 1 and "p/b0, p/b1" in said, f"{status} {said}")
    check(before == fleet.leaders() and len(fleet.processes()) >= 4, "something was touched")


def an_engine_that_lost_its_api_server_is_replaced_whole(fleet):
    # The gateway did not start this process, but a kill by name would hit it.
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # vllm serve"])
    try:
        leader = fleet.leaders()["b0"]
        family = {leader} | {pid for pid in fleet.processes() if os.getsid(pid) == os.getsid(leader)}
        check(len(family) >= 2, f"an engine has more than one process: {fleet.processes()}")
        os.kill(leader, signal.SIGKILL)
        began = time.monotonic()
        until("all of the engine is gone", lambda: not family & set(fleet.processes()), GONE_SECONDS)
        print(f"  {len(family)} processes gone after {time.monotonic() - began:.1f} s")
        fleet.serving()
        check(fleet.leaders()["b0"] != leader, "the same leader")
        check(fleet.backends()["b0"]["engine"]["restarts"] == 1, f"{fleet.backends()['b0']['engine']}")
        check(fleet.backends()["b0"]["engine"]["settings"].count(f"max-num-seqs={64}"), "unsettled flags survived a crash")
        check(other.poll() is None, "another process was killed")
    finally:
        other.kill()
        other.wait()


def a_gateway_that_was_killed_finds_its_engines(fleet):
    before = fleet.processes()
    os.kill(fleet.gate.pid, signal.SIGKILL)
    fleet.gate.child.wait()
    fleet.run("gate-again")
    fleet.serving(60)
    check(set(fleet.processes()) == set(before), f"{before} became {fleet.processes()}")
    answer = post(fleet.url, CHAT, {"model": "ad", "max_tokens": 4, "messages": [{"role": "user", "content": "fox"}]})
    check(answer.status == 200, f"{answer.status} {answer.body}")


def nothing_is_left_when_it_stops(fleet):
    check(fleet.gate.terminate(60) == 0, f"an orderly end: {fleet.gate.tail()}")
    until("no process is left", lambda: not fleet.processes(), 5)


STEPS = (
    both_start_with_their_adapter,
    restarts_in_turn_under_load_lose_nothing,
    invalid_changes_are_refused_before_any_engine_stops,
    an_engine_that_lost_its_api_server_is_replaced_whole,
    a_gateway_that_was_killed_finds_its_engines,
    nothing_is_left_when_it_stops,
)


def main():
    fleet, passed = Fleet(pathlib.Path(sys.argv[1])), 0
    try:
        for step in STEPS:
            began = time.monotonic()
            try:
                step(fleet)
            except (AssertionError, Failed, OSError, KeyError, subprocess.SubprocessError):
                print(f"FAIL {step.__name__}\n{traceback.format_exc()}\n{fleet.gate and fleet.gate.tail(40)}", flush=True)
                break  # the steps build on each other
            passed += 1
            print(f"ok   {step.__name__} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        fleet.stop()
    failed = len(STEPS) - passed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
