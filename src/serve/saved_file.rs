//! Files of state in the folder of the engines' journal (`fleet.state`).
//!
//! A file that cannot be read is renamed and counts as empty, because a gateway without saved
//! measurements is better than no gateway. `sluice_fleet` bounds the size.

use std::path::Path;

use serde::de::DeserializeOwned;

pub(crate) fn read_or_set_aside<T: DeserializeOwned + Default>(folder: &Path, name: &str) -> T {
    let read = sluice_fleet::read_state(folder, name).map_err(|error| error.to_string());
    let parsed = read.and_then(|bytes| match bytes {
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        None => Ok(T::default()),
    });
    parsed.unwrap_or_else(|why| {
        let (path, aside) = (folder.join(name), sluice_fleet::set_state_aside(folder, name));
        match aside {
            Ok(aside) => tracing::error!("{} cannot be read ({why}): kept as {aside}, and not used", path.display()),
            // Probably the next save cannot replace this file either.
            Err(error) => tracing::error!("{} cannot be read ({why}) or renamed ({error})", path.display()),
        }
        T::default()
    })
}
