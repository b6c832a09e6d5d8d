//! The program under test.
//!
//! The same test also measures or checks another build: `SLUICE_BIN` names it, for example a
//! release build.

use std::path::PathBuf;

/// The program that `SLUICE_BIN` names, or the one that was built with this test.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("SLUICE_BIN")
        .map_or_else(|| env!("CARGO_BIN_EXE_sluice").into(), |path| std::path::absolute(path).unwrap_or_default())
}
