//! The folder `fleet.state`: only the gateway's user can read its files.
//!
//! Logs and command output may contain secrets, and the journal determines which processes are
//! stopped. So a new folder gets mode 0700 and every file 0600. Modes of an earlier version's files
//! are corrected when the folder is opened. A folder that also contains other files (such as
//! `/tmp`) keeps its mode.
//!
//! Files that other users may write to are refused ([`check`]) and not corrected, because they may
//! have been changed already. The random [`key`] of the folder also identifies the gateway's
//! engines: the mark in the environment of their processes has a digest by this key.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use sluice_config::owner::{self, Untrusted};

const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;
/// The socket at which a newer gateway takes over.
pub const SOCKET: &str = "upgrade.sock";
/// The file with the random key of digests.
const KEY: &str = "key";
pub(crate) const KEY_BYTES: usize = 32;

/// Checks that no other user controls the folder or a file of the gateway in it. A missing folder
/// passes.
///
/// # Errors
/// A folder or file that another user controls, with the command that corrects it.
pub fn check(folder: &Path) -> Result<(), Untrusted> {
    owner::check_folder(folder)?;
    // A folder that cannot be read is reported by the code that uses it.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if is_own(&name) || name.starts_with(SOCKET) {
            owner::check_file(&entry.path())?;
        }
    }
    Ok(())
}

/// Creates the folder, if it is missing.
///
/// # Errors
/// It cannot be created.
pub fn create(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
}

/// Creates the folder, or corrects the modes of files of an earlier version.
///
/// # Errors
/// It cannot be created or read.
pub(crate) fn open(folder: &Path) -> io::Result<()> {
    create(folder)?;
    let mut others = false;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // Links are not followed, because the target may belong to another program.
        let Ok(kind) = entry.file_type() else { continue };
        let name = entry.file_name();
        let own = is_own(&name.to_string_lossy());
        others |= !(own && kind.is_file() || *name == *SOCKET && kind.is_socket());
        if own && kind.is_file() {
            restrict(&entry.path(), FILE_MODE);
        }
    }
    if !others {
        restrict(folder, FOLDER_MODE);
    }
    Ok(())
}

/// Whether the gateway writes a file of this name.
fn is_own(name: &str) -> bool {
    let is_log = || name.rsplit_once(".log").is_some_and(|(_, age)| age.is_empty() || age.starts_with('.'));
    let begins = ["journal.", "ports.json", "flags-", "experiments.", "added_experiments.", "tuner."]
        .iter()
        .any(|beginning| name.starts_with(beginning));
    name == "lock" || name == KEY || begins || is_log()
}

/// Removes permissions beyond `mode`. A file of another user stays as it is.
fn restrict(path: &Path, mode: u32) {
    let wide = path.metadata().is_ok_and(|found| found.mode() & 0o777 & !mode != 0);
    if wide && let Err(error) = fs::set_permissions(path, Permissions::from_mode(mode)) {
        tracing::warn!(path = %path.display(), %error, "other users can read it, and its mode cannot be changed");
    }
}

/// Options for creating a file of the folder.
pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(FILE_MODE);
    options
}

/// Writes a whole file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    options().write(true).truncate(true).open(path)?.write_all(bytes)
}

/// A file of the folder; `None` if there is none.
///
/// # Errors
/// It cannot be read.
pub fn read(folder: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    match fs::read(folder.join(name)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Held while a file is replaced or appended to, because two threads would use the same draft, or
/// rename the same full file.
static CHANGING: Mutex<()> = Mutex::new(());

/// Replaces a file atomically. Creates the folder.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn replace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    create(folder)?;
    let _alone = CHANGING.lock();
    let draft = folder.join(format!("{name}.tmp"));
    let mut file = options().write(true).truncate(true).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(draft, folder.join(name))
}

/// Appends to a file; one larger than `max` bytes is first renamed to `NAME.1`. Creates the folder.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn append(folder: &Path, name: &str, bytes: &[u8], max: u64) -> io::Result<()> {
    create(folder)?;
    let _alone = CHANGING.lock();
    let path = folder.join(name);
    if path.metadata().is_ok_and(|file| file.len() > max) {
        fs::rename(&path, folder.join(format!("{name}.1")))?;
    }
    options().append(true).open(path)?.write_all(bytes)
}

/// Renames a file to `NAME.unreadable-N`, with the lowest free N, so that it can be written anew
/// without losing the content. Returns the new name.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside(folder: &Path, name: &str) -> io::Result<String> {
    let is_free = |name: &String| folder.join(name).symlink_metadata().is_err();
    let free = (1_u32..).map(|number| format!("{name}.unreadable-{number}")).find(is_free).unwrap_or_default();
    fs::rename(folder.join(name), folder.join(&free))?;
    Ok(free)
}

/// The random key of this folder, created at the first call. Digests of secrets are keyed with it,
/// so that a leaked digest does not reveal a weak secret.
///
/// # Errors
/// It cannot be read or written.
pub(crate) fn key(folder: &Path) -> io::Result<[u8; KEY_BYTES]> {
    let path = folder.join(KEY);
    match existing_key(folder) {
        Ok(key) => return Ok(key),
        // Too short: the gateway crashed while it wrote the file, and never used the key.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => {}
        Err(error) => return Err(error),
    }
    let mut key = [0; KEY_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    write(&path, &key)?;
    Ok(key)
}

/// The random key of this folder.
///
/// # Errors
/// There is no key, or it is incomplete or cannot be read.
pub(crate) fn existing_key(folder: &Path) -> io::Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    File::open(folder.join(KEY))?.read_exact(&mut key)?;
    Ok(key)
}

/// A keyed digest of bytes that may contain secrets.
pub(crate) fn digest(key: &[u8; KEY_BYTES], bytes: &[u8]) -> String {
    let inner = Sha256::new().chain_update(key).chain_update(bytes).finalize();
    let digest = Sha256::new().chain_update(key).chain_update(inner).finalize();
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn what_an_earlier_version_left_readable_is_repaired_and_files_of_others_are_left_alone() {
        let around = tempfile::tempdir().unwrap();
        let folder = around.path().join("a/state");
        open(&folder).unwrap();
        assert_eq!(mode(&folder), 0o700);
        let names = [
            "journal.jsonl",
            "journal.1.jsonl",
            "lock",
            "ports.json",
            "p.gpu0.log",
            "p.gpu0.log.2",
            "p.b.commands.log",
            "experiments.json",
            "added_experiments.json",
            "tuner.json",
        ];
        let loosen = || {
            names.iter().for_each(|name| fs::write(folder.join(name), "x").unwrap());
            names
                .iter()
                .for_each(|name| fs::set_permissions(folder.join(name), Permissions::from_mode(0o644)).unwrap());
            fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        };
        loosen();
        open(&folder).unwrap();
        names.iter().for_each(|name| assert_eq!(mode(&folder.join(name)), 0o600, "{name}"));
        assert_eq!(mode(&folder), 0o700);
        loosen();
        let other = folder.join("notes.txt");
        fs::write(&other, "x").unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o644)).unwrap();
        open(&folder).unwrap();
        assert_eq!((mode(&folder), mode(&other), mode(&folder.join("lock"))), (0o755, 0o644, 0o600));
    }

    #[test]
    fn files_that_others_may_write_to_are_refused_and_not_corrected() {
        let around = tempfile::tempdir().unwrap();
        let folder = around.path().join("state");
        assert_eq!(check(&folder), Ok(()), "missing");
        open(&folder).unwrap();
        for name in ["journal.jsonl", "journal.tmp", "key", "lock", "ports.json", "tuner.jsonl.1", "p.a.log", SOCKET] {
            let path = folder.join(name);
            fs::write(&path, "x").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            assert_eq!(check(&folder), Ok(()), "{name}");
            fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
            let text = check(&folder).unwrap_err().to_string();
            assert!(text.contains(&format!("chmod go-w {}", path.display())), "{text}");
            fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
            let text = check(&folder).unwrap_err().to_string();
            assert!(text.contains(&format!("rm -r {}", path.display())), "{text}");
            fs::remove_file(&path).unwrap();
        }
        // Files of other programs are not checked.
        fs::write(folder.join("notes"), "x").unwrap();
        fs::set_permissions(folder.join("notes"), Permissions::from_mode(0o666)).unwrap();
        assert_eq!(check(&folder), Ok(()));
    }

    #[test]
    fn files_that_are_set_aside_do_not_replace_one_another() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["one", "two"] {
            fs::write(folder.path().join("x.json"), text).unwrap();
            set_aside(folder.path(), "x.json").unwrap();
        }
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!((read("x.json.unreadable-1").as_str(), read("x.json.unreadable-2").as_str()), ("one", "two"));
        assert!(set_aside(folder.path(), "x.json").is_err(), "there is none");
    }

    #[test]
    fn threads_that_replace_the_same_file_neither_fail_nor_mix_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..4).map(|number| number.to_string().repeat(10_000 * (number + 1))).collect();
        std::thread::scope(|scope| {
            for text in &texts {
                scope.spawn(|| (0..50).for_each(|_| replace(folder.path(), "x.json", text.as_bytes()).unwrap()));
            }
        });
        let last = fs::read_to_string(folder.path().join("x.json")).unwrap();
        assert!(texts.contains(&last));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn the_key_stays_the_same_and_is_another_in_another_folder() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let made = key(one.path()).unwrap();
        assert_eq!(made, key(one.path()).unwrap());
        assert_ne!(made, key(two.path()).unwrap());
        assert_eq!(mode(&one.path().join(KEY)), 0o600);
        fs::write(one.path().join(KEY), "cut").unwrap();
        assert_ne!(made, key(one.path()).unwrap());
    }
}
