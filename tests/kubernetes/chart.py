"""The chart: the verdicts of the real API server and of the gateway on its rendered forms (render),
and values that it refuses."""

import os
import pathlib
import re
import subprocess

from cluster import Failed
from gateway import binary

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "config/kubernetes"
NAMESPACE = "chart"
# API groups and versions that Kubernetes 1.20 does not serve.
NEWER = ("keda.sh/", "monitoring.coreos.com/", "autoscaling/v2")


def permissions(root, cluster, namespace, names):
    """The permissions that the chart gives to two gateways, for StatefulSets of these names."""
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

    # The lint, and the comparison with the rendered forms in the tree.
    code, out, error = run(ROOT / "tests/kubernetes/render")
    if code != 0:
        raise Failed(out + error)
    every = ROOT / "tests/kubernetes/every-value.yaml"
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
