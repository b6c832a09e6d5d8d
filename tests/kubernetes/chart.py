"""The chart: lint, its rendered forms, what the real API server and the gateway say about them, and values that it refuses.

SLUICE_UPDATE=1 writes the rendered forms: config/kubernetes.yaml, for people without helm, and one that uses every value.
"""

import os
import pathlib
import re
import subprocess

from cluster import Failed
from gateway import binary

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "config/kubernetes"
HEAD = """# The gateway before two vLLM engines in Kubernetes, which it finds by their labels: the chart in config/kubernetes with its own values,
# for people without helm. .github/docs/kubernetes.md says what is to be replaced, and operating.md why times are as they are.
#
#   kubectl create secret generic sluice --from-literal=admin-token="$(openssl rand -hex 24)"
#   kubectl apply --server-side -f config/kubernetes.yaml
"""
NAMESPACE = "chart"
# What Kubernetes 1.20 does not serve.
NEWER = ("keda.sh/", "monitoring.coreos.com/", "autoscaling/v2")


def permissions(root, cluster, namespace, names):
    """What the chart lets the gateways do, two of them, for StatefulSets of these names."""
    sets = ["replicas=2"] + [f"pools[{number}].{key}={value}" for number, name in enumerate(names)
            for key, value in (("name", name), ("managed", "true"), ("engines.replicas", 1), ("engines.image", "x"), ("engines.command[0]", "x"))]
    done = subprocess.run([root / "bin/helm", "template", "sluice", CHART, "--namespace", namespace, "-s", "templates/rbac.yaml", "--set", ",".join(sets)],
                          capture_output=True, text=True, timeout=60)
    text = done.stdout
    for name in names:
        text = text.replace(f'"sluice-{name}"', f'"{name}"')
    code, said = cluster.kubectl("apply", "-n", namespace, "-f", "-", text=text)
    if done.returncode or code:
        raise Failed(done.stderr + said)


def check_chart(root, cluster):
    helm = root / "bin/helm"

    def run(*words, text=None):
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, input=text)
        return done.returncode, done.stdout, done.stderr

    def render(*words):
        code, out, error = run(helm, "template", "sluice", CHART, "--namespace", NAMESPACE, *words)
        return out if code == 0 else f"refused: {error}"

    code, out, error = run(helm, "lint", "--strict", CHART)
    if code != 0:
        raise Failed(out + error)
    every = ROOT / "tests/kubernetes/every-value.yaml"
    golden = {ROOT / "config/kubernetes.yaml": HEAD + render("--namespace", "default"),
              ROOT / "tests/golden/kubernetes_every_value.yaml": render("-f", every)}
    for path, text in golden.items():
        if os.environ.get("SLUICE_UPDATE"):
            path.write_text(text)
        if not path.exists() or path.read_text() != text:
            raise Failed(f"{path} is out of date: SLUICE_UPDATE=1 tests/kubernetes/run chart")
    if not cluster.exists(f"/api/v1/namespaces/{NAMESPACE}"):
        cluster.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    objects = 0
    for words in ([], ["-f", every]):
        text = render("--kube-version", "1.20.2", *words)
        served = [part for part in text.split("\n---\n") if not any(f"apiVersion: {group}" in part for group in NEWER)]
        said, answer = cluster.kubectl("apply", "--server-side", "--dry-run=server", "-n", NAMESPACE, "-f", "-", text="\n---\n".join(served))
        if said != 0:
            raise Failed(answer)
        objects += len(answer.strip().splitlines())
        toml = re.search(r"  sluice\.toml: \|\n((?:    .*\n|\n)+)", text).group(1)
        file = cluster.folder / "chart.toml"
        file.write_text(re.sub(r"^    ", "", toml, flags=re.M))
        done = subprocess.run([binary(), "check", file], capture_output=True, text=True, env={**os.environ, "SLUICE_ADMIN_TOKEN": "t"})
        if done.returncode != 0:
            raise Failed(done.stdout + done.stderr)
    for words, why in ((["--set", "leader=me"], "leader"), (["--set", "replicas=two"], "integer"),
                       (["--set", "reeplicas=2"], "reeplicas"), (["--set", "pools[0].name=all,pools[0].managed=true"], "has no engines")):
        said = render(*words)
        if "refused" not in said or why not in said:
            raise Failed(f"{words}: {said[:300]}")
    return f"{objects} objects accepted by a dry run"
