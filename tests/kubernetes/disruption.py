"""Steps in which pods come and go for other reasons: autoscaling, eviction, and the kernel's memory
limit."""

import http.client
import json
import signal
import threading

from cluster import NAMESPACE, until
from gateway import CLIENTS, Gateway, Load, stream
from node import PODS
from world import SETS, check, is_ready, serves, statefulset

BUDGETS = f"/apis/policy/v1beta1/namespaces/{NAMESPACE}/poddisruptionbudgets"
LOADED = """slots = 4
[pool.autoscale]
apply = true
min = 0
max = {}
cold_start = "5s"
idle_after = "15s"
[[model]]
name = "m"
"""


def replicas_follow_the_load(world):
    """More replicas for a queue, fewer under load without a lost stream, none without requests, and
    one for the first request."""
    world.apply(statefulset("load"))
    gateway = Gateway(world.folder, "load", world.account, 'selector = "app=load", statefulset = "load"', LOADED.format(2))
    try:
        return follow(world, gateway)
    finally:
        gateway.stop()
        world.cluster.delete(f"{SETS}/load")


def follow(world, gateway):
    replicas = lambda: world.cluster.get(f"{SETS}/load")["spec"]["replicas"]
    until("the engine serves", lambda: serves(gateway, "load-0"), 60)
    load = Load(gateway, 16)
    until("two replicas", lambda: replicas() == 2, 120)
    load.served_by(["load-1"], {})

    # The clients are so few that the other engine has room for them. Otherwise the pod would go on
    # serving.
    fewer = Load(gateway, 3)
    many, lost = load.stop()
    check(not lost, f"{len(lost)} of {many} lost: {lost[:3]}")
    gateway.file.write_text(gateway.file.read_text().replace("max = 2", "max = 1"))
    gateway.process.process.send_signal(signal.SIGHUP)
    until("one replica", lambda: replicas() == 1, 60)
    until("load-1 is gone", lambda: not world.cluster.exists(f"{PODS}/load-1"))
    fewer.served_by(["load-0"], fewer.since())
    few, lost = fewer.stop()
    check(not lost, f"{len(lost)} of {few} lost: {lost[:3]}")

    until("no replica", lambda: replicas() == 0, 60)
    until("load-0 is gone", lambda: not world.cluster.exists(f"{PODS}/load-0"))
    backend, problem, _ = stream(gateway.client)
    check(backend == "load-0" and not problem, problem)

    world.apply(statefulset("load", 2))
    load = Load(gateway, 2)
    until("another manager is named", lambda: "are managed elsewhere" in gateway.log() and 'conflict with "owner"' in gateway.log(), 60)
    check(replicas() == 2, "the gateway took the field")
    check(gateway.log().count("it is stopped: 1 of 2 engines") == 1, "a pod that another manager wants was drained")
    last, lost = load.stop()
    check(not lost, lost[:3])
    return f"1 to 2, 1, 0 and 1 replicas; {many + few + 1 + last} streams, 0 lost"


def evict(world, name):
    body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    status, answer = world.cluster.call("POST", f"{PODS}/{name}/eviction", body)
    check(status in (201, 429), answer)
    return status == 201


def eviction(world):
    """The disruption budget of the chart lets one pod go at a time, and the next pod only when the
    new one is warm. Streams end as usual."""
    world.apply(statefulset("evicted", 2))
    budget = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": {"name": "evicted"},
              "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "evicted"}}}}
    world.cluster.post(BUDGETS, budget)
    gateway = Gateway(world.folder, "evicted", world.account, 'selector = "app=evicted"')
    try:
        return evicted(world, gateway)
    finally:
        gateway.stop()
        world.cluster.delete(f"{BUDGETS}/evicted")
        world.cluster.delete(f"{SETS}/evicted")


def evicted(world, gateway):
    names = ["evicted-0", "evicted-1"]
    in_use = lambda name: gateway.states().get(name) == "in_use"
    status = lambda: world.cluster.get(f"{BUDGETS}/evicted").get("status", {})
    until("pods are ready", lambda: all(is_ready(world.pod(name)) for name in names))
    until("the budget is computed", lambda: status().get("currentHealthy") == 2 and status().get("desiredHealthy") == 2)
    load = Load(gateway)
    load.served_by(names, {})
    check(not evict(world, "evicted-1"), "both have to stay, and one was evicted")
    check(all(in_use(name) for name in names), gateway.states())

    world.cluster.patch(f"{BUDGETS}/evicted", {"spec": {"minAvailable": None, "maxUnavailable": 1}})
    until("the budget allows one", lambda: status().get("disruptionsAllowed") == 1)
    uid = world.pod("evicted-1")["metadata"]["uid"]
    before = load.since()
    check(evict(world, "evicted-1"), "it may go, and was not evicted")
    refused = 0

    def next_one():
        nonlocal refused
        if evict(world, "evicted-0"):
            return True
        refused += 1
        return False

    until("the next may go", next_one, 60)
    # The gateway sets the readiness gate of the new pod once the pod is warm. Only then the budget
    # allows the next eviction.
    check(refused > 0 and world.pod("evicted-1")["metadata"]["uid"] != uid and in_use("evicted-1"), gateway.states())
    until("both are back", lambda: all(world.cluster.exists(f"{PODS}/{name}") and is_ready(world.pod(name)) for name in names))
    load.served_by(names, load.since())
    check(load.since()["evicted-1"] > before["evicted-1"], load.since())
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"{refused} evictions refused until the new pod was warm; {streams} streams, 0 lost"


def use_memory(address):
    """Sends long prompts past the gateway, to use memory as any other activity of an engine may."""
    body = json.dumps({"model": "m", "prompt": "one " * 2_000_000, "max_tokens": 1})
    try:
        connection = http.client.HTTPConnection(address, 8000, timeout=10)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass


def out_of_memory(world):
    """The kernel kills an engine that exceeds its memory limit. The failure has a class and a
    message, and only the streams of this engine are lost."""
    world.apply(statefulset("heavy", 2, memory="48Mi"))
    said = []
    try:
        for name, pods in (("heavy", 'selector = "app=heavy"'), ("heavy-managed", 'selector = "app=heavy", statefulset = "heavy"')):
            gateway = Gateway(world.folder, name, world.account, pods)
            try:
                said.append(killed_by_the_kernel(world, gateway))
            finally:
                gateway.stop()
    finally:
        world.cluster.delete(f"{SETS}/heavy")
    return "; with statefulset: ".join(said)


def failure(gateway, name):
    """The reason why a pod, or the engine in it, does not serve."""
    pod = gateway.pods()[0].get(name, {})
    engine = gateway.backends().get(name, {}).get("engine") or {}
    return pod.get("why") or engine.get("why")


def killed_by_the_kernel(world, gateway):
    names = ["heavy-0", "heavy-1"]
    ready = lambda name: gateway.backends().get(name, {}).get("state") == "ready"
    until("pods in use", lambda: all(ready(name) for name in names))
    load = Load(gateway)
    load.served_by(names, {})
    engine = world.node.of("heavy-1")
    restarts = engine.restarts
    if engine.group:
        for _ in range(4):
            threading.Thread(target=use_memory, args=(engine.address,), daemon=True).start()
    else:
        engine.reason = "OOMKilled"
        engine.process.process.send_signal(signal.SIGKILL)
    again = f"restarted {restarts + 1} times"
    why = until("the end is noticed", lambda: (said := failure(gateway, "heavy-1")) and again in said and said, 60, 0.02)
    check(why.startswith("container_memory: ") and "OOMKilled" in why and "limits.memory" in why, why)
    until("it serves again", lambda: engine.restarts > restarts and ready("heavy-1") and not failure(gateway, "heavy-1"))
    load.served_by(names, load.since())
    streams, lost = load.stop()
    check(all(problem.startswith("heavy-1: ") for problem in lost) and len(lost) <= CLIENTS, lost[:3])
    last = world.pod("heavy-1")["status"]["containerStatuses"][0]["lastState"]["terminated"]
    check(last["reason"] == "OOMKilled" and last["exitCode"] == 137, last)
    how = "by the kernel" if engine.group else "with a simulated reason, for want of a memory cgroup"
    return f"killed {how}: {why}; {streams} streams, {len(lost)} lost that ran on it"
