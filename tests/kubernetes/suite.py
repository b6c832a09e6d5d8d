"""The gateway in front of pods of a real API server: pods that come, go or fail to start, and pods
that the gateway may not change. Also two gateways that share one limit, of which one leads.

Usage: suite.py ROOT [STEP...]      (ROOT from ./setup; `./run` does both)

API server, etcd and the controller of StatefulSets are real. node.py takes the place of scheduler
and kubelet, and its containers are `sluice sim` processes. Prints a line for each step, then `N
passed, N failed`. The exit status is 1 when a step failed. Logs stay in the folder that the first
line names.
"""

import pathlib
import signal
import sys
import time
import traceback

from chart import check_chart
from cluster import NAMESPACE, Failed, free_port, until
from disruption import eviction, out_of_memory, replicas_follow_the_load
from gateway import Gateway, Load
from node import PODS
from several import (cluster_without_permission, election_without_api_server, leader_that_decides_is_killed, leader_that_serves_is_killed,
                     ledger_in_a_config_map)
from world import SETS, World, check, is_ready, serves, statefulset


def no_cluster_and_no_permission(world):
    """The status names both faults, and the gateway keeps running."""
    dead = world.cluster.kubeconfig("dead", "x", f"https://127.0.0.1:{free_port()}")
    gateway = Gateway(world.folder, "dead", dead, 'selector = "app=short"')
    trouble = until("trouble", lambda: gateway.pods()[1])
    check("cannot be reached" in trouble and "refused" in trouble, trouble)
    gateway.stop()
    gateway = Gateway(world.folder, "none", world.folder / "no.kubeconfig", 'selector = "app=short"')
    trouble = until("trouble", lambda: gateway.pods()[1])
    check("no cluster: set KUBECONFIG" in trouble, trouble)
    gateway.stop()
    stranger = world.cluster.account("stranger")
    gateway = Gateway(world.folder, "stranger", stranger, 'selector = "app=short"')
    trouble = until("trouble", lambda: gateway.pods()[1])
    check("no permission to list and watch pods" in trouble and "config/kubernetes" in trouble, trouble)
    code, text = gateway.sluice("status")
    check(code == 0 and "no permission" in text, text)
    gateway.stop()


def discovery(world):
    """New pods are warmed up and get their readiness gate. When a pod is deleted, it is cordoned
    while it still serves, so no stream is lost."""
    world.apply(statefulset("short", 2))
    world.start("discovery", 'selector = "app=short"')
    world.in_use("short-0", "short-1")
    until("pods are ready", lambda: all(is_ready(world.pod(n)) for n in ("short-0", "short-1")))
    load = Load(world.gateway)
    load.served_by(["short-0", "short-1"], {})
    world.scale("short", 3)
    load.served_by(["short-2"], {})
    before = load.since()
    world.scale("short", 2)
    until("short-2 leaves", lambda: world.gateway.states().get("short-2") == "leaving")
    deleted = world.pod("short-2")
    check(is_ready(deleted), "it was cordoned when it turned unready, not when it was deleted")
    check(world.gateway.backends()["short-2"]["state"] == "draining", world.gateway.backends()["short-2"])
    until("short-2 is gone", lambda: "short-2" not in world.gateway.states() and not world.cluster.exists(f"{PODS}/short-2"))
    load.served_by(["short-0", "short-1"], before)
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"{streams} streams, 0 lost"


def api_server_is_killed(world):
    """Streams go on, the status names the fault, and pods that come afterwards are found."""
    load = Load(world.gateway)
    load.served_by(["short-0", "short-1"], {})
    world.cluster.kill_server()
    trouble = until("trouble", lambda: world.gateway.pods()[1])
    check("cannot be reached" in trouble, trouble)
    before = load.since()
    load.served_by(["short-0", "short-1"], before)
    check(set(world.gateway.states().values()) == {"in_use"}, world.gateway.states())
    world.cluster.restart_server()
    world.scale("short", 3)
    load.served_by(["short-2"], {}, 120)
    until("no trouble", lambda: world.gateway.pods()[1] is None)
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"{streams} streams, 0 lost"


def failures(world):
    """An engine above its memory limit and a missing image have a class and a remedy."""
    engine = world.node.of("short-1")
    engine.reason = "OOMKilled"
    engine.process.process.send_signal(signal.SIGKILL)

    def said():
        pod = world.gateway.pods()[0]["short-1"]
        return pod if "why" in pod else None

    pod = until("the end of the engine is noticed", said)
    check(pod["state"] == "cordoned" and pod["why"].startswith("container_memory: ") and "limits.memory" in pod["why"], pod)
    world.in_use("short-1")
    world.apply({**statefulset("broken", 1, "registry/missing:1"), "metadata": {"name": "broken", "namespace": NAMESPACE}})
    gateway = Gateway(world.folder, "broken", world.account, 'selector = "app=broken"')
    pod = until("the image is missed", lambda: gateway.pods()[0].get("broken-0", {}).get("why") and gateway.pods()[0]["broken-0"])
    check(pod["state"] == "not_ready" and pod["why"].startswith("image_pull: registry/"), pod)
    code, text = gateway.sluice("status")
    check(code == 0 and "image_pull" in text and "pull secret" in text, text)
    gateway.stop()
    world.cluster.delete(f"{SETS}/broken")
    return pod["why"]


MANAGED = 'selector = "app=short", statefulset = "short", args = {{ max-num-seqs = {} }}'


def args(world, name):
    return world.pod(name)["spec"]["containers"][0].get("args", [])


def flags_are_applied(world):
    """The flags of the configuration reach the pods one by one from the highest number down,
    without a lost stream."""
    world.gateway.stop()
    world.scale("short", 2)
    until("two pods", lambda: not world.cluster.exists(f"{PODS}/short-2"))
    uids = {n: world.pod(n)["metadata"]["uid"] for n in ("short-0", "short-1")}
    world.start("managed", MANAGED.format(64))
    until("both serve", lambda: all(serves(world.gateway, n, 64) for n in uids), 120)
    check(all(world.pod(n)["metadata"]["uid"] != uids[n] for n in uids), "a pod was not replaced")
    check(all("--max-num-seqs=64" in args(world, n) for n in uids), "a pod has other arguments")
    uids = {n: world.pod(n)["metadata"]["uid"] for n in ("short-0", "short-1")}
    load = Load(world.gateway)
    load.served_by(["short-0", "short-1"], {})
    code, text = world.gateway.sluice("backend", "restart", "p/short-0", "--set", "max-num-seqs=32", "--wait")
    check(code != 0 and "short-1 has to get these flags first" in text, text)
    code, text = world.gateway.sluice("backend", "restart", "p/short-1", "--set", "max-num-seqs=32", "--wait")
    check(code == 0, text)
    check("--max-num-seqs=32" in args(world, "short-1") and world.pod("short-0")["metadata"]["uid"] == uids["short-0"],
          "not short-1 alone was replaced")
    spec = world.cluster.get(f"{SETS}/short")["spec"]
    check(spec["updateStrategy"]["rollingUpdate"]["partition"] == 1, spec["updateStrategy"])
    code, text = world.gateway.sluice("backend", "restart", "p/short-0", "--set", "max-num-seqs=32", "--wait")
    check(code == 0 and "--max-num-seqs=32" in args(world, "short-0"), text)
    load.served_by(["short-0", "short-1"], load.since())
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    until("gates are given", lambda: all(is_ready(world.pod(n)) for n in uids))
    return f"{streams} streams, 0 lost"


def flags_that_do_not_start_go_back(world):
    """The pod that did not start gets its old arguments again. The other pod keeps the arguments
    that it has, old or new."""
    uids = {n: world.pod(n)["metadata"]["uid"] for n in ("short-0", "short-1")}
    world.node.refused = {"short-1": "--max-num-seqs=16", "short-0": "--max-num-seqs=24"}
    load = Load(world.gateway)
    code, text = world.gateway.sluice("backend", "restart", "p/short-1", "--set", "max-num-seqs=16", "--wait")
    check(code != 0 and "unknown_flag" in text and "--no-such-flag" in text, text)
    check(serves(world.gateway, "short-1", 32) and "--max-num-seqs=32" in args(world, "short-1"), args(world, "short-1"))
    check(world.pod("short-0")["metadata"]["uid"] == uids["short-0"], "short-0 was replaced")
    code, text = world.gateway.sluice("backend", "restart", "p/short-1", "--set", "max-num-seqs=24", "--wait")
    check(code == 0, text)
    uid = world.pod("short-1")["metadata"]["uid"]
    code, text = world.gateway.sluice("backend", "restart", "p/short-0", "--set", "max-num-seqs=24", "--wait")
    check(code != 0 and "unknown_flag" in text, text)
    check(serves(world.gateway, "short-0", 32) and "--max-num-seqs=32" in args(world, "short-0"), args(world, "short-0"))
    check(world.pod("short-1")["metadata"]["uid"] == uid and serves(world.gateway, "short-1", 24), "short-1 was taken back, too")
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"{streams} streams, 0 lost; {text.strip().splitlines()[-1][:150]}"


def a_deleted_pod_comes_back(world):
    """When a node is drained, its pod is cordoned at once, and the next pod serves after its
    warm-up."""
    load = Load(world.gateway)
    load.served_by(["short-0", "short-1"], {})
    uid = world.pod("short-1")["metadata"]["uid"]
    world.cluster.delete(f"{PODS}/short-1")
    until("the next pod", lambda: world.cluster.exists(f"{PODS}/short-1") and world.pod("short-1")["metadata"]["uid"] != uid)
    until("it serves", lambda: serves(world.gateway, "short-1", 24))
    load.served_by(["short-0", "short-1"], load.since())
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"{streams} streams, 0 lost"


def others_own_the_arguments(world):
    """A change is refused before any engine is stopped, and the message names the owner of the
    arguments."""
    uids = {n: world.pod(n)["metadata"]["uid"] for n in ("short-0", "short-1")}
    taken = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "short"},
             "spec": {"template": {"spec": {"containers": [{"name": "engine", "args": ["--max-num-seqs=24"]}]}}}}
    world.cluster.patch(f"{SETS}/short?fieldManager=operator&force=true", taken, "apply")
    code, text = world.gateway.sluice("backend", "restart", "p/short-1", "--set", "max-num-seqs=16", "--wait")
    check(code != 0 and "managed_elsewhere" in text and 'conflict with "operator"' in text, text)
    check(all(world.pod(n)["metadata"]["uid"] == uids[n] for n in uids), "something was touched")
    check(serves(world.gateway, "short-0", 32) and serves(world.gateway, "short-1", 24), world.gateway.backends())
    return text.strip().splitlines()[-1][:300]


def chart(world):
    return check_chart(world.root, world.cluster)


STEPS = [
    chart, no_cluster_and_no_permission, discovery, api_server_is_killed, failures, flags_are_applied, flags_that_do_not_start_go_back,
    a_deleted_pod_comes_back, others_own_the_arguments, out_of_memory, eviction, replicas_follow_the_load, leader_that_serves_is_killed,
    leader_that_decides_is_killed, election_without_api_server, ledger_in_a_config_map, cluster_without_permission,
]


def main(root, wanted):
    began, passed, failed = time.monotonic(), 0, 0
    world = World(pathlib.Path(root))
    print(f"cluster ready after {time.monotonic() - began:.1f} s", flush=True)
    try:
        for step in STEPS:
            if wanted and step.__name__ not in wanted:
                continue
            start = time.monotonic()
            try:
                said = step(world)
                passed += 1
                print(f"ok    {step.__name__} ({time.monotonic() - start:.1f} s){': ' + said if said else ''}", flush=True)
            except Exception as problem:
                failed += 1
                if not isinstance(problem, Failed):
                    traceback.print_exc()
                print(f"FAILED {step.__name__}: {problem}", flush=True)
    finally:
        world.stop()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
