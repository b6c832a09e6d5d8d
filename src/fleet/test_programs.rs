//! Programs that tests write and run.
//!
//! The kernel executes no file that is open for writing ("text file busy"). If this process wrote
//! the program, a child of a parallel test could inherit the open descriptor. So a shell writes it.

use std::path::Path;
use std::process::Command;

pub(crate) fn write_program(path: &Path, text: &str) {
    let script = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let written = Command::new("/bin/sh").args(["-c", script]).arg(path).arg(text).status();
    assert!(written.expect("sh runs").success(), "{} cannot be written", path.display());
}
