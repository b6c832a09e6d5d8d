"""An experiment on a real vLLM server: the base model against a LoRA adapter that is loaded while
requests run.

Usage: experiment.py ROOT      (ROOT from ./setup; `./experiment` does both steps)

Steps build on each other; each prints one line. The last line is `N passed, N failed`. Logs stay in
ROOT/experiment/.

1. while the adapter is not loaded, no request takes part, and the report names the reason why the
   arm waits;
2. when the adapter's folder is configured, the gateway loads the adapter into the running engine,
   and requests take part;
3. each user stays in one arm, requests of the adapter's arm name the adapter upstream, and
   responses pass unchanged;
4. half of the users are in each arm, all requests are measured, and a report is written;
5. a stop under load loses no request;
6. with two adapters on an engine with one slot, the report names the slot limit as the cause of the
   wait.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import threading
import time
import traceback

from engine import Failed, Vllm, free_port, get, until
from gateway import Gateway, binary, model, pool
from wire import post

CHAT = "/v1/chat/completions"
USERS = 60
ROUNDS = 4
CLIENTS = 4
BODY = {
    "model": "tiny",
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}],
}
ARMS = """
[[experiment]]
name = "x"
models = ["tiny"]
sticky = "header"
header = "x-user-id"
[[experiment.arm]]
name = "base"
weight = 50
[[experiment.arm]]
name = "lora"
weight = 50
model = "ad"
"""


def check(holds, what):
    if not holds:
        raise Failed(str(what))


def strong(source, folder):
    """A copy of an adapter with larger weights, because with the weights of `setup` the tiny model
    often generates the same text as without an adapter."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({name: tensor * 300 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


class Rig:
    def __init__(self, root):
        self.root, self.folder = root, root / "experiment"
        self.folder.mkdir(exist_ok=True)
        state = self.folder / "state"
        (state / "experiments.json").unlink(missing_ok=True)
        self.adapter = strong(root / "lora", self.folder / "lora")
        flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        self.engine = Vllm("engine", root, self.folder, 8192, *flags, env=env, port=free_port())
        self.gate, self.arms = None, {}
        self.engine.healthy()
        pools = [pool("p", {"e0": self.engine.url}, models='["tiny", "ad"]', usage='"off"')]
        extra = f'{ARMS}\n[fleet]\nstate = {json.dumps(str(state))}'
        self.gate = Gateway(self.folder, "gate", pools, [model("tiny"), model("ad")], extra)

    def send(self, user, url=None, **changes):
        return post(url or self.gate.url, CHAT, {**BODY, **changes}, headers={"x-user-id": f"user-{user}"})

    def all_users(self):
        """The responses to one request of each user, a few concurrently."""
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.send, range(USERS)))

    def report(self):
        return json.loads(get(self.gate.admin + "/admin/experiments/x")[1])

    def sluice(self, *arguments):
        done = subprocess.run([binary(), "experiment", "--admin", self.gate.admin, *arguments], capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL)
        check(done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self):
        for process in (self.gate, self.engine):
            if process:
                process.terminate()


def no_request_takes_part_before_the_adapter_is_loaded(rig):
    for user in range(6):
        answer = rig.send(user)
        check(answer.status == 200 and answer.json()["model"] == "tiny", f"user {user}: {answer.status} {answer.body}")
        check("x-sluice-arm" not in answer.headers, f"user {user} is in an arm")
    said = rig.report()
    check(said["phase"] == "running" and "no ready backend serves the model ad" in said["arms"][1]["waiting"], said)
    check(not any(arm["requests"] for arm in said["arms"]), said["arms"])


def the_gateway_loads_the_adapter_on_demand(rig):
    folder = json.dumps(str(rig.adapter))
    text = rig.gate.file.read_text()
    rig.gate.file.write_text(text.replace('name = "ad"\n', f'name = "ad"\nadapter = {folder}\n', 1))
    answer = post(rig.gate.admin, "/admin/reload", {}, headers={"x-sluice-admin": "1"})
    check(answer.status == 200, f"{answer.status} {answer.body}")
    until("the adapter is loaded and the arm waits no longer", lambda: "waiting" not in rig.report()["arms"][1], 30)


def users_stay_in_their_arm_and_bytes_pass_unchanged(rig):
    direct = {name: rig.send(0, rig.engine.url, model=name).json()["choices"] for name in ("tiny", "ad")}
    check(direct["tiny"] != direct["ad"], "base and adapter respond alike, so that nothing could be distinguished")
    for number in range(ROUNDS):
        for user, answer in enumerate(rig.all_users()):
            check(answer.status == 200, f"user {user}: {answer.status} {answer.body}")
            arm, said = answer.headers["x-sluice-arm"], answer.json()
            check(rig.arms.setdefault(user, arm) == arm, f"user {user} moved from {rig.arms[user]} to {arm} in round {number}")
            name = {"x/base": "tiny", "x/lora": "ad"}[arm]
            # The client must get the engine's own response. The model is not renamed back, and the
            # text comes from the adapter.
            check(said["model"] == name and said["choices"] == direct[name], f"user {user} in {arm}: {said}, direct {direct[name]}")


def both_arms_are_measured_and_reported(rig):
    lora = sum(arm == "x/lora" for arm in rig.arms.values())
    check(USERS // 4 <= lora <= USERS * 3 // 4, f"{lora} of {USERS} users have the adapter")
    until("all are counted", lambda: sum(arm["requests"] for arm in rig.report()["arms"]) == USERS * ROUNDS, 5)
    report = rig.report()
    check(report["arms"][1]["requests"] == lora * ROUNDS, report["arms"])
    check(not any(arm["fell_back"] or arm["failed"] for arm in report["arms"]), report["arms"])
    listed = rig.sluice("list")
    check("x" in listed and "lora" in listed, listed)
    print("  " + report["comparisons"][0]["sentence"])
    page = rig.folder / "report.html"
    rig.sluice("report", "x", "--format", "html", "--output", str(page))
    html = page.read_text()
    check("lora beside base" in html and "E2EL" in html and "http://" not in html.replace("http://www.w3.org", ""), html[:2000])


def a_stop_under_load_loses_nothing(rig):
    ends = time.monotonic() + 60

    def client(number):
        count = after = 0
        while after < 5 and time.monotonic() < ends:
            answer = rig.send(number * 1000 + count)
            check(answer.status == 200, f"{answer.status} {answer.body}")
            count, after = count + 1, after + (rig.stopped and "x-sluice-arm" not in answer.headers)
        return after

    rig.stopped = False
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(client, number) for number in range(CLIENTS)]
        seen = sum(arm["requests"] for arm in rig.report()["arms"])
        until("the load has begun", lambda: sum(arm["requests"] for arm in rig.report()["arms"]) > seen + 10, 30)
        check("stopped" in rig.sluice("stop", "x"), "the command says so")
        rig.stopped = True
        check([task.result() for task in running] == [5] * CLIENTS, "requests after the stop are in no arm")
    rig.gate.idle()


TURNS = """
[[experiment]]
name = "turns"
[[experiment.arm]]
name = "one"
weight = 50
model = "ad"
[[experiment.arm]]
name = "two"
weight = 50
model = "ad2"
"""


def a_slot_that_adapters_wait_for_is_named(rig):
    rig.stop()  # two cores
    flags = ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8"]
    flags += ["--lora-modules", f"ad={rig.adapter}", f"ad2={rig.adapter}"]
    rig.engine = Vllm("one-slot", rig.root, rig.folder, 8192, *flags, port=free_port())
    rig.engine.healthy()
    pools = [pool("p", {"e0": rig.engine.url}, models='["tiny", "ad", "ad2"]', usage='"off"')]
    extra = f'{TURNS}\n[fleet]\nstate = {json.dumps(str(rig.folder / "turns"))}'
    rig.gate = Gateway(rig.folder, "turns", pools, [model("tiny"), model("ad"), model("ad2")], extra)
    over = threading.Event()

    def client(_):
        while not over.is_set():
            answer = rig.send(0, max_tokens=100)
            check(answer.status == 200, f"{answer.status} {answer.body}")

    def slots():
        report = json.loads(get(rig.gate.admin + "/admin/experiments/turns")[1])
        return [one for one in report["comparisons"][0].get("diagnosis", []) if one["cause"] == "slots"]

    with concurrent.futures.ThreadPoolExecutor(16) as clients:
        running = [clients.submit(client, number) for number in range(16)]
        try:
            found = until("the slot limit is named", slots, 180, every=0.5)
        finally:
            over.set()
        [task.result() for task in running]
    check("max-loras 1, and 2 adapters were used" in found[0]["sentence"], found)


STEPS = (
    no_request_takes_part_before_the_adapter_is_loaded,
    the_gateway_loads_the_adapter_on_demand,
    users_stay_in_their_arm_and_bytes_pass_unchanged,
    both_arms_are_measured_and_reported,
    a_stop_under_load_loses_nothing,
    a_slot_that_adapters_wait_for_is_named,
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
