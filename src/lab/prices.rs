//! Prices of GPUs, read from a file.
//!
//! ```toml
//! currency = "USD"
//! [per_hour]          # of one GPU
//! h200 = 3.50
//! "h100-80" = 2.50
//! ```
//!
//! Prices differ by provider and month, so none are built in. GPUs are named as in the scenario: a
//! preset, or a path relative to the folder of the scenario.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::error::LabError;

/// Prices of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    /// The currency, for tables.
    #[serde(default)]
    pub currency: String,
    /// The price of one GPU for an hour.
    pub per_hour: BTreeMap<String, f64>,
}

impl Prices {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let invalid = |reason: String| LabError::File { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
        let prices: Self = toml::from_str(&text).map_err(|error| invalid(error.to_string().trim_end().to_owned()))?;
        match prices.per_hour.iter().find(|(_, price)| !(price.is_finite() && **price >= 0.0)) {
            Some((gpu, price)) => Err(invalid(format!("per_hour.{gpu}: {price} is not a price; give 0 or more"))),
            None => Ok(prices),
        }
    }
}
