//! Finds a backend by the names that a person writes, as `sluice status` prints them.
//!
//! The server of several data-parallel ranks is also found by its name in the file. A message about
//! an unknown name lists at most [`NAMES_SHOWN`] known ones.

use super::error::NoSuchBackend;
use sluice_core::base::BackendId;
use sluice_gateway::pool::{BackendView, PoolView};

/// The backend with these names, unless it is being removed.
pub fn find(pools: &[PoolView], pool: &str, backend: &str) -> Result<BackendId, NoSuchBackend> {
    let Some(found) = pools.iter().find(|view| &*view.name == pool) else {
        let known = names(pools.iter().map(|view| &*view.name));
        return Err(NoSuchBackend::Pool { pool: pool.to_owned(), known });
    };
    let mut staying = found.backends.iter().filter(|view| !view.removed);
    match staying.clone().find(|view| &*view.name == backend) {
        Some(view) => Ok(view.id),
        // The server of several ranks, by the name in the file.
        None if let Some(view) = staying.clone().find(|view| is_server(view, backend)) => Ok(view.id),
        None => Err(NoSuchBackend::Backend {
            pool: pool.to_owned(),
            backend: backend.to_owned(),
            known: names(staying.by_ref().map(|view| &*view.name)),
        }),
    }
}

fn is_server(view: &BackendView, name: &str) -> bool {
    view.address.rank == Some(0) && view.name.strip_suffix("-0") == Some(name)
}

/// Most names in a message.
const NAMES_SHOWN: usize = 20;

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = all.collect();
    let mut text = names[..names.len().min(NAMES_SHOWN)].join(", ");
    if names.len() > NAMES_SHOWN {
        text.push_str(&format!(" and {} more", names.len() - NAMES_SHOWN));
    }
    text
}
