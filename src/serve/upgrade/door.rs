//! `upgrade.sock` in `fleet.state`, on which a newer gateway asks the running one to hand over.
//!
//! Only the gateway's user may connect (mode 0600, in a folder of the gateway), and the user of
//! every visitor is checked. The socket itself is handed over too, so that the path always leads to
//! the gateway that accepts connections. A killed gateway leaves a path without a listener. The
//! next start replaces it.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use sluice_config::owner::Untrusted;
use sluice_fleet::{UPGRADE_SOCKET, check_state, create_state};

const DRAFT: &str = "upgrade.sock.tmp";
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// Why the gateway could not open the socket for upgrades.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// Another gateway has this folder.
    #[error("another running gateway answers at {path}; give each its own fleet.state", path = .0.display())]
    Taken(PathBuf),
    /// Another user controls the folder of the socket.
    #[error("fleet.state: {0}")]
    Untrusted(#[from] Untrusted),
    /// The socket cannot be opened.
    #[error("{path}: {source}; fleet.state must be a folder that the gateway may write to, with a short path", path = path.display())]
    Unusable {
        /// The path of the socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The socket of the running gateway.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
}

impl Door {
    pub(crate) fn path(folder: &Path) -> PathBuf {
        folder.join(UPGRADE_SOCKET)
    }

    /// Opens the socket in this folder, which is created if needed.
    ///
    /// # Errors
    /// Another gateway listens there, or the folder cannot be used.
    pub fn open(folder: &Path) -> Result<Self, DoorError> {
        let path = Self::path(folder);
        check_state(folder)?;
        if StdStream::connect(&path).is_ok() {
            return Err(DoorError::Taken(path));
        }
        let draft = folder.join(DRAFT);
        let bound = create_state(folder).and_then(|()| {
            let _ = fs::remove_file(&draft);
            let listener = UnixListener::bind(&draft)?;
            fs::set_permissions(&draft, fs::Permissions::from_mode(0o600))?;
            fs::rename(&draft, &path)?;
            Ok(listener)
        });
        match bound {
            Ok(listener) => Ok(Self { listener, path }),
            Err(source) => Err(DoorError::Unusable { path, source }),
        }
    }

    pub(crate) fn inherited(folder: &Path, socket: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, path: Self::path(folder) })
    }

    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Waits for the next gateway that asks.
    pub async fn visitor(&self) -> UnixStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "the socket for upgrades cannot accept; pausing");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Removes the path when the gateway stops.
    pub fn remove(self) {
        // If this fails, the next start finds that no process listens there.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_folder_has_one_door_and_one_that_was_left_behind_is_replaced() {
        let around = tempfile::tempdir().unwrap();
        let folder = around.path().join("a/state");
        let door = Door::open(&folder).unwrap();
        let mode = fs::metadata(Door::path(&folder)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = Door::open(&folder).unwrap_err();
        assert!(matches!(error, DoorError::Taken(_)), "{error}");
        drop(door);
        Door::open(&folder).unwrap().remove();
        assert!(!Door::path(&folder).exists());
        let file = around.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Door::open(&file).unwrap_err().to_string();
        assert!(error.contains("must be a folder that the gateway may write to"), "{error}");
        let long = around.path().join("x".repeat(120));
        assert!(Door::open(&long).unwrap_err().to_string().contains("with a short path"));
    }
}
