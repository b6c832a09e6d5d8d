"""The online tuner in front of two real vLLM servers, under a load that does not stop.

Usage: tuner.py ROOT      (ROOT from ./setup; `./tuner` does both steps)

Steps build on each other; each prints one line. The last line is `N passed, N failed`. Logs stay in
ROOT/tuner/.

1. one slot for each engine is too few, so the tuner raises the limit while requests run, measures,
   and keeps the change;
2. no request failed meanwhile, and first tokens come sooner;
3. when the gateway starts again, the kept limit is in force at once, and the journal records the
   changes;
4. the operator freezes the tuner and puts the limits of the file in force again.

`engine_tuner.py` tests limits of the engines themselves.
"""

import concurrent.futures
import json
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback

from engine import Failed, Vllm, free_port, get, until
from gateway import Gateway, binary, model, pool
from wire import Call, post

CHAT = "/v1/chat/completions"
CLIENTS = 12
BODY = {
    "model": "tiny",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}],
}
# Time limit of a decision in seconds. The tuner observes for at least ten seconds, waits, and
# measures for half a minute and 200 requests, but at most two minutes. If the machine becomes
# slower meanwhile, the tuner undoes the change, and tries it again after five minutes.
DECIDES = 900


def check(holds, what):
    if not holds:
        raise Failed(str(what))


class Load:
    """Clients that send one request after the other until the load ends, `pause` seconds apart on
    average."""

    def __init__(self, url, clients=CLIENTS, pause=0.0, tokens=BODY["max_tokens"]):
        self.url, self.over, self.ended = url, threading.Event(), []
        self.pause, self.body = pause, {**BODY, "max_tokens": tokens}
        self.pool = concurrent.futures.ThreadPoolExecutor(clients)
        self.running = [self.pool.submit(self.client, random.Random(number)) for number in range(clients)]

    def client(self, chance):
        while not self.over.wait(chance.expovariate(1 / self.pause) if self.pause else 0):
            began, first = time.monotonic(), None
            call = Call(self.url, "POST", CHAT, self.body)
            for _ in call.stream():
                first = first or time.monotonic() - began
            call.close()
            answer = call.answer
            whole = answer.body.rstrip().endswith(b"data: [DONE]")
            self.ended.append((time.monotonic(), answer.status, whole, first))

    def end(self):
        self.over.set()
        for task in self.running:
            task.result()
        self.pool.shutdown()
        return self.ended


class Rig:
    def __init__(self, root):
        self.root, self.folder = root, root / "tuner"
        self.folder.mkdir(exist_ok=True)
        self.state = self.folder / "state"
        for name in ("tuner.json", "tuner.jsonl"):
            (self.state / name).unlink(missing_ok=True)
        self.gate = self.load = None
        self.engines = [Vllm(f"wide{n}", root, self.folder, 2048, "--max-num-seqs", "64", port=free_port()) for n in range(2)]
        for engine in self.engines:
            engine.healthy()
        # The bound does not depend on the machine's speed. With one slot for each engine, a request
        # waits for five other requests, which takes ten times this bound.
        self.bound = 0.5 * self.alone()
        self.start_gate(1)

    def alone(self):
        """Seconds that a request takes if each engine serves one at a time."""

        def one(engine):
            began = time.monotonic()
            answer = post(engine.url, CHAT, BODY)
            check(answer.status == 200, answer)
            return time.monotonic() - began

        with concurrent.futures.ThreadPoolExecutor(len(self.engines)) as each:
            rounds = [max(each.map(one, self.engines)) for _ in range(8)]
        return sorted(rounds[2:])[3]

    def start_gate(self, slots):
        urls = {f"e{number}": engine.url for number, engine in enumerate(self.engines)}
        pools = [pool("p", urls, models='["tiny"]', slots=slots)]
        extra = f'[slo]\nttft = "{1000 * self.bound:.0f}ms"\n[tuner]\nmode = "apply"\n[fleet]\nstate = {json.dumps(str(self.state))}'
        self.gate = Gateway(self.folder, "gate", pools, [model("tiny")], extra)

    def shown(self):
        return json.loads(get(self.gate.admin + "/admin/tuner")[1])

    def slots(self):
        pools = json.loads(get(self.gate.admin + "/admin/status")[1])["pools"]
        return pools[0]["backends"][0]["slots"]["limit"]

    def sluice(self, *arguments):
        done = subprocess.run([binary(), "tuner", "--admin", self.gate.admin, *arguments], capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL)
        check(done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self):
        if self.load:
            self.load.over.set()
        for process in (self.gate, *self.engines):
            if process:
                process.terminate()


def a_limit_that_is_too_low_is_raised_under_load_and_kept(rig):
    rig.load = Load(rig.gate.url)
    # The first requests do not wait, so the tuner must observe the requests that come after them.
    until("a full queue", lambda: len(rig.load.ended) >= 2 * CLIENTS, DECIDES)
    rig.sluice("reset")
    kept = lambda: [one for one in rig.shown()["events"] if one["kind"] == "kept" and one["key"] == "pool.p.slots"]
    found = until("a higher limit is kept", kept, DECIDES, every=1)
    print("\n".join("  " + line for line in rig.sluice("show").splitlines()))
    check(rig.slots() > 1 and found[-1]["values"][0] == "1", found)


def no_request_failed_and_first_tokens_come_sooner(rig):
    time.sleep(5)
    tried = next(one for one in reversed(rig.shown()["events"]) if one["kind"] == "tried")
    over = time.monotonic()
    ended = rig.load.end()
    rig.load = None
    bad = [one for one in ended if one[1] != 200 or not one[2]]
    check(not bad, f"{len(bad)} of {len(ended)} failed: {bad[:3]}")
    rig.gate.idle()
    first = ended[0][0]
    ttft = lambda begin, end: statistics.median(one[3] for one in ended if begin <= one[0] < end)
    # The queue is full after the first requests.
    before, after = ttft(first + 4, first + 14), ttft(over - 10, over)
    print(f"  {len(ended)} requests, none failed; median TTFT {before:.2f} s at first, {after:.2f} at last; {tried['why']}")
    check(after < before, (before, after))


def what_was_kept_survives_a_restart(rig):
    # The newest event comes first. A change that was in trial when the gateway ended is not among
    # the kept ones.
    kept = next(one for one in rig.shown()["events"] if one["kind"] == "kept")
    rig.gate.terminate()
    rig.start_gate(1)
    check(str(rig.slots()) == kept["values"][1], (rig.slots(), kept))
    lines = [json.loads(line) for line in (rig.state / "tuner.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    check(kinds[0] == "tried" and "kept" in kinds, kinds)


def the_operator_has_the_last_word(rig):
    check("frozen by an operator" in rig.sluice("freeze"), "the command says so")
    rig.sluice("reset")
    check(rig.slots() == 1, "the limit of the file")
    check("makes changes" in rig.sluice("resume"), "the command says so")


STEPS = (
    a_limit_that_is_too_low_is_raised_under_load_and_kept,
    no_request_failed_and_first_tokens_come_sooner,
    what_was_kept_survives_a_restart,
    the_operator_has_the_last_word,
)


def main():
    rig, passed = Rig(pathlib.Path(sys.argv[1])), 0
    try:
        for step in STEPS:
            began = time.monotonic()
            try:
                step(rig)
            except (AssertionError, Failed, OSError, KeyError, ValueError, subprocess.SubprocessError):
                print(f"FAIL {step.__name__}\n{traceback.format_exc()}\n{rig.gate.tail(40)}", flush=True)
                print((rig.state / "tuner.jsonl").read_text() if (rig.state / "tuner.jsonl").exists() else "no journal")
                break  # the steps build on each other
            passed += 1
            print(f"ok   {step.__name__} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        rig.stop()
    failed = len(STEPS) - passed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
