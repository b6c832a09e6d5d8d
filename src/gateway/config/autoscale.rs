//! `pool.autoscale`: how many engines a pool should have, as the gateway computes and publishes it.
//!
//! The computation is `sluice_online::Scaler`'s; what adds and removes engines (KEDA, an HPA) reads it as a metric.

use std::time::Duration;

use super::table::table;

/// The most engines of a pool.
pub(super) const ENGINES: u32 = 4_096;

table! {
    /// How many engines the pool should have, from the load that is expected when an engine that is started now is ready, and from
    /// what an engine was seen to serve within the objectives. Published as sluice_engines_wanted, for KEDA or an HPA.
    #[derive(Copy)]
    pub struct Autoscale {
        /// The fewest engines.
        pub min: u32 = default("1").within("1", "4096");
        /// The most engines.
        pub max: u32 = required("write how many engines there may be").within("1", "4096").example("8");
        /// From the order of an engine to its first request, until the gateway has seen some starts itself.
        pub cold_start: Duration = duration("3m");
        /// How long one engine less must suffice before it is enough. Engines go one at a time.
        pub down_after: Duration = duration("5m");
        /// Requests per second that one engine serves within the objectives, where that is known (sluice bench --find-rate, sluice
        /// lab rate).
        pub rate: Option<f64> = optional("learned from requests").within("0.0001", "1000000").example("2.5");
    }
}
