//! `launch.copies`: one backend of the file stands for several equal processes. `ranks.rs` repeats
//! each copy for the ranks of the process.
//!
//! The document is changed before it is read, so the rest of the gateway knows only backends with
//! one process each. Copy `i` of the backend `worker` is the backend `worker-i`. It gets the port
//! `port + i`, and the device at position `i` of `gpu`, modulo the length of the list. So a change
//! of the number of copies does not change the copies that stay.
//!
//! A `copies` that cannot be read stays in the document, and reading reports it. A mistake in the
//! table of the backend is in all copies, but is reported once ([`once`]). Bounds:
//! [`MAX_COPIES`](super::limits::MAX_COPIES) for each backend; at [`MAX_BACKENDS`] the expansion
//! ends, and reading reports that there are too many.

use super::file::{Document, Entry, Table, Value};
use super::limits::{MAX_BACKENDS, MAX_COPIES};
use super::problem::{Problem, Situation};
use super::ranks;

/// Replaces each backend that has `launch.copies` by the copies, and each backend that has `ranks`
/// by the ranks. For each such backend, returns the paths of all copies and ranks except the first.
pub(super) fn expand(document: &mut Document, problems: &mut Vec<Problem>) -> Vec<String> {
    let mut further = Vec::new();
    let mut count = 0;
    let Some(Entry { value: Value::List(pools), .. }) = document.root.get_mut("pool") else { return further };
    for (index, pool) in pools.iter_mut().enumerate() {
        let Value::Table(pool) = &mut pool.value else { continue };
        let ranks_of_pool = ranks::of_pool(pool);
        let Some(Entry { value: Value::List(backends), .. }) = pool.get_mut("backend") else { continue };
        let written = std::mem::take(backends);
        for backend in written {
            let path = |number: usize| format!("pool[{index}].backend[{number}]");
            let first = backends.len();
            let own = match copies(&backend) {
                _ if count > MAX_BACKENDS => vec![backend],
                Some(copies) => {
                    problems.extend(beyond_ports(&backend, copies, &path(first)));
                    (0..copies).map(|number| copy(&backend, number)).collect()
                }
                None => vec![backend],
            };
            backends.extend(own.into_iter().flat_map(|own| match count > MAX_BACKENDS {
                true => vec![own],
                false => ranks::expand(own, ranks_of_pool),
            }));
            further.extend((first + 1..backends.len()).map(path));
            count += backends.len() - first;
        }
    }
    further
}

/// The number of copies of a backend. `None` if the backend has no `copies`, or the number cannot
/// be used.
fn copies(backend: &Entry) -> Option<usize> {
    let Value::Int(copies) = launch_of(backend)?.get("copies")?.value else { return None };
    usize::try_from(copies).ok().filter(|copies| (1..=MAX_COPIES).contains(copies))
}

fn launch_of(backend: &Entry) -> Option<&Table> {
    backend.value.table()?.get("launch")?.value.table()
}

/// The problem that the last copies would have ports above 65535, if they would.
fn beyond_ports(backend: &Entry, copies: usize, path: &str) -> Option<Problem> {
    let entry = launch_of(backend)?.get("port")?;
    let Value::Int(port) = entry.value else { return None };
    let last = port + copies as i64 - 1;
    let is_beyond = (1..=i64::from(u16::MAX)).contains(&port) && last > i64::from(u16::MAX);
    is_beyond.then(|| {
        let situation = Situation::PortsOfCopies { copies, first: port, last };
        Problem::new(format!("{path}.launch.port"), entry.origin, situation)
    })
}

fn copy(backend: &Entry, number: usize) -> Entry {
    let mut backend = backend.clone();
    let Value::Table(keys) = &mut backend.value else { return backend };
    if let Some(Entry { value: Value::Text(name), .. }) = keys.get_mut("name")
        && !name.is_empty()
    {
        *name = format!("{name}-{number}");
    }
    let Some(Entry { value: Value::Table(launch), .. }) = keys.get_mut("launch") else { return backend };
    launch.remove("copies");
    if let Some(Entry { value: Value::Int(port), .. }) = launch.get_mut("port")
        && (1..=i64::from(u16::MAX)).contains(port)
    {
        // A port above 65535 was reported before; port 0 clashes with no other backend.
        let own = *port + number as i64;
        *port = if own > i64::from(u16::MAX) { 0 } else { own };
    }
    if let Some(Entry { value: Value::List(devices), .. }) = launch.get_mut("gpu")
        && !devices.is_empty()
    {
        let own = devices.swap_remove(number % devices.len());
        *devices = vec![own];
    }
    backend
}

/// Removes problems of further copies that are already reported for the first copy.
pub(super) fn once(problems: &mut Vec<Problem>, further: &[String]) {
    let is_further = |problem: &Problem| {
        further.iter().any(|path| {
            problem
                .path()
                .strip_prefix(path.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        })
    };
    let (repeated, mut kept): (Vec<Problem>, Vec<Problem>) = std::mem::take(problems).into_iter().partition(is_further);
    for problem in repeated {
        let same = |other: &Problem| other.origin() == problem.origin() && other.situation() == problem.situation();
        if !kept.iter().any(same) {
            kept.push(problem);
        }
    }
    *problems = kept;
}
