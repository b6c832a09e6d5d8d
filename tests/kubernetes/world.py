"""Parts that the steps of the suite share: the cluster, its node, the gateway under test, and the
objects that they make."""

import pathlib
import tempfile

from chart import permissions
from cluster import NAMESPACE, Cluster, Failed, until
from gateway import Gateway, binary
from node import GATE, PODS, Node

SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"


def check(condition, message):
    if not condition:
        raise Failed(message)


def statefulset(name, replicas=None, image="registry/sluice:1", command=("sluice", "sim", "m", "--port", "8000"), memory=None):
    """A StatefulSet of engines without container arguments, which the gateway sets. Without
    `replicas` it has one replica, and another field manager may set the number."""
    labels = {"app": name}
    container = {"name": "engine", "image": image, "command": list(command), "terminationMessagePolicy": "FallbackToLogsOnError"}
    if memory:
        container["resources"] = {"limits": {"memory": memory}}
    pod = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 30, "readinessGates": [{"conditionType": GATE}],
           "containers": [container]}
    spec = {"serviceName": name, "podManagementPolicy": "Parallel", "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod}}
    if replicas is not None:
        spec["replicas"] = replicas
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


class World:
    def __init__(self, root):
        self.root = root
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-kubernetes-"))
        print(f"logs: {self.folder}", flush=True)
        self.cluster = Cluster(root, self.folder)
        self.node = Node(self.cluster, binary(), self.folder)
        self.gateway = None
        permissions(root, self.cluster, NAMESPACE, ["short", "broken", "led", "load", "heavy"])
        self.account = self.cluster.account("sluice")

    def apply(self, manifest):
        path = f"{SETS}/{manifest['metadata']['name']}?fieldManager=owner&force=true"
        self.cluster.patch(path, manifest, "apply")

    def scale(self, name, replicas):
        self.cluster.patch(f"{SETS}/{name}", {"spec": {"replicas": replicas}})

    def start(self, name, pods):
        self.gateway = Gateway(self.folder, name, self.account, pods)

    def in_use(self, *names, seconds=60):
        until(f"{names} in use", lambda: all(self.gateway.states().get(n) == "in_use" for n in names), seconds)

    def pod(self, name):
        return self.cluster.get(f"{PODS}/{name}")

    def stop(self):
        for part in (self.gateway, self.node, self.cluster):
            if part:
                part.stop()


def is_ready(pod):
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def serves(gateway, name, seqs=None):
    """Whether the gateway's engine of this pod serves, with this `max-num-seqs` if one is given."""
    engine = gateway.backends().get(name, {}).get("engine") or {}
    return engine.get("step") == "serve" and (seqs is None or f"max-num-seqs={seqs}" in engine["settings"])
