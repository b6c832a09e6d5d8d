//! `pool.autoscale`: the number of engines that a pool should have, and who adds and removes
//! engines.
//!
//! `sluice_online::Scaler` computes the number. With `apply` the gateway starts and stops engines
//! itself; without it KEDA or an HPA reads the number as a metric.

use std::time::Duration;

use super::table::table;

pub(super) const ENGINES: u32 = 4_096;

table! {
    /// How many engines the pool should have, from the load that is expected when an engine that is
    /// started now is ready, and from what an engine was seen to serve within the objectives.
    /// Published as sluice_engines_wanted, for KEDA or an HPA, or applied by the gateway.
    #[derive(Copy)]
    pub struct Autoscale {
        /// The gateway has as many engines run as are wanted. Of listed backends (launch, control)
        /// the last ones are stopped first; of the pods of a StatefulSet (kubernetes.statefulset),
        /// whose replicas it sets, those with the highest numbers. Each has ended its requests
        /// before it is stopped. false: the number is only published.
        pub apply: bool = default("false");
        /// The fewest engines. 0: none while there are no requests; then a request waits until an
        /// engine has started (`hold`).
        pub min: u32 = default("1").within("0", "4096");
        /// The most engines.
        pub max: u32 = required("write how many engines there may be").within("1", "4096").example("8");
        /// From the order of an engine to its first request, until the gateway has seen some starts
        /// itself.
        pub cold_start: Duration = duration("3m");
        /// How long one engine less must suffice before it is enough. Engines go one at a time.
        pub down_after: Duration = duration("5m");
        /// With min = 0: the last engine goes when there was no request for so long.
        pub idle_after: Duration = duration("10m");
        /// With min = 0: how long a request may wait for the first engine; 503 after it, or at once
        /// if its start is known to take longer.
        pub hold: Duration = duration("5m");
        /// Requests per second that one engine serves within the objectives, where that is known
        /// (sluice bench --find-rate, sluice lab rate).
        pub rate: Option<f64> = optional("learned from requests").within("0.0001", "1000000").example("2.5");
    }
}
