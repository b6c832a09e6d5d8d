//! The resources on which defaults depend: cores, memory and open files.
//!
//! Memory is the smallest of the machine's memory and the limits of all control groups of the
//! process (v2, or the memory controller of v1), because a container is killed at the limit of its
//! group. The number of open files is the hard limit, to which `sluice serve` raises the soft
//! limit.

use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit};

use super::limits;

/// Bytes of memory that are assumed if the size cannot be read.
const MEMORY_UNKNOWN: u64 = 2 << 30;

/// The resources of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Cores, at most [`limits::MAX_THREADS`].
    pub cores: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Files that may be open at once, connections included.
    pub files: u64,
}

impl Machine {
    /// A machine for tests: 16 GiB and 65,536 files.
    pub const fn with_cores(cores: usize) -> Self {
        Self { cores, memory: 16 << 30, files: 1 << 16 }
    }

    /// The resources of this process.
    pub fn of_process() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(limits::MAX_THREADS);
        let memory = memory(Path::new("/proc"), Path::new("/sys/fs/cgroup")).unwrap_or(MEMORY_UNKNOWN);
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1_024, |(_, hard)| hard);
        Self { cores, memory, files }
    }
}

/// Bytes of memory that processes of this machine, in the control groups of this process, could
/// still take. Files that the kernel only caches do not count as in use. `None`: unknown.
pub fn available_memory() -> Option<u64> {
    available(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

fn available(proc: &Path, cgroup: &Path) -> Option<u64> {
    least(proc, cgroup, "MemAvailable:", |group, [limit, in_use, cached]| {
        let left = number(group, limit)?.saturating_sub(number(group, in_use)?);
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let line = stat.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse::<u64>().ok());
        Some(left.saturating_add(line.unwrap_or(0)))
    })
}

fn memory(proc: &Path, cgroup: &Path) -> Option<u64> {
    least(proc, cgroup, "MemTotal:", |group, [limit, ..]| number(group, limit))
}

/// The files of a control group, in version 2 and 1: the limit and the memory in use; and the line
/// of `memory.stat` for cached files.
type GroupFiles = [&'static str; 3];
const VERSION_2: GroupFiles = ["memory.max", "memory.current", "inactive_file "];
const VERSION_1: GroupFiles = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];

/// The least of a line of `meminfo`, in bytes, and of a value of each control group of the process.
fn least(proc: &Path, cgroup: &Path, line: &str, of_group: impl Fn(&Path, GroupFiles) -> Option<u64>) -> Option<u64> {
    let info = std::fs::read_to_string(proc.join("meminfo")).ok()?;
    let line = info.lines().find_map(|found| found.strip_prefix(line))?;
    let machine = line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1_024;
    let groups = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let values = groups.lines().filter_map(|line| least_of_groups(line, cgroup, &of_group));
    Some(values.fold(machine, u64::min))
}

/// The least value of the group in a line of `/proc/self/cgroup`, `ID:CONTROLLERS:PATH`, and of the
/// groups around it.
fn least_of_groups(line: &str, cgroup: &Path, of_group: &impl Fn(&Path, GroupFiles) -> Option<u64>) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let (root, files) = match controllers {
        "" => (cgroup.to_owned(), VERSION_2),
        list if list.split(',').any(|name| name == "memory") => (cgroup.join("memory"), VERSION_1),
        _ => return None,
    };
    // Inside a container the path may be the host's, which does not exist here. Then the root is
    // the container's group.
    let folder = root.join(path.trim_start_matches('/'));
    let around = folder.ancestors().take_while(|at| at.starts_with(&root)).map(PathBuf::from);
    around.filter_map(|at| of_group(&at, files)).min()
}

/// The number in a file of a group; `None` without a limit.
fn number(group: &Path, file: &str) -> Option<u64> {
    std::fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn memory_is_the_smallest_of_the_machine_and_every_group_around_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let (proc, cgroup) = (folder.path().join("proc"), folder.path().join("cgroup"));
        assert_eq!(memory(&proc, &cgroup), None);
        write(&proc, "meminfo", "MemFree: 1 kB\nMemTotal:       8000 kB\n");
        assert_eq!(memory(&proc, &cgroup), Some(8_192_000));
        write(&proc, "self/cgroup", "0::/a/b\n");
        assert_eq!(memory(&proc, &cgroup), Some(8_192_000));
        write(&cgroup, "a/b/memory.max", "max\n");
        write(&cgroup, "a/memory.max", "4000000\n");
        assert_eq!(memory(&proc, &cgroup), Some(4_000_000), "a group around ours");
        write(&cgroup, "memory.max", "3000000\n");
        assert_eq!(memory(&proc, &cgroup), Some(3_000_000), "the root, which is ours inside a container");
        write(&proc, "self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/a\n");
        write(&cgroup, "memory/a/memory.limit_in_bytes", "2000000\n");
        assert_eq!(memory(&proc, &cgroup), Some(2_000_000), "version 1");
        write(&cgroup, "memory/a/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(memory(&proc, &cgroup), Some(8_192_000), "no limit");
    }

    #[test]
    fn available_memory_is_the_least_that_the_machine_and_a_group_have_left_or_only_cache() {
        let folder = tempfile::tempdir().unwrap();
        let (proc, cgroup) = (folder.path().join("proc"), folder.path().join("cgroup"));
        write(&proc, "meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n");
        write(&proc, "self/cgroup", "0::/a\n");
        write(&cgroup, "a/memory.max", "4000000\n");
        write(&cgroup, "a/memory.current", "3500000\n");
        assert_eq!(available(&proc, &cgroup), Some(500_000));
        write(&cgroup, "a/memory.stat", "anon 1\ninactive_file 200000\nactive_file 7\n");
        assert_eq!(available(&proc, &cgroup), Some(700_000));
        write(&cgroup, "a/memory.max", "max\n");
        assert_eq!(available(&proc, &cgroup), Some(5_120_000), "the group has no limit");
    }

    #[test]
    fn this_machine_is_plausible() {
        let machine = Machine::of_process();
        assert!(machine.cores >= 1 && machine.memory > 64 << 20 && machine.files >= 64, "{machine:?}");
    }
}
