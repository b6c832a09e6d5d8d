//! Programs that tests write and run.
//!
//! They are written by another process: a child of a test that runs at the same time would inherit a descriptor of this one for
//! writing, and the kernel executes no file that is open for writing ("text file busy").

use std::path::Path;
use std::process::Command;

/// Writes a program.
pub(crate) fn write_program(path: &Path, text: &str) {
    let script = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let written = Command::new("/bin/sh").args(["-c", script]).arg(path).arg(text).status();
    assert!(written.expect("sh runs").success(), "{} cannot be written", path.display());
}
