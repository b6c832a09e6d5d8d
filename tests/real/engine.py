"""Starts and stops processes for the real-engine suite, such as vLLM servers and the gateway.

A process gets a separate session, so that its process group has the whole tree of the process and
nothing else, and can be ended as a whole. Every wait is for a condition and has a deadline. Logs
stay on disk for the post-mortem. Standard library only, so that it also runs before the environment
exists.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import traceback
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
# A cold start imports torch in three processes, which took up to 50 s on 2 shared cores.
START_SECONDS = 240
STOP_SECONDS = 20
# Whether the engines have vLLM's frontend in Rust. It lowers a number of tokens that is too high
# for the context, and its log has other texts.
RUST = os.environ.get("VLLM_USE_RUST_FRONTEND") == "1"


class Failed(Exception):
    """A condition did not come true before its deadline, or a process ended early."""


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def play(steps):
    """Runs steps, each a name and a function, and prints the result or the trace of each. Returns
    the exit status of the script after the line `N passed, N failed`."""
    passed, failed = 0, 0
    for name, step in steps:
        began = time.monotonic()
        try:
            said = step()
            print(f"ok    {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
            passed += 1
        except (AssertionError, Failed):
            failed += 1
            traceback.print_exc()
            print(f"FAIL  {name}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def until(what, condition, seconds, every=0.02):
    """Polls `condition` until the deadline. Returns the first true value, or raises an error with
    `what`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"after {seconds} s still not: {what}")
        time.sleep(every)


def free_port():
    """A port on which no process listens. It is released again, so use it soon."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url, timeout=5):
    """(status, text) of a GET; status 0 without a response."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


class Process:
    """One command in its own session, with its output in a file."""

    def __init__(self, name, command, log, env=None):
        self.name, self.log = name, pathlib.Path(log)
        with open(self.log, "wb") as out:
            self.child = subprocess.Popen(
                [str(c) for c in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pid = self.child.pid

    def alive(self):
        return self.child.poll() is None

    def text(self):
        return self.log.read_text(errors="replace")

    def tail(self, lines=25):
        return "\n".join(self.text().splitlines()[-lines:])

    def ready(self, url, seconds):
        """Waits until `url` returns 200; fails at once when the process ends."""

        def answered():
            if not self.alive():
                raise Failed(f"{self.name} ended with {self.child.returncode} before {url} responded:\n{self.tail()}")
            return get(url, 2)[0] == 200

        until(f"{self.name} responds on {url} (log: {self.log})", answered, seconds, 0.1)

    def terminate(self, seconds=STOP_SECONDS):
        """Sends SIGTERM to the leader, then kills the rest of the group. Returns the exit status,
        or None."""
        status = None
        if self.alive():
            self.child.terminate()
            try:
                status = self.child.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        return status

    def kill(self):
        """Sends SIGKILL to the whole group. The group id is the pid of our own child, so it cannot
        belong to another process."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self.child.poll() is None:
            self.child.wait(STOP_SECONDS)


def environment(root):
    """The environment variables of a real engine on a CPU that it shares with others."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(root / "cache"),
        "PYTHONUNBUFFERED": "1",
        # Three processes import torch at each start. Cached bytecode saves about 20 s of this time.
        "PYTHONDONTWRITEBYTECODE": "",
        # By default every engine pins its threads to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The threads of one engine wait for each other at every operation. With two engines on two
        # cores, a step then takes up to forty times as long as on one engine.
        "OMP_NUM_THREADS": "1",
    }


class Vllm(Process):
    """A real `vllm serve` on the CPU with the tiny model."""

    def __init__(self, name, root, folder, max_model_len, *flags, env=None, port=None, model=None):
        root = pathlib.Path(root)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [root / "venv/bin/vllm", "serve", model or root / "tiny", "--served-model-name", "tiny"]
        command += ["--load-format", "dummy", "--enforce-eager", "--seed", "0", "--host", "127.0.0.1"]
        command += ["--port", self.port, "--max-model-len", max_model_len, *flags]
        super().__init__(name, command, pathlib.Path(folder) / f"{name}.log", {**environment(root), **(env or {})})

    def healthy(self, seconds=START_SECONDS):
        self.ready(self.url + "/health", seconds)
        return self

    def metric(self, name, **labels):
        """Sum of the samples of `name` whose labels include `labels`; 0 when there is no sample
        yet."""
        status, text = get(self.url + "/metrics", 30)
        if status != 200:
            raise Failed(f"{self.name} shows no metrics ({status} {text[:200]}); log: {self.log}")
        return total(text, name, **labels)

    def running(self):
        """The number of requests in the engine, running or waiting."""
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")


SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text):
    """(name, labels, value) of every sample line of a Prometheus page."""
    for line in text.splitlines():
        hit = SAMPLE.match(line)
        if hit:
            yield hit[1], dict(LABEL.findall(hit[2] or "")), float(hit[3])


def total(text, name, **labels):
    return sum(v for n, ls, v in samples(text) if n == name and labels.items() <= ls.items())
