#!/usr/bin/env python3
"""Sixty audio jobs of mixed length on four serial workers, through sluice and through nginx:
`cargo build --release && benches/audio_jobs.py [ROUNDS]`.

In one run, each proxy has four separate workers and gets the same jobs at the same times. A worker
does one job at a time, and a second job waits in the worker. For a job, a worker sleeps 10 ms for
each second of audio (16 kHz, 16 bits), so workers do not disturb each other. Lengths are log-normal
(median 30 s, 2 s to 600 s). Arrivals are Poisson at 85 % of the capacity. Prints the time from the
arrival of a job to the beginning of its work. Needs nginx (Debian: nginx-light); SLUICE_BIN names
another binary.
"""
import concurrent.futures
import http.client
import http.server
import multiprocessing
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

BINARY = os.environ.get("SLUICE_BIN", "target/release/sluice")
JOBS, WORKERS, LOAD = 60, 4, 0.85
BYTES_OF_A_SECOND, WORK_OF_A_SECOND = 32_000, 0.01
MEDIAN, SPREAD, SHORTEST, LONGEST = 30.0, 1.2, 2.0, 600.0
DEADLINE = 120.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def worker(port):
    """One process that does one job at a time."""
    turn = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(b"ok")

        def do_POST(self):
            length = int(self.headers["content-length"])
            self.rfile.read(length)
            with turn:
                begun = time.monotonic()
                time.sleep(length / BYTES_OF_A_SECOND * WORK_OF_A_SECOND)
            # The answer is the moment at which the work began, by the clock of the machine.
            self.reply(f"{begun}".encode())

        def reply(self, body):
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def nginx(folder, port, workers, policy):
    servers = "".join(f"server 127.0.0.1:{worker};" for worker in workers)
    # nginx's workers need the right to write bodies into the folder.
    user = "user root; " if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n"
        f"proxy_read_timeout 300s; upstream workers {{ {policy} {servers} }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://workers; }} }} }}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def sluice(folder, port, workers):
    text = (
        f'[server]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:0"\n[[model]]\nname = "ears"\n'
        '[[pool]]\nname = "p"\nmodels = ["ears"]\nengine = "serial"\nroutes = ["/transcribe"]\n'
        'cost = { per = 32000.0, unit = "seconds" }\nqueue = { timeout = "2m", aging_per_1k_tokens = "100s" }\n'
    )
    text += "".join(
        f'[[pool.backend]]\nname = "w{index}"\nurl = "http://127.0.0.1:{worker}"\n' for index, worker in enumerate(workers)
    )
    (folder / "sluice.toml").write_text(text)
    return [BINARY, "serve", "--config", str(folder / "sluice.toml")]


def wait_for(port):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("POST", "/transcribe", b"x" * 32)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"port {port} does not answer")


def jobs(seed):
    """(arrival, seconds of audio) of each job."""
    chance, now, found = random.Random(seed), 0.0, []
    lengths = [min(LONGEST, max(SHORTEST, chance.lognormvariate(0, SPREAD) * MEDIAN)) for _ in range(JOBS)]
    pause = statistics.fmean(lengths) * WORK_OF_A_SECOND / WORKERS / LOAD
    for length in lengths:
        now += chance.expovariate(1 / pause)
        found.append((now, length))
    return found


def play(port, plan, started):
    """The time from the arrival of each job to the beginning of its work."""

    def one(job):
        arrival, length = job
        # The body is made before the job arrives, so that this delays nothing.
        body = b"\0" * int(length * BYTES_OF_A_SECOND)
        time.sleep(max(0.0, started + arrival - time.monotonic()))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        connection.request("POST", "/transcribe", body)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {text[:300]}")
        return float(text) - (started + arrival)

    with concurrent.futures.ThreadPoolExecutor(len(plan)) as clients:
        return list(clients.map(one, plan))


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    names = ("nginx, round robin", "nginx, least_conn", "sluice")
    print("| proxy | round | P50 | P95 | mean | longest |\n|---|--:|--:|--:|--:|--:|")
    every = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        processes, ports = [], {}
        try:
            for index, name in enumerate(names):
                place = pathlib.Path(folder) / str(index)
                place.mkdir()
                workers = [free_port() for _ in range(WORKERS)]
                for port in workers:
                    process = multiprocessing.Process(target=worker, args=(port,), daemon=True)
                    process.start()
                    processes.append(process)
                ports[name] = free_port()
                policies = ("", "least_conn;")
                command = sluice(place, ports[name], workers) if name == "sluice" else nginx(place, ports[name], workers, policies[index])
                with open(place / "log", "wb") as log:
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=place if name != "sluice" else None))
            for port in ports.values():
                wait_for(port)
            for number in range(rounds):
                plan, started = jobs(number), time.monotonic() + 1.0
                with concurrent.futures.ThreadPoolExecutor(len(names)) as proxies:
                    runs = {name: proxies.submit(play, ports[name], plan, started) for name in names}
                for name, run in runs.items():
                    waits = run.result()
                    every[name] += waits
                    row(name, number + 1, waits)
            for name, waits in every.items():
                row(name, "all", waits)
        finally:
            for process in processes:
                process.terminate()


def row(name, number, waits):
    found = (quantile(waits, 0.5), quantile(waits, 0.95), statistics.fmean(waits), max(waits))
    print(f"| {name} | {number} | " + " | ".join(f"{1000 * value:,.0f} ms" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
