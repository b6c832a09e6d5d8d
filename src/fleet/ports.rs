//! Ports for engines that are configured without one.
//!
//! The next gateway looks for a surviving engine at the old port. So an engine keeps the port over
//! reloads and restarts of the gateway, and assigned ports are stored in `ports.json`, next to the
//! journal. A new engine gets the lowest port of the range that is not configured, not assigned and
//! free to listen on. If another process holds the assigned port, the engine gets another one.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::TcpListener;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::driver::process::is_running;
use super::state_folder;

const FILE: &str = "ports.json";

/// Why there is no port.
#[derive(Debug, thiserror::Error)]
pub enum PortsError {
    /// No port of the range is free.
    #[error(
        "fleet.ports: no port from {first} to {last} is free for {engine}; make the range larger, or configure a port for the engine"
    )]
    None {
        /// First of the range.
        first: u16,
        /// Last of the range.
        last: u16,
        /// The engine without a port.
        engine: String,
    },
    /// The port is now configured for one engine, but another engine still runs on it.
    #[error(
        "port {port} of {engine} is in use by {holder} until the gateway restarts; configure another port for {engine}"
    )]
    Held {
        /// The port.
        port: u16,
        /// The engine that should get the port.
        engine: String,
        /// The engine that has the port.
        holder: String,
    },
    /// The assigned ports cannot be read or stored.
    #[error("fleet.state: {path}: {source}; name a folder that the gateway may write to", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Assigns a port to each of `engines` (`pool/backend`, and the port if it runs) and stores them.
/// `folder` holds the journal; `taken` are configured ports.
///
/// # Errors
/// The range is too small, or the file cannot be read or written. Then no port is assigned.
pub fn assign(
    folder: &Path,
    range: &RangeInclusive<u16>,
    engines: &[(String, Option<u16>)],
    taken: &HashSet<u16>,
) -> Result<BTreeMap<String, u16>, PortsError> {
    let unusable = |source| PortsError::Unusable { path: folder.join(FILE), source };
    state_folder::open(folder).map_err(unusable)?;
    let (before, assigned) = choose(folder, range, engines, taken)?;
    if assigned != before {
        assigned.iter().for_each(|(engine, port)| tracing::info!(engine, port, "port assigned"));
        let draft = folder.join(format!("{FILE}.tmp"));
        let text = serde_json::to_vec_pretty(&assigned).map_err(|error| unusable(error.into()))?;
        let written = crate::state_folder::write(&draft, &text);
        written.and_then(|()| std::fs::rename(&draft, folder.join(FILE))).map_err(unusable)?;
    }
    Ok(assigned)
}

type Ports = BTreeMap<String, u16>;

/// The ports in the file, and the ports that [`assign`] would store.
///
/// # Errors
/// The range is too small, or the file cannot be read.
pub fn choose(
    folder: &Path,
    range: &RangeInclusive<u16>,
    engines: &[(String, Option<u16>)],
    taken: &HashSet<u16>,
) -> Result<(Ports, Ports), PortsError> {
    let path = folder.join(FILE);
    let unusable = |source| PortsError::Unusable { path: path.clone(), source };
    let before: BTreeMap<String, u16> = match std::fs::read(&path) {
        // An invalid file counts as empty. Running engines are then found by their marks, and get
        // other ports.
        Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return Err(unusable(error)),
    };
    let mut assigned = BTreeMap::new();
    let mut used = taken.clone();
    for (engine, running) in engines {
        let known = || before.get(engine).copied().filter(|port| range.contains(port) && !used.contains(port));
        let kept = || known().filter(|port| is_free(*port) || is_running(folder, engine));
        if let Some(port) = running.or_else(kept) {
            assigned.insert(engine.clone(), port);
            used.insert(port);
        }
    }
    for (engine, _) in engines {
        if assigned.contains_key(engine) {
            continue;
        }
        let Some(port) = range.clone().find(|port| !used.contains(port) && is_free(*port)) else {
            let (first, last) = (*range.start(), *range.end());
            return Err(PortsError::None { first, last, engine: engine.clone() });
        };
        assigned.insert(engine.clone(), port);
        used.insert(port);
    }
    Ok((before, assigned))
}

/// Whether no process listens on the port.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<(String, Option<u16>)> {
        names.iter().map(|name| ((*name).to_owned(), None)).collect()
    }

    /// A range of `length` free ports, another at each call, because tests run in parallel.
    fn range(length: u16) -> RangeInclusive<u16> {
        static NEXT: parking_lot::Mutex<u16> = parking_lot::Mutex::new(0);
        let mut next = NEXT.lock();
        let begin = (*next).max(20_000 + (std::process::id() % 1_000) as u16 * 10);
        let starts = (begin..32_000).step_by(10);
        let free = starts.map(|first| first..=first + length - 1).find(|range| range.clone().all(is_free));
        let free = free.expect("some ports in a row are free");
        *next = free.start() + 10;
        free
    }

    #[test]
    fn an_engine_keeps_its_port_when_other_engines_come_and_go() {
        let (folder, range) = (tempfile::tempdir().unwrap(), range(4));
        let first = *range.start();
        let assign = |engines: &[&str], taken: &[u16]| {
            super::assign(folder.path(), &range, &names(engines), &taken.iter().copied().collect())
        };
        let assigned = assign(&["p/b", "p/c"], &[first]).unwrap();
        assert_eq!((assigned["p/b"], assigned["p/c"]), (first + 1, first + 2));
        let assigned = assign(&["p/a", "p/b", "p/c"], &[]).unwrap();
        assert_eq!((assigned["p/a"], assigned["p/b"], assigned["p/c"]), (first, first + 1, first + 2));
        // The port of `p/b` is now configured for another engine.
        assert_eq!(assign(&["p/b"], &[first + 1]).unwrap()["p/b"], first);
        let running = [("p/b".to_owned(), Some(first + 2)), ("p/new".to_owned(), None)];
        let assigned = super::assign(folder.path(), &range, &running, &HashSet::new()).unwrap();
        assert_eq!((assigned["p/b"], assigned["p/new"]), (first + 2, first), "it stays where it runs");
        let all: Vec<u16> = range.clone().collect();
        let none = assign(&["p/d"], &all).unwrap_err().to_string();
        assert!(none.contains("for p/d") && none.contains("make the range larger"), "{none}");
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert_eq!(assign(&["p/c"], &[]).unwrap()["p/c"], first);
    }

    #[test]
    fn a_port_on_which_another_process_listens_is_neither_assigned_nor_kept() {
        let (folder, range) = (tempfile::tempdir().unwrap(), range(2));
        let assign = || assign(folder.path(), &range, &names(&["p/a"]), &HashSet::new()).unwrap()["p/a"];
        let held = TcpListener::bind(("127.0.0.1", *range.start())).unwrap();
        assert_eq!(assign(), range.start() + 1);
        drop(held);
        assert_eq!(assign(), range.start() + 1, "kept although a lower one is free");
        let _held = TcpListener::bind(("127.0.0.1", range.start() + 1)).unwrap();
        assert_eq!(assign(), *range.start());
    }
}
