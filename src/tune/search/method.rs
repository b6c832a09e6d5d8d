//! The search methods by name, and the choice for a space.
//!
//! Spaces of up to [`GRID`] settings are searched whole (`race`), larger ones with a Gaussian
//! process (`model`). `search/mod.rs` describes the methods.

use std::str::FromStr;

use super::ask::{Known, Search};
use super::{model, race, script};
use crate::error::TuneError;
use crate::goal::Goal;

const GRID: usize = 60;

/// A search method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The whole grid, by races.
    Race,
    /// Settings in random order.
    Random,
    /// A Gaussian process.
    Model,
    /// The grid of `auto_tune.sh`.
    AutoTune,
}

impl Method {
    /// All methods with their names.
    pub const NAMES: [(&'static str, Self); 4] =
        [("race", Self::Race), ("random", Self::Random), ("model", Self::Model), ("auto-tune", Self::AutoTune)];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, method)| *method == self).map_or("", |(name, _)| name)
    }

    /// The method for a space with this many settings.
    pub fn for_space(settings: usize) -> Self {
        if settings <= GRID { Self::Race } else { Self::Model }
    }

    pub(crate) fn check(self, goal: &Goal) -> Result<(), TuneError> {
        match self {
            Self::AutoTune if goal.against.is_some() => {
                let text = "compares settings by one measure; with tune.against use race, random or model";
                Err(TuneError::Goal(format!("the method {} {text}", self.name())))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn search(self, known: &Known<'_>) -> Box<dyn Search> {
        match self {
            Self::Race => Box::new(race::Race::new(known)),
            Self::Random => Box::new(race::Chance::new(known)),
            Self::Model => Box::new(model::Model::new(known)),
            Self::AutoTune => Box::new(script::Script::new(known)),
        }
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::NAMES.map(|(name, _)| name).join(", ");
        let found = Self::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, method)| *method).ok_or_else(|| format!("'{text}' is no method; there are {names}"))
    }
}
