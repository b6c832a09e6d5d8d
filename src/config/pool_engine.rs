//! `pool.engine`: a kind of engine, or `"auto"`.
//!
//! With `"auto"`, probes find the kind of engines that run without the gateway (`put_engines.rs`).
//! The pool has the default kind until then, if a probe is not certain, and if the gateway starts
//! the engines.

use std::ops::Deref;

use super::file::Entry;
use super::problem::{Situation, Suggestion};
use super::report::{Names, Report};
use super::setting::Scalar;
use sluice_core::engines::EngineKind;

const AUTO: &str = "auto";

/// The kinds of engine, after `"auto"`.
const WORDS: [&str; EngineKind::LABELS.len() + 1] = {
    let mut words = [AUTO; EngineKind::LABELS.len() + 1];
    let mut at = 0;
    while at < EngineKind::LABELS.len() {
        words[at + 1] = EngineKind::LABELS[at];
        at += 1;
    }
    words
};

/// The kind of the engines of a pool, and whether the file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolEngine {
    pub(super) kind: EngineKind,
    /// Whether the value is `"auto"`, which is also the default.
    pub(super) is_auto: bool,
}

impl Deref for PoolEngine {
    type Target = EngineKind;

    fn deref(&self) -> &EngineKind {
        &self.kind
    }
}

impl Scalar for PoolEngine {
    const WORDS: &'static [&'static str] = &WORDS;

    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let found = String::parse(written, report)?;
        if found == AUTO {
            return Ok(Self { kind: EngineKind::default(), is_auto: true });
        }
        let kind = EngineKind::ALL.into_iter().find(|kind| kind.label() == found);
        kind.map(|kind| Self { kind, is_auto: false }).ok_or_else(|| {
            let suggestion = Suggestion::for_name(&found, WORDS);
            Situation::UnknownChoice { found, suggestion }
        })
    }

    fn text(&self, _: &Names) -> String {
        if self.is_auto { AUTO } else { self.kind.label() }.to_owned()
    }
}
