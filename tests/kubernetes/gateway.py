"""The gateway under test, and clients that always have a stream open."""

import http.client
import json
import os
import pathlib
import random
import signal
import subprocess
import threading
import time

from cluster import Failed, Process, free_port, until

CLIENTS = 8


def binary():
    path = pathlib.Path(os.environ.get("SLUICE_BIN") or pathlib.Path(__file__).parents[2] / "target/release/sluice").resolve()
    if not path.exists():
        raise Failed(f"{path} is missing: cargo build --release --features kubernetes, or set SLUICE_BIN")
    return path


def ask(host, port, method, path, body=None):
    """Sends a request; returns status and text of the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Gateway:
    """`extra` has further lines of the pool and then further tables. `state` is a folder that
    several gateways share."""

    def __init__(self, folder, name, kubeconfig, pods, extra="", state=None):
        self.name, self.client, self.admin, self.file = name, free_port(), free_port(), folder / f"{name}.toml"
        self.file.write_text("\n".join([
            "[server]", f'listen = "127.0.0.1:{self.client}"', f'admin = "127.0.0.1:{self.admin}"', 'drain_timeout = "20s"',
            "[health]", 'probe_interval = "300ms"',
            "[fleet]", f'state = "{folder}/{state or name}.state"', 'ramp = "1s"', "warm_up = 2", 'backoff = "500ms"', 'settle = "1s"',
            "[[pool]]", 'name = "p"', 'queue = { timeout = "60s" }', f"kubernetes = {{ {pods} }}", extra]) + "\n")
        self.process = Process(name, [binary(), "serve", "--config", self.file], folder / f"{name}.log",
                               {**os.environ, "KUBECONFIG": str(kubeconfig)})
        until("the gateway answers", self.answers)

    def answers(self):
        try:
            return self.ask("GET", "/admin/status")[0] == 200
        except OSError:
            return False

    def ask(self, method, path, port=None, body=None):
        return ask("127.0.0.1", port or self.admin, method, path, body)

    def status(self):
        return json.loads(self.ask("GET", "/admin/status")[1])

    def pods(self):
        """The pods of the pool by name, and the reason if the cluster cannot be used."""
        kubernetes = self.status().get("kubernetes", [{}])[0]
        return {pod["name"]: pod for pod in kubernetes.get("pods", [])}, kubernetes.get("trouble")

    def states(self):
        return {name: pod["state"] for name, pod in self.pods()[0].items()}

    def backends(self):
        return {backend["name"]: backend for backend in self.status()["pools"][0]["backends"]}

    def sluice(self, *words, seconds=120):
        done = subprocess.run([binary(), words[0], "--admin", f"http://127.0.0.1:{self.admin}", *words[1:]], capture_output=True, text=True,
                              timeout=seconds, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    def is_ready(self):
        """Whether `/ready` answers with 200, as a load balancer checks."""
        try:
            return self.ask("GET", "/ready", self.client)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def cluster(self):
        """The status of the share and of the election; empty if the gateway does not answer."""
        try:
            return self.status().get("cluster") or {}
        except (OSError, http.client.HTTPException):
            return {}

    def leads(self):
        return (self.cluster().get("leader") or {}).get("leads", False)

    def log(self):
        return self.process.log_path.read_text(errors="replace")

    def stop(self, how=signal.SIGTERM):
        self.process.stop(how)


def stream(port, tokens=48):
    """Sends one streamed request. Returns the backend, the fault of the answer, and whether any
    part of it came."""
    backend = answer = None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    try:
        body = json.dumps({"model": "m", "prompt": "one two three", "max_tokens": tokens, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        backend = answer.getheader("x-sluice-backend")
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return backend, repr(error), answer is not None
    finally:
        connection.close()
    if answer.status != 200:
        return backend, f"{answer.status} {text[:200]}", answer.status != 503
    whole = text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text.replace(": ", ":").replace(" ", "")
    return backend, None if whole else f"cut: {text[-200:]}", True


class Load:
    """Clients that stream, one request after the other. Every answer that is not a whole stream is
    lost."""

    def __init__(self, gateway, clients=CLIENTS, tokens=48):
        self.gateway, self.tokens, self.ended, self.lost, self.streams, self.where = gateway, tokens, False, [], 0, {}
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self):
        while not self.ended:
            backend, problem, _ = stream(self.gateway.client, self.tokens)
            self.count(backend, problem and f"{backend}: {problem}")

    def count(self, backend, problem=None):
        with self.lock:
            self.streams += 1
            self.where[backend] = self.where.get(backend, 0) + 1
            if problem:
                self.lost.append(problem)

    def since(self):
        """Counts of streams by backend, to compare with later counts."""
        with self.lock:
            return dict(self.where)

    def served_by(self, names, before, seconds=60):
        """Waits until each of these backends has ended a stream since `before`."""
        until(f"streams from {names}", lambda: all(self.since().get(n, 0) > before.get(n, 0) for n in names), seconds)

    def stop(self):
        self.ended = True
        for thread in self.threads:
            thread.join(100)
        return self.streams, self.lost


class Balanced(Load):
    """Clients behind a load balancer with health checks. A request goes to a gateway that is ready,
    and to another one if no byte of an answer comes. A request is lost if no gateway has served it
    within `GIVES_UP` seconds. If a stream breaks after it has begun, it counts as cut, by
    gateway."""

    GIVES_UP = 60

    def __init__(self, gateways, **named):
        self.gateways, self.cut, self.again, self.gap, self.last = gateways, {}, 0, 0.0, time.monotonic()
        super().__init__(None, **named)

    def client(self):
        while not self.ended:
            self.request()

    def request(self):
        began = time.monotonic()
        while time.monotonic() - began < self.GIVES_UP:
            for gateway in random.sample(self.gateways, len(self.gateways)):
                if not gateway.is_ready():
                    continue
                backend, problem, came = stream(gateway.client, self.tokens)
                with self.lock:
                    if problem and came:
                        self.cut[gateway.name] = self.cut.get(gateway.name, 0) + 1
                    elif problem:
                        self.again += 1
                    else:
                        now = time.monotonic()
                        self.gap, self.last = max(self.gap, now - self.last), now
                if came:
                    self.count(backend)
                    return
            time.sleep(0.02)
        self.count(None, f"not served within {self.GIVES_UP} s")
