//! Ports for engines that are configured without one.
//!
//! An engine keeps the port that it was given, over reloads and restarts of the gateway, because one that outlived a gateway
//! is to be found where it was: the ports given are in `ports.json` beside the journal. A new name gets the lowest port of
//! the range that is nobody's: not configured, not given, and free to listen on. A given port on which a stranger listens is
//! given up for another one.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::TcpListener;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::driver::process::is_running;

const FILE: &str = "ports.json";

/// Why there is no port.
#[derive(Debug, thiserror::Error)]
pub enum PortsError {
    /// All are taken.
    #[error(
        "fleet.ports: none of {first} to {last} is free for {engine}; make the range larger, or give the engine a port"
    )]
    None {
        /// First of the range.
        first: u16,
        /// Last of the range.
        last: u16,
        /// Who should have got one.
        engine: String,
    },
    /// A port moved from one engine to another while the first still runs there.
    #[error("port {port} of {engine} is where {holder} runs until the gateway restarts; give {engine} another one")]
    Held {
        /// The port.
        port: u16,
        /// Who should get it.
        engine: String,
        /// Who has it.
        holder: String,
    },
    /// What was given cannot be kept.
    #[error("fleet.state: {path}: {source}; name a folder that the gateway may write to", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Gives a port to each of `engines` (`pool/backend`), that where it runs now if it runs. `folder` is that of the journal;
/// `taken`: ports that are somebody's by configuration.
///
/// # Errors
/// The range is too small, or the file cannot be written. Nothing is given then.
pub fn give(
    folder: &Path,
    range: &RangeInclusive<u16>,
    engines: &[(String, Option<u16>)],
    taken: &HashSet<u16>,
) -> Result<BTreeMap<String, u16>, PortsError> {
    let path = folder.join(FILE);
    let unusable = |source| PortsError::Unusable { path: path.clone(), source };
    let before: BTreeMap<String, u16> = match std::fs::read(&path) {
        // A file that cannot be read as such is begun anew; engines that run are then found by their marks and moved.
        Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return Err(unusable(error)),
    };
    let mut given = BTreeMap::new();
    let mut used = taken.clone();
    for (engine, running) in engines {
        let known = || before.get(engine).copied().filter(|port| range.contains(port) && !used.contains(port));
        let kept = || known().filter(|port| is_free(*port) || is_running(folder, engine));
        if let Some(port) = running.or_else(kept) {
            given.insert(engine.clone(), port);
            used.insert(port);
        }
    }
    for (engine, _) in engines {
        if given.contains_key(engine) {
            continue;
        }
        let Some(port) = range.clone().find(|port| !used.contains(port) && is_free(*port)) else {
            let (first, last) = (*range.start(), *range.end());
            return Err(PortsError::None { first, last, engine: engine.clone() });
        };
        given.insert(engine.clone(), port);
        used.insert(port);
    }
    if given != before {
        given.iter().for_each(|(engine, port)| tracing::info!(engine, port, "its port is chosen"));
        let draft = folder.join(format!("{FILE}.tmp"));
        let text = serde_json::to_vec_pretty(&given).map_err(|error| unusable(error.into()))?;
        std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, &path)).map_err(unusable)?;
    }
    Ok(given)
}

/// Whether somebody could listen there now.
fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<(String, Option<u16>)> {
        names.iter().map(|name| ((*name).to_owned(), None)).collect()
    }

    /// A range in which nobody listens, of this many ports.
    fn range(length: u16) -> RangeInclusive<u16> {
        let begin = 20_000 + (std::process::id() % 1_000) as u16 * 10;
        let starts = (begin..32_000).step_by(10);
        let free = starts.map(|first| first..=first + length - 1).find(|range| range.clone().all(is_free));
        free.expect("some ports in a row are free")
    }

    #[test]
    fn an_engine_keeps_its_port_whatever_comes_and_goes_around_it() {
        let (folder, range) = (tempfile::tempdir().unwrap(), range(4));
        let first = *range.start();
        let give = |engines: &[&str], taken: &[u16]| {
            super::give(folder.path(), &range, &names(engines), &taken.iter().copied().collect())
        };
        let given = give(&["p/b", "p/c"], &[first]).unwrap();
        assert_eq!((given["p/b"], given["p/c"]), (first + 1, first + 2));
        let given = give(&["p/a", "p/b", "p/c"], &[]).unwrap();
        assert_eq!((given["p/a"], given["p/b"], given["p/c"]), (first, first + 1, first + 2));
        // Its port is configured for somebody else now.
        assert_eq!(give(&["p/b"], &[first + 1]).unwrap()["p/b"], first);
        let running = [("p/b".to_owned(), Some(first + 2)), ("p/new".to_owned(), None)];
        let given = super::give(folder.path(), &range, &running, &HashSet::new()).unwrap();
        assert_eq!((given["p/b"], given["p/new"]), (first + 2, first), "it stays where it runs");
        let all: Vec<u16> = range.clone().collect();
        let none = give(&["p/d"], &all).unwrap_err().to_string();
        assert!(none.contains("for p/d") && none.contains("make the range larger"), "{none}");
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert_eq!(give(&["p/c"], &[]).unwrap()["p/c"], first);
    }

    #[test]
    fn a_port_on_which_a_stranger_listens_is_neither_given_nor_kept() {
        let (folder, range) = (tempfile::tempdir().unwrap(), range(2));
        let give = || give(folder.path(), &range, &names(&["p/a"]), &HashSet::new()).unwrap()["p/a"];
        let held = TcpListener::bind(("127.0.0.1", *range.start())).unwrap();
        assert_eq!(give(), range.start() + 1);
        drop(held);
        assert_eq!(give(), range.start() + 1, "kept although a lower one is free");
        let _held = TcpListener::bind(("127.0.0.1", range.start() + 1)).unwrap();
        assert_eq!(give(), *range.start());
    }
}
