"""The gateway under test and an engine that only echoes, as processes with ports."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import threading

from engine import HERE, Failed, Process, free_port, get, samples, total, until

START_SECONDS = 20
# Time that counters may lag behind the end of a request, because records are written when the
# connection is dropped.
SETTLE_SECONDS = 5


def binary():
    """The program under test: `SLUICE_BIN`, or if this is not set, the release build of this
    repository."""
    path = pathlib.Path(os.environ.get("SLUICE_BIN") or HERE.parent.parent / "target/release/sluice")
    if not path.exists():
        raise Failed(f"{path} is missing; build it with `cargo build --release` or set SLUICE_BIN")
    return path.resolve()


class Gateway(Process):
    """`sluice serve` with a generated configuration. Waits until it is ready."""

    def __init__(self, folder, name, pools, models=(), extra="", tls=None):
        folder = pathlib.Path(folder)
        client, admin = free_port(), free_port()
        self.url, self.admin = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{admin}"
        if tls:
            self.url = f"https://127.0.0.1:{client}"
            extra += f'\n[server.tls]\ncertificate = "{tls}.pem"\nkey = "{tls}.key"\n'
        lines = ["[server]", f'listen = "127.0.0.1:{client}"', f'admin = "127.0.0.1:{admin}"', 'drain_timeout = "30s"', ""]
        self.file = folder / f"{name}.toml"
        self.file.write_text("\n".join([*lines, *models, *pools, extra]) + "\n")
        super().__init__(name, [binary(), "serve", "--config", self.file], folder / f"{name}.log")
        try:
            # The admin port has no TLS.
            self.ready(self.admin + "/health" if tls else self.url + "/ready", START_SECONDS)
        except Failed:
            self.kill()
            raise

    def metrics(self):
        return get(self.admin + "/metrics")[1]

    def metric(self, name, **labels):
        return total(self.metrics(), name, **labels)

    def idle(self):
        """Waits until nothing is in flight, queued or reserved. A leaked permit would make this
        wait fail."""
        status, text = get(self.admin + "/metrics")
        if status != 200 or "sluice_" not in text:
            raise Failed(f"{self.name} shows no metrics at {self.admin}/metrics ({status} {text[:200]!r})")
        names = ("sluice_in_flight", "sluice_queue_length", "sluice_outstanding_tokens", "sluice_prefill_tokens")
        left = {}

        def nothing():
            nonlocal left
            page = list(samples(self.metrics()))
            left = {(n, *sorted(ls.items())): v for n, ls, v in page if n in names and v != 0}
            return page and not left

        try:
            until("idle", nothing, SETTLE_SECONDS)
        except Failed as problem:
            raise Failed(f"{self.name} still holds {left} after {SETTLE_SECONDS} s") from problem


def pool(name, backends, **keys):
    """A `[[pool]]` with backends `{name: url}`. Values of `keys` are text in TOML."""
    lines = ["[[pool]]", f'name = "{name}"', *(f"{k} = {v}" for k, v in keys.items())]
    for backend, url in backends.items():
        lines += ["[[pool.backend]]", f'name = "{backend}"', f'url = "{url}"']
    return "\n".join(lines) + "\n"


def certificate(folder, name):
    """Creates a self-signed certificate for 127.0.0.1 and its key: `NAME.pem` and `NAME.key`.
    Returns their common path."""
    path = pathlib.Path(folder) / name
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=sluice"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", f"{path}.key", "-out", f"{path}.pem"]
    subprocess.run(["openssl", "req", "-x509", *options, *names, *files], check=True, capture_output=True)
    return path


def model(name, **keys):
    return "\n".join(["[[model]]", f'name = "{name}"', *(f"{k} = {v}" for k, v in keys.items())]) + "\n"


class Echo:
    """An engine on a thread of the suite that responds to every POST with the length and SHA-256 of
    the received body."""

    def __init__(self, *models):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body are sent in two writes. With Nagle's algorithm, the second write would
            # wait for an acknowledgement.
            disable_nagle_algorithm = True

            def answer(self, value):
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                cards = [{"id": m, "object": "model", "owned_by": "echo", "max_model_len": 32768} for m in models]
                self.answer({"object": "list", "data": cards} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                seen = {"length": len(body), "sha256": hashlib.sha256(body).hexdigest()}
                fields = {k.lower(): v for k, v in self.headers.items()}
                usage = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1}
                self.answer({"object": "text_completion", "choices": [], "seen": seen, "headers": fields, "usage": usage})

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
