"""The memory limit of a container, enforced by the kernel through a memory cgroup, as for a
kubelet.

It needs root and writable cgroups of version 1, or the root cgroup of version 2. Otherwise there is
no limit, and `make` returns None.
"""

import os
import pathlib
import signal
import time

ROOT = pathlib.Path("/sys/fs/cgroup")


class MemoryGroup:
    def __init__(self, folder, limit, events):
        self.folder, self.limit, self.events = folder, limit, events

    @classmethod
    def make(cls, name, size):
        """A group with a limit in bytes; None where no group can be made."""
        name = f"sluice-{os.getpid()}-{name}"
        own = [line.split(":", 2)[2] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
        if own:
            group = cls(ROOT / "memory" / own[0].strip("/") / name, "memory.limit_in_bytes", "memory.oom_control")
        else:
            group = cls(ROOT / name, "memory.max", "memory.events")
        try:
            group.folder.mkdir()
            (group.folder / group.limit).write_text(str(size))
            group.kills()
        except (OSError, StopIteration):
            group.remove()
            return None
        return group

    def enter(self, words):
        """The words of a command that runs in the group from its start on."""
        return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self.folder / "cgroup.procs", *words]

    def kills(self):
        """The number of processes that the kernel has killed because of the limit."""
        lines = (self.folder / self.events).read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))

    def processes(self):
        try:
            return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def end(self):
        """Kills all processes in the group, because the processes of a container end together."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def remove(self):
        for _ in range(50):
            self.end()
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
            else:
                return
