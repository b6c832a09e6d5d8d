"""The online tuner changes flags of two real vLLM servers that the gateway runs, under a load that
does not stop.

Usage: engine_tuner.py ROOT [WHOLE]      (ROOT from ./setup; `./engine_tuner` does both steps)

Both engines start with room for two sequences, which is too few. With WHOLE, the tuner restarts one
engine with more room, gives it copies of requests, compares it with the other engine, and then
changes the other engine, too. This takes about 20 minutes on two cores. The clients pause between
requests. Without pauses, the four processes of the engines would wait longer for a core than
requests wait for an engine, and the comparison would find nothing. Without WHOLE, the metrics of
vLLM name the cause, an operator freezes the tuner after the copies, and the engine is changed back.
No request may fail. The last line is `N passed, N failed`. Logs stay in ROOT/engine_tuner/.
"""

import json
import pathlib
import sys
import time
import traceback

import subprocess

from engine import Failed, Process, environment, free_port, get, until
from gateway import binary
from tuner import Load, check

NAMES = ("e0", "e1")
# Time limit of a decision in seconds. It takes 100 s of missed objectives, a restart, copies for 90
# s to 5 minutes, a minute to settle, and a comparison that may take 45 minutes.
DECIDES = 4000
# Seconds between two requests of a client while an engine starts.
PAUSE = 10.0


class Rig:
    def __init__(self, root):
        self.root, self.folder = root, root / "engine_tuner"
        self.folder.mkdir(exist_ok=True)
        self.state = self.folder / "state"
        for name in ("tuner.json", "tuner.jsonl", "experiments.json"):
            (self.state / name).unlink(missing_ok=True)
        client, admin = free_port(), free_port()
        self.url, self.admin = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{admin}"
        self.file = self.folder / "sluice.toml"
        self.file.write_text(self.text(client, admin))
        self.load = None
        self.gate = Process("gate", [binary(), "serve", "--config", self.file], self.folder / "gate.log")
        self.gate.ready(self.admin + "/health", 20)
        until("both engines serve", lambda: self.steps() == ["serve", "serve"], 300, 0.5)

    def text(self, client, admin):
        env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in environment(self.root).items())
        command = json.dumps([str(self.root / "venv/bin/vllm"), "serve", str(self.root / "tiny")])
        args = 'served-model-name = "tiny", load-format = "dummy", enforce-eager = true, max-model-len = 2048, max-num-seqs = 2'
        lines = [
            "[server]", f'listen = "127.0.0.1:{client}"', f'admin = "127.0.0.1:{admin}"', 'drain_timeout = "30s"',
            "[slo]", 'ttft = "100ms"',
            "[tuner]", 'mode = "apply"', 'flags = ["max-num-seqs"]', 'missed_for = "100s"',
            "[health]", 'probe_timeout = "10s"',
            "[fleet]", f"state = {json.dumps(str(self.state))}", 'ramp = "2s"', "warm_up = 3", "start_timeout_scale = 4",
            "[[model]]", 'name = "tiny"',
            "[[pool]]", 'name = "p"', 'models = ["tiny"]', 'queue = { length = 512, timeout = "120s" }',
        ]
        for name in NAMES:
            lines += ["[[pool.backend]]", f'name = "{name}"', "[pool.backend.launch]", f"command = {command}",
                      f"port = {free_port()}", f"env = {{ {env} }}", f"args = {{ {args} }}"]
        return "\n".join(lines) + "\n"

    def steps(self):
        pools = json.loads(get(self.admin + "/admin/status", 10)[1])["pools"]
        return [backend["engine"]["step"] for backend in pools[0]["backends"]]

    def pace(self):
        """Whether both engines serve. While one starts, clients pause, because otherwise they would
        take the cores that the start needs for minutes."""
        both = self.steps() == ["serve", "serve"]
        self.load.pause = 0.0 if both else PAUSE
        return both

    def settings(self):
        pools = json.loads(get(self.admin + "/admin/status", 10)[1])["pools"]
        return [backend["engine"]["settings"] for backend in pools[0]["backends"]]

    def events(self):
        return json.loads(get(self.admin + "/admin/tuner")[1])["events"]

    def order(self, *arguments):
        done = subprocess.run([binary(), "tuner", *arguments, "--admin", self.admin], capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL)
        check(done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def show(self):
        return self.order("show", "--events", "40")

    def stop(self):
        if self.load:
            self.load.over.set()
        self.gate.terminate()


def too_few_sequences(rig):
    """The diagnoses from vLLM's metrics which say that the limit on sequences delays requests."""
    found = json.loads(get(rig.admin + "/admin/tuner")[1])["groups"][0]["diagnoses"]
    # A diagnosis for one backend suffices, because placement may give all requests to one engine:
    # on a machine with few cores, two engines slow each other down.
    return [one for one in found if one["reading"] == "sequences" and one["backends"]]


def of_engines(rig, kind):
    return [one for one in rig.events() if one["kind"] == kind and ".engine." in one["key"]]


def end(rig, wanted):
    """Ends the load. No request may have failed, and the journal must have these kinds of events,
    in this order."""
    time.sleep(5)
    ended = rig.load.end()
    rig.load = None
    print("\n".join("  " + line for line in rig.show().splitlines()))
    bad = [one for one in ended if one[1] != 200 or not one[2]]
    check(not bad, f"{len(bad)} of {len(ended)} failed: {bad[:3]}")
    print(f"  {len(ended)} requests, none failed; {rig.settings()}")
    lines = [json.loads(line) for line in (rig.state / "tuner.jsonl").read_text().splitlines()]
    lines = [line for line in lines if ".engine." in line["key"]]
    check([line["kind"] for line in lines][: len(wanted)] == wanted, lines)
    copies = next(line["why"] for line in lines if line["kind"] == "compared")
    check(int(copies.split()[0]) > 0, copies)


def engines_get_more_sequences_under_load_and_no_request_fails(rig):
    rig.load = Load(rig.url, clients=8, pause=0.5, tokens=128)

    def done():
        check(not of_engines(rig, "undone"), of_engines(rig, "undone"))
        return of_engines(rig, "kept")

    until("a change of engines is kept", done, DECIDES, every=2)
    check(all("max-num-seqs=4" in settings for settings in rig.settings()), rig.settings())
    end(rig, ["tried", "compared", "promoted"])


def an_engine_gets_copies_and_is_taken_back_when_an_operator_freezes_the_tuner(rig):
    rig.load = Load(rig.url)
    named = []

    def compared():
        rig.pace()
        named.extend(too_few_sequences(rig))
        return of_engines(rig, "compared")

    until("copies of requests were served", compared, DECIDES, every=2)
    check(any("raise max-num-seqs above 2" in one["advice"] for one in named), named)
    print(f"  {named[0]['evidence']}: {named[0]['advice']}")
    check(sorted("max-num-seqs=4" in settings for settings in rig.settings()) == [False, True], rig.settings())
    rig.order("freeze")

    def back():
        return rig.pace() and not any("max-num-seqs=4" in one for one in rig.settings())

    until("the engine is taken back", back, DECIDES, every=2)
    end(rig, ["tried", "compared"])


def main():
    rig, failed = Rig(pathlib.Path(sys.argv[1])), 0
    try:
        whole = len(sys.argv) > 2
        step = engines_get_more_sequences_under_load_and_no_request_fails if whole \
            else an_engine_gets_copies_and_is_taken_back_when_an_operator_freezes_the_tuner
        step(rig)
        print(f"ok   {step.__name__}")
    except (AssertionError, Failed, OSError, KeyError, ValueError, subprocess.SubprocessError):
        print(f"FAIL\n{traceback.format_exc()}\n{rig.gate.tail(40)}", flush=True)
        failed = 1
    finally:
        rig.stop()
    print(f"{1 - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
