//! The program under test.
//!
//! If `SLUICE_BIN` names another program, such as a release build, the same tests check or measure
//! that program.

use std::path::PathBuf;

/// The program that `SLUICE_BIN` names, or the one that was built with this test.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("SLUICE_BIN")
        .map_or_else(|| env!("CARGO_BIN_EXE_sluice").into(), |path| std::path::absolute(path).unwrap_or_default())
}
