"""The scheduler and the kubelet for the pods of the suite: engines are `sluice sim` processes on
loopback addresses.

A pod gets a separate address (127.0.0.2 and on) and runs the command of its container as a process.
Its status has the fields that a kubelet would set: running, ready, exit status, restarts. A deleted
pod gets SIGTERM after its preStop sleep and is gone when its process has ended. Pods with an image
that contains `missing` cannot be pulled. `limits.memory` of the container becomes the limit of a
memory cgroup, where one can be made. The kernel kills an engine that exceeds it, and only then the
reason is OOMKilled.
"""

import http.client
import pathlib
import signal
import sys
import threading
import time
import traceback

from cluster import NAMESPACE, Process, Refused
from memory import MemoryGroup

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PRE_STOP_SECONDS = 2.0
GATE = "sluice.dev/warm"


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Engine:
    """The process of a pod."""

    def __init__(self, pod, address, binary, folder, refused=None):
        container = pod["spec"]["containers"][0]
        self.uid, self.name, self.address = pod["metadata"]["uid"], pod["metadata"]["name"], address
        command = container["command"]
        words = command[1:] + container.get("args", []) + ["--host", address]
        self.words, self.log = words, folder / f"{self.name}.log"
        self.program = [binary] if command[0] == "sluice" else [sys.executable, "-B", pathlib.Path(__file__).with_name(command[0])]
        memory = container.get("resources", {}).get("limits", {}).get("memory")
        self.group = MemoryGroup.make(self.uid, int(memory.removesuffix("Mi")) << 20) if memory else None
        self.kills = 0
        self.restarts, self.last, self.going, self.reason, self.process = 0, None, None, None, None
        self.missing = "missing" in container["image"]
        if refused in words:
            # The engine fails as if it did not know a flag.
            self.words = ["sim", "m", "--no-such-flag"]
        if not self.missing:
            self.start()

    def start(self):
        words = [*self.program, *self.words]
        self.process = Process(self.name, self.group.enter(words) if self.group else words, self.log)

    def healthy(self, port=8000):
        if self.process is None or not self.process.runs():
            return False
        try:
            connection = http.client.HTTPConnection(self.address, port, timeout=1)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def restart_if_ended(self):
        if self.process is not None and not self.process.runs() and self.going is None:
            code = self.process.process.returncode
            code = 128 - code if code < 0 else code
            if self.group:
                self.group.end()
                kills = self.group.kills()
                if kills > self.kills:
                    self.kills, self.reason = kills, "OOMKilled"
            self.last = {"terminated": {"exitCode": code, "reason": self.reason or "Error", "startedAt": now(), "finishedAt": now(),
                                        "message": self.log.read_text(errors="replace")[-2000:]}}
            self.restarts, self.reason = self.restarts + 1, None
            self.start()

    def stop(self, how=signal.SIGTERM):
        if self.process:
            self.process.stop(how)
        if self.group:
            self.group.remove()

    def container(self):
        state = {"running": {"startedAt": now()}}
        if self.missing:
            state = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/missing:1"'}}
        return {"name": "engine", "image": "registry/sluice:1", "imageID": "", "ready": self.healthy(), "restartCount": self.restarts,
                "state": state, "lastState": self.last or {}}


class Node(threading.Thread):
    def __init__(self, cluster, binary, folder):
        super().__init__(daemon=True)
        self.cluster, self.binary, self.folder = cluster, binary, folder
        self.engines, self.ended, self.next, self.said = {}, False, 2, {}
        # For each pod, an argument that prevents the start of its engine.
        self.refused = {}
        self.start()

    def run(self):
        while not self.ended:
            try:
                self.look()
            except OSError:
                pass  # The API server is away.
            except Refused as refused:
                if refused.status not in (404, 409):
                    traceback.print_exc()
            except Exception:
                traceback.print_exc()
            time.sleep(0.1)

    def look(self):
        pods = {pod["metadata"]["uid"]: pod for pod in self.cluster.get(PODS)["items"]}
        for uid, pod in pods.items():
            self.care(uid, pod)
        for uid in [uid for uid in self.engines if uid not in pods]:
            self.engines.pop(uid).stop()

    def care(self, uid, pod):
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            self.cluster.post(f"{PODS}/{name}/binding", {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                                                          "target": {"kind": "Node", "name": "node"}})
            return
        engine = self.engines.get(uid)
        if engine is None:
            engine = self.engines[uid] = Engine(pod, f"127.0.0.{self.next}", self.binary, self.folder, self.refused.get(name))
            self.next += 1
        if pod["metadata"].get("deletionTimestamp"):
            engine.going = engine.going or time.monotonic()
            if engine.process and time.monotonic() - engine.going >= PRE_STOP_SECONDS:
                engine.process.process.send_signal(signal.SIGTERM)
            if engine.process is None or not engine.process.runs():
                self.cluster.delete(f"{PODS}/{name}", 0)
            return
        engine.restart_if_ended()
        self.say(name, uid, pod, engine)

    def say(self, name, uid, pod, engine):
        container = engine.container()
        given = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])]
        ready = container["ready"]
        conditions = {"PodScheduled": True, "ContainersReady": ready, "Ready": ready and all(given.get(g) == "True" for g in gates)}
        said = (container["ready"], engine.restarts, conditions["Ready"])
        if self.said.get(uid) == said:
            return
        status = {"phase": "Pending" if engine.missing else "Running", "podIP": None if engine.missing else engine.address,
                  "containerStatuses": [container],
                  "conditions": [{"type": t, "status": str(v), "lastTransitionTime": now()} for t, v in conditions.items()]}
        self.cluster.patch(f"{PODS}/{name}/status", {"metadata": {"uid": uid}, "status": status}, "strategic")
        self.said[uid] = said

    def of(self, name):
        return next(engine for engine in list(self.engines.values()) if engine.name == name and engine.going is None)

    def stop(self):
        self.ended = True
        self.join(10)
        for engine in self.engines.values():
            engine.stop(signal.SIGKILL)
