"""The gateway under test, and clients that stream from it all the time."""

import http.client
import json
import os
import pathlib
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


class Gateway:
    def __init__(self, folder, name, kubeconfig, pods, extra=""):
        self.client, self.admin, self.file = free_port(), free_port(), folder / f"{name}.toml"
        self.file.write_text("\n".join([
            "[server]", f'listen = "127.0.0.1:{self.client}"', f'admin = "127.0.0.1:{self.admin}"', 'drain_timeout = "20s"',
            "[health]", 'probe_interval = "300ms"',
            "[fleet]", f'state = "{folder}/{name}.state"', 'ramp = "1s"', "warm_up = 2", 'backoff = "500ms"', 'settle = "1s"',
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
        connection = http.client.HTTPConnection("127.0.0.1", port or self.admin, timeout=30)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def status(self):
        return json.loads(self.ask("GET", "/admin/status")[1])

    def pods(self):
        """The pods of the pool, by name, and what is said about the cluster."""
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

    def stop(self):
        self.process.stop()


class Load:
    """Clients that stream, one request after the other. Whatever is not a whole stream is lost."""

    def __init__(self, gateway):
        self.gateway, self.ended, self.lost, self.streams, self.where = gateway, False, [], 0, {}
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self):
        while not self.ended:
            try:
                backend, problem = self.stream()
            except (OSError, http.client.HTTPException) as error:
                backend, problem = None, repr(error)
            with self.lock:
                self.streams += 1
                self.where[backend] = self.where.get(backend, 0) + 1
                if problem:
                    self.lost.append(f"{backend}: {problem}")

    def stream(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.client, timeout=90)
        try:
            body = json.dumps({"model": "m", "prompt": "one two three", "max_tokens": 48, "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            backend, text = answer.getheader("x-sluice-backend"), answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            return backend, f"{answer.status} {text[:200]}"
        whole = text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text.replace(": ", ":").replace(" ", "")
        return backend, None if whole else f"cut: {text[-200:]}"

    def since(self):
        """Counts of streams by backend, to compare with later ones."""
        with self.lock:
            return dict(self.where)

    def served_by(self, names, before, seconds=60):
        """Waits until each of these backends has ended a stream since then."""
        until(f"streams from {names}", lambda: all(self.since().get(n, 0) > before.get(n, 0) for n in names), seconds)

    def stop(self):
        self.ended = True
        for thread in self.threads:
            thread.join(100)
        time.sleep(0)
        return self.streams, self.lost
