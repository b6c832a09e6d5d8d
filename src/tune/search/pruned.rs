//! A setting that a search left out, and why.
//!
//! The report shows it.

use serde::Serialize;

use crate::setting::Setting;

/// A setting that was left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pruned {
    /// The setting.
    pub setting: Setting,
    /// The reason.
    pub reason: String,
    /// Whether it was tried at the end, to check the rule.
    pub checked: bool,
}
