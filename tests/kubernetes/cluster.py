"""A real API server with etcd and the controllers of StatefulSets, on loopback ports, and a client
for it.

It uses only Python's standard library. Everything is in one folder and ends with the process.
"""

import base64
import http.client
import json
import pathlib
import signal
import socket
import ssl
import subprocess
import time

ADMIN = "admin-token"
NAMESPACE = "inference"
# Time limit of a start on two cores that other programs use too.
START_SECONDS = 90
TYPES = {"merge": "application/merge-patch+json", "strategic": "application/strategic-merge-patch+json",
         "apply": "application/apply-patch+yaml"}


class Failed(Exception):
    pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(what, condition, seconds=60, pause=0.1):
    """Waits for a condition with a deadline. Returns the value of the condition."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        last = condition()
        if last:
            return last
        time.sleep(pause)
    raise Failed(f"not within {seconds} s: {what}")


class Process:
    def __init__(self, name, words, log, env=None):
        self.name, self.words, self.log_path, self.env = name, [str(w) for w in words], log, env
        self.start()

    def start(self):
        self.log = open(self.log_path, "ab")
        self.process = subprocess.Popen(self.words, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL, env=self.env)

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def runs(self):
        return self.process.poll() is None


class Refused(Exception):
    def __init__(self, status, answer):
        super().__init__(f"{status}: {answer.get('message', answer)}")
        self.status = status


class Cluster:
    def __init__(self, root, folder):
        self.bin, self.folder = root / "bin", folder
        self.port, store, peer = free_port(), free_port(), free_port()
        self.address = f"https://127.0.0.1:{self.port}"
        subprocess.run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"], check=True, capture_output=True)
        (folder / "tokens").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
        self.parts = [Process("etcd", [self.bin / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync",
                                       "--listen-client-urls", f"http://127.0.0.1:{store}",
                                       "--advertise-client-urls", f"http://127.0.0.1:{store}",
                                       "--listen-peer-urls", f"http://127.0.0.1:{peer}"], folder / "etcd.log")]
        key = folder / "sa.key"
        # The server advertises an address that is not loopback; no client uses this address.
        self.server = Process("api", [
            self.bin / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{store}", f"--cert-dir={folder}/certs",
            f"--secure-port={self.port}", "--bind-address=127.0.0.1", "--advertise-address=192.0.2.2",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}", f"--token-auth-file={folder}/tokens", "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true"], folder / "api.log")
        self.parts.insert(0, self.server)
        self.ready()
        self.kubeconfig("admin", ADMIN)
        self.parts.insert(0, Process("controllers", [
            self.bin / "kube-controller-manager", f"--kubeconfig={folder}/admin.kubeconfig", "--leader-elect=false",
            "--controllers=statefulset,disruption,serviceaccount,namespace", "--port=0", f"--secure-port={free_port()}",
            f"--cert-dir={folder}/certs"], folder / "controllers.log"))
        self.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        until("service account", lambda: self.exists(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"))

    def ready(self):
        def asked():
            try:
                return self.call("GET", "/readyz")[0] == 200
            except OSError:
                return False

        until("the API server is ready", asked, START_SECONDS)

    def kill_server(self):
        self.server.stop(signal.SIGKILL)

    def restart_server(self):
        self.server.start()
        self.ready()

    def stop(self):
        for part in self.parts:
            part.stop()

    def kubeconfig(self, name, token, address=None):
        """Writes a configuration for clients. Returns its path."""
        path = self.folder / f"{name}.kubeconfig"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": address or self.address,
                          "certificate-authority-data": base64.b64encode((self.folder / "certs/apiserver.crt").read_bytes()).decode()}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))
        return path

    def account(self, name):
        """The configuration with the token of a service account, which is created if it does not
        exist."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        if not self.exists(f"{path}/{name}"):
            self.post(path, {"metadata": {"name": name}})
        answer = self.post(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token",
                           {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": ["https://kubernetes.default.svc"]}})
        return self.kubeconfig(name, answer["status"]["token"])

    def call(self, method, path, body=None, kind="application/json"):
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=15, context=ssl._create_unverified_context())
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None,
                               {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, {"message": text.decode(errors="replace")}

    def done(self, *arguments, **named):
        status, answer = self.call(*arguments, **named)
        if status >= 300:
            raise Refused(status, answer)
        return answer

    def exists(self, path):
        return self.call("GET", path)[0] == 200

    def get(self, path):
        return self.done("GET", path)

    def post(self, path, body):
        return self.done("POST", path, body)

    def patch(self, path, body, how="merge"):
        return self.done("PATCH", path, body, TYPES[how])

    def delete(self, path, grace=None):
        return self.done("DELETE", path, {} if grace is None else {"gracePeriodSeconds": grace})

    def kubectl(self, *words, text=None):
        done = subprocess.run([self.bin / "kubectl", f"--kubeconfig={self.folder}/admin.kubeconfig", "--cache-dir", self.folder / "kubectl", *words],
                              input=text, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr
