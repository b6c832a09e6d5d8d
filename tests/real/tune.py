"""`sluice tune --real` on a real vLLM server, with a grid of 2 x 2. One tuner is killed, and
another one completes the work.

Usage: tune.py ROOT      (ROOT from ./setup; `./tune` does both steps)

1. the tuner starts vLLM with its default flags and measures it;
2. when a trial is in the journal and an engine runs, the tuner gets SIGKILL, which leaves the
   engine running;
3. `--resume` finds that engine, tries the rest of the grid, confirms the winner and exits with 0.
   The earlier lines of the journal are unchanged, the table has every setting, and no process is
   left.

The dimensions of the grid are a flag of vLLM and a key of the gateway. Two rows have the flags of
the default, and with this seed they come first. So they need no start of their own, and there are
three starts in all. The last line is `tune: passed` or `tune: failed`. The exit status is 1 when it
failed. Logs stay in ROOT/tune/. About three minutes on two cores.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from engine import START_SECONDS, Failed, environment, free_port, until
from gateway import binary

SEQS, SLOTS = (4, 32), (8, 64)
SEED = "2"
# Two time limits. The first is for the first start, with the list of flags, and its trial. The
# second is for the whole rest of the grid.
TRIAL_SECONDS, REST_SECONDS = 2 * START_SECONDS, 5 * START_SECONDS


def check(condition, message):
    if not condition:
        raise Failed(message)


class Tuning:
    """A folder with a tuning of one engine."""

    def __init__(self, root):
        self.folder = root / "tune"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in {**environment(root), "TUNE_TEST": str(self.folder)}.items())
        command = json.dumps([str(root / "venv/bin/vllm"), "serve", str(root / "tiny")])
        args = ('served-model-name = "tiny", load-format = "dummy", enforce-eager = true, seed = 0, max-model-len = 4096, '
                f"max-num-seqs = {SEQS[0]}, max-num-batched-tokens = 2048")
        (self.folder / "sluice.toml").write_text("\n".join([
            "[fleet]", "start_timeout_scale = 4",
            "[[model]]", 'name = "tiny"', "[[pool]]", 'name = "p"',
            "[[pool.backend]]", 'name = "cpu"', "[pool.backend.launch]", f"command = {command}",
            f"port = {free_port()}", f"env = {{ {env} }}", f"args = {{ {args} }}", ""]))
        (self.folder / "grid.toml").write_text("\n".join([
            'config = "sluice.toml"',
            "[[traffic]]", "concurrency = 32", "requests = 96",
            'class = [{ name = "chat", in = 100, out = 32, e2el = "10s" }]',
            "[tune]", 'objective = "all.tokens"', 'beside = ["chat.e2el.p99"]', "runs = 2",
            "[[tune.dimension]]", 'key = "vllm.max-num-seqs"', f"values = {list(SEQS)}",
            "[[tune.dimension]]", 'key = "pool.p.slots"', f"values = {list(SLOTS)}", ""]))

    def begin(self, name, *flags):
        with open(self.folder / f"{name}.out", "wb") as out, open(self.folder / f"{name}.err", "wb") as err:
            return subprocess.Popen([binary(), "tune", "grid.toml", "--real", "--seed", SEED, *flags], cwd=self.folder, stdin=subprocess.DEVNULL,
                                    stdout=out, stderr=err)

    def text(self, name):
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""

    def trials(self):
        return [json.loads(line) for line in self.text("grid.journal").splitlines(True)[1:] if line.endswith("\n")]

    def processes(self):
        """pid -> command line of every process of the test's engines, found by their environment.
        """
        mark, found = f"TUNE_TEST={self.folder}".encode(), {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                except OSError:
                    pass
        return found


def run(tuning):
    tuner = tuning.begin("killed")
    try:
        until("a trial is in the journal", lambda: tuning.trials() or tuner.poll() is not None, TRIAL_SECONDS, 0.1)
        until("an engine runs", lambda: tuning.processes() or tuner.poll() is not None, TRIAL_SECONDS, 0.1)
        check(tuner.poll() is None, f"the tuner ended with {tuner.poll()}: {tuning.text('killed.err')}")
    finally:
        tuner.kill()
        tuner.wait()
    left = tuning.processes()
    check(left, "no engine was left by the tuner that was killed")
    before = tuning.text("grid.journal")
    print(f"tune: killed after {len(tuning.trials())} trials; {len(left)} processes of an engine are left", flush=True)
    rest = tuning.begin("resumed", "--resume")
    try:
        status = rest.wait(REST_SECONDS)
    finally:
        if rest.poll() is None:
            rest.terminate()
            rest.wait(60)
    out, err = tuning.text("resumed.out"), tuning.text("resumed.err")
    print(err + out, flush=True)
    check(status == 0, f"the tuner that was resumed ended with {status}")
    check("p/cpu: its engine runs already" in err or "p/cpu: an engine was left" in err, "it did not find the engine")
    check(tuning.text("grid.journal").startswith(before[:before.rindex("\n") + 1]), "the journal has lost trials")
    tried = {(t["setting"].get("vllm.max-num-seqs"), t["setting"].get("pool.p.slots")) for t in tuning.trials()}
    check(tried == {(None, None), *((s, t) for s in SEQS for t in SLOTS)}, f"not the grid: {tried}")
    unmeasured = [t for t in tuning.trials() if t["outcome"]["is"] not in ("measured", "worse")]
    check(not unmeasured, f"not measured: {unmeasured}")
    check(f"best: pool.p.slots={SLOTS[1]} max-num-seqs={SEQS[1]}: " in out, "32 sequences at once are not better than 4 or 8")
    check(not tuning.processes(), f"left behind: {tuning.processes()}")


def main():
    began, tuning = time.monotonic(), Tuning(pathlib.Path(sys.argv[1]).resolve())
    try:
        run(tuning)
        result = "passed"
    except (Failed, subprocess.TimeoutExpired) as error:
        print(f"tune: {error}", flush=True)
        result = "failed"
    finally:
        for pid in tuning.processes():
            os.kill(pid, signal.SIGKILL)
    print(f"tune: {result} after {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(result != "passed")


if __name__ == "__main__":
    main()
