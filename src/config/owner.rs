//! Files that control the gateway must belong to its user, and no other user may write to them.
//!
//! The journal says which processes are stopped. Other files of `fleet.state` set limits and
//! experiments. Records determine the content of a report. A user who can write to or replace these
//! files commands the gateway. So the gateway refuses such a file, and names the command that
//! repairs it:
//!
//! | file or folder | is refused if |
//! |---|---|
//! | a file or socket | another user owns it, or group or others may write to it |
//! | a link, or any other kind, in place of a file or socket | always |
//! | the folder of the state | another user owns it, or group or others may write to it |
//! | a link to that folder or a named file | a user other than root and the gateway's owns it |
//! | the folder of a named file | all users may write to it, and it is not sticky |
//!
//! The folder of the state may be a sticky folder of root or of the gateway's user, such as `/tmp`,
//! where other users can neither replace nor remove files. Folders above it are not checked,
//! because a state that another user put there belongs to that user, and is refused. The operator
//! chose the folder of a named file, so its owner is trusted, with and without the sticky bit.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The mode bits with which a group or others may write.
const WRITABLE: u32 = 0o022;
/// The mode bit with which all users may write.
const WRITABLE_BY_ALL: u32 = 0o002;
/// The mode bit with which only owners may remove and rename files in a folder.
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;

/// A file or folder that another user can command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} {risk}; look at it, then: {}", path.display(), risk.command(path))]
pub struct Untrusted {
    path: PathBuf,
    risk: Risk,
}

impl Untrusted {
    /// Whether another user than the user of this process owns the path.
    pub fn is_foreign(&self) -> bool {
        matches!(self.risk, Risk::Foreign { .. })
    }
}

/// How another user can command a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Risk {
    Foreign { owner: u32, own: u32 },
    Writable { mode: u32 },
    WritableFolder { mode: u32 },
    Link,
    ForeignLink { owner: u32 },
    Kind,
}

impl fmt::Display for Risk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign { owner, own } => {
                write!(f, "belongs to user {owner}, and the gateway runs as user {own}")
            }
            Self::Writable { mode } => write!(f, "may be written by other users (mode {mode:04o})"),
            Self::WritableFolder { mode } => {
                write!(f, "lets all users replace what is in it (mode {mode:04o}, not sticky)")
            }
            Self::Link => f.write_str("is a symbolic link, which may lead to a file of another user"),
            Self::ForeignLink { owner } => write!(f, "is a symbolic link of user {owner}"),
            Self::Kind => f.write_str("is neither a file nor a socket"),
        }
    }
}

impl Risk {
    /// The command that repairs the risk.
    fn command(self, path: &Path) -> String {
        let path = quoted(path);
        match self {
            Self::Foreign { own, .. } => format!("chown {own} {path}"),
            Self::Writable { .. } => format!("chmod go-w {path}"),
            Self::WritableFolder { .. } => format!("chmod o-w {path}"),
            Self::Link | Self::ForeignLink { .. } | Self::Kind => format!("rm -r {path}"),
        }
    }
}

fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@+%".contains(c);
    match path.chars().all(is_plain) {
        true => path,
        false => format!("'{}'", path.replace('\'', r"'\''")),
    }
}

/// Whether other users cannot replace files in a folder, even if they may write to the folder.
fn is_sticky(folder: &Metadata, own: u32) -> bool {
    folder.mode() & STICKY != 0 && [ROOT, own].contains(&folder.uid())
}

/// Checks a file or socket that the gateway reads or listens on. A path that is missing or cannot
/// be examined passes, because opening it fails.
///
/// # Errors
/// Another user can command the file.
pub fn check_file(path: &Path) -> Result<(), Untrusted> {
    let untrusted = |risk| Err(Untrusted { path: path.to_owned(), risk });
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    let own = own_user();
    let kind = found.file_type();
    if kind.is_symlink() {
        return untrusted(Risk::Link);
    }
    if found.uid() != own {
        return untrusted(Risk::Foreign { owner: found.uid(), own });
    }
    if !kind.is_file() && !kind.is_socket() {
        return untrusted(Risk::Kind);
    }
    match found.mode() & WRITABLE {
        0 => Ok(()),
        _ => untrusted(Risk::Writable { mode: found.mode() & 0o7777 }),
    }
}

/// Checks a file whose path an operator chose, such as records. A link of root or of the gateway's
/// user is followed; a device or a pipe passes.
///
/// # Errors
/// Another user can command the file, or all users may replace it.
pub fn check_named_file(path: &Path) -> Result<(), Untrusted> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    check_link(&path)?;
    let Ok(target) = path.canonicalize() else { return check_place(&path) };
    if target.metadata().is_ok_and(|found| !found.is_file()) {
        return Ok(());
    }
    check_file(&target)?;
    check_place(&target)
}

/// Checks a folder that holds files of the gateway's state. A missing folder passes.
///
/// # Errors
/// Another user can command the folder.
pub fn check_folder(path: &Path) -> Result<(), Untrusted> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    check_link(&path)?;
    let Ok(target) = path.canonicalize() else { return Ok(()) };
    let untrusted = |risk| Err(Untrusted { path: target.clone(), risk });
    let Ok(found) = target.metadata() else { return Ok(()) };
    let own = own_user();
    if found.is_dir() && !is_sticky(&found, own) {
        if found.uid() != own {
            return untrusted(Risk::Foreign { owner: found.uid(), own });
        }
        if found.mode() & WRITABLE != 0 {
            return untrusted(Risk::Writable { mode: found.mode() & 0o7777 });
        }
    }
    Ok(())
}

fn check_link(path: &Path) -> Result<(), Untrusted> {
    match path.symlink_metadata() {
        Ok(found) if found.file_type().is_symlink() && ![ROOT, own_user()].contains(&found.uid()) => {
            Err(Untrusted { path: path.to_owned(), risk: Risk::ForeignLink { owner: found.uid() } })
        }
        _ => Ok(()),
    }
}

fn check_place(path: &Path) -> Result<(), Untrusted> {
    let above = path.ancestors().skip(1).find_map(|folder| Some((folder, folder.metadata().ok()?)));
    match above {
        Some((folder, found)) if found.mode() & WRITABLE_BY_ALL != 0 && found.mode() & STICKY == 0 => {
            Err(Untrusted { path: folder.to_owned(), risk: Risk::WritableFolder { mode: found.mode() & 0o7777 } })
        }
        _ => Ok(()),
    }
}

/// The user that this process acts as.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let around = tempfile::tempdir().unwrap();
        let state = around.path().join("state");
        fs::create_dir(&state).unwrap();
        set_mode(&state, 0o755);
        (around, state)
    }

    #[test]
    fn a_file_that_others_may_write_to_is_refused_with_the_command_that_mends_it() {
        let (_around, state) = folder();
        let file = state.join("it's a journal");
        assert_eq!(check_file(&file), Ok(()), "missing");
        fs::write(&file, "").unwrap();
        for mode in [0o600, 0o644, 0o700] {
            set_mode(&file, mode);
            assert_eq!((check_file(&file), check_named_file(&file)), (Ok(()), Ok(())), "{mode:o}");
        }
        for mode in [0o620, 0o602, 0o666] {
            set_mode(&file, mode);
            let text = check_file(&file).unwrap_err().to_string();
            assert!(text.contains(&format!("(mode {mode:04o})")) && text.contains("chmod go-w '"), "{text}");
            assert_eq!(check_named_file(&file).unwrap_err().to_string(), text);
        }
        set_mode(&file, 0o600);
        let link = state.join("link");
        symlink(&file, &link).unwrap();
        assert!(check_file(&link).unwrap_err().to_string().contains("is a symbolic link"));
        assert_eq!(check_named_file(&link), Ok(()), "an operator may link to another disk");
        assert!(check_file(&state).unwrap_err().to_string().contains("is neither a file nor a socket"));
        assert_eq!(check_named_file(Path::new("/dev/null")), Ok(()));
    }

    #[test]
    fn a_folder_in_which_others_can_replace_files_is_refused_unless_it_is_sticky() {
        let (around, state) = folder();
        assert_eq!(check_folder(&state), Ok(()));
        assert_eq!(check_folder(&state.join("new/er")), Ok(()), "it can be made");
        for mode in [0o775, 0o757, 0o777] {
            set_mode(&state, mode);
            let text = check_folder(&state).unwrap_err().to_string();
            assert!(text.ends_with(&format!("chmod go-w {}", state.display())), "{text}");
        }
        assert!(check_named_file(&state.join("records")).unwrap_err().to_string().contains("not sticky"));
        set_mode(&state, 0o1777);
        assert_eq!(check_folder(&state), Ok(()));
        set_mode(&state, 0o700);
        set_mode(around.path(), 0o777);
        assert_eq!(check_folder(&state), Ok(()), "a user who replaces it owns what is there then");
        let text = check_named_file(&around.path().join("records")).unwrap_err().to_string();
        assert!(text.ends_with(&format!("chmod o-w {}", around.path().display())), "{text}");
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        if own_user() != ROOT {
            // Only root can give a file away.
            return;
        }
        let (around, state) = folder();
        let file = state.join("journal");
        fs::write(&file, "").unwrap();
        chown(&file, Some(12_345), None).unwrap();
        let text = check_file(&file).unwrap_err().to_string();
        assert!(text.contains("belongs to user 12345, and the gateway runs as user 0"), "{text}");
        assert!(text.contains(&format!("chown 0 {}", file.display())), "{text}");
        let link = around.path().join("link");
        symlink(&state, &link).unwrap();
        assert_eq!(check_folder(&link), Ok(()));
        std::os::unix::fs::lchown(&link, Some(12_345), None).unwrap();
        assert!(check_folder(&link).unwrap_err().to_string().contains("is a symbolic link of user 12345"));
        chown(&state, Some(12_345), None).unwrap();
        assert!(check_folder(&state).unwrap_err().to_string().contains("belongs to user 12345"));
        set_mode(&state, 0o1777);
        assert!(check_folder(&state).is_err(), "the owner of a sticky folder may replace files");
    }
}
