//! `pool.cost` and `pool.routes`: work that is not counted in tokens.
//!
//! A job is a request to an engine that does not generate tokens: a text to speak, a recording to
//! transcribe, an image to paint. The cost of a job takes the place of the prompt tokens: in
//! `prompt_tokens` of pools, in the order of the queue, in fair shares and in the access log.
//! Clients cannot reach a path of an engine unless it is a route of the API or named here.

use super::limits;
use super::problem::Situation;
use super::table::table;
use super::value::not_empty;
use sluice_core::openai::job_cost::CostRule;
use sluice_core::openai::{Route, kserve};

table! {
    /// The cost of a job, in the unit of the pool.
    pub struct Cost {
        /// Fields of the JSON body whose values are multiplied. Of a number the value counts, of a
        /// text such as "1024x768" the product of its numbers, of another text its characters, of
        /// a list its entries. If empty, the cost is the size of the body in bytes, because an
        /// upload grows with the recording.
        pub fields: Vec<String> = default("[]").check(not_empty).at_most(limits::MAX_COST_FIELDS).example("[\"input\"]");
        /// Amount that makes one unit: 32000 bytes are a second of a recording with 16 kHz and 16
        /// bits.
        pub per: f64 = default("1.0").within("0.000001", "1000000000000");
        /// Name of the unit, for the log.
        pub unit: String = default("units").check(not_empty).example("characters");
        /// Cost of a job that lacks a field. The gateway logs the first such job.
        pub otherwise: u32 = default("1").within("1", "1000000000");
    }
}

impl Cost {
    /// The rule that computes the cost.
    pub fn rule(&self) -> CostRule {
        CostRule { fields: self.fields.clone(), per: self.per, otherwise: self.otherwise.into() }
    }
}

/// Whether a path can be named by a pool: it has one spelling, and is no path of the gateway.
pub(super) fn check_path(path: &str) -> Result<(), Situation> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    let parts = || path.get(1..).unwrap_or_default().split('/');
    let is_plain = path.starts_with('/') && path.bytes().all(plain) && path.len() <= limits::MAX_NAME_BYTES;
    let is_own = matches!(path, "/health" | "/ready" | "/ping" | "/v1/models") || path.starts_with("/v1/models/");
    let is_taken = is_own || Route::from_path(path).is_some() || kserve::is_below_models(path);
    match !is_plain || is_taken || parts().any(|part| matches!(part, "" | "." | "..")) {
        true => Err(Situation::RoutePath { found: path.to_owned() }),
        false => Ok(()),
    }
}
