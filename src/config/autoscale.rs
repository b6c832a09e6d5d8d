//! `pool.autoscale`: the number of engines that a pool should have, and who adds and removes
//! engines.
//!
//! `sluice_online::scaler::Scaler` computes the number. With `apply` the gateway starts and stops
//! engines itself; without it KEDA or an HPA reads the number as a metric.

use std::time::Duration;

use super::table::table;

pub(super) const ENGINES: u32 = 4_096;

table! {
    /// How many engines the pool should have, from the load expected when an engine that is started
    /// now is ready, and from the load that an engine was seen to serve within the objectives. The
    /// number is published as sluice_engines_wanted, for KEDA or an HPA, or applied by the gateway.
    #[derive(Copy)]
    pub struct Autoscale {
        /// Whether the gateway starts and stops engines so that the wanted number runs. Of listed
        /// backends (launch, control) it stops the last ones first. Of a StatefulSet
        /// (kubernetes.statefulset) it sets the replicas, so the pods with the highest numbers stop
        /// first. An engine ends its requests before it is stopped. false: the number is only
        /// published.
        pub apply: bool = default("false");
        /// The fewest engines. 0: no engine runs while there are no requests; a request then waits
        /// until an engine has started (`hold`).
        pub min: u32 = default("1").within("0", "4096");
        /// The most engines.
        pub max: u32 = required("write how many engines there may be").within("1", "4096").example("8");
        /// Expected time from the order of an engine to its first request, until the gateway has
        /// measured some starts.
        pub cold_start: Duration = duration("3m");
        /// Time for which one engine less must suffice before an engine is stopped. Engines stop
        /// one at a time.
        pub down_after: Duration = duration("5m");
        /// With min = 0: time without a request after which the last engine is stopped.
        pub idle_after: Duration = duration("10m");
        /// With min = 0: longest time that a request waits for the first engine; then it gets 503.
        /// It gets 503 at once if the start of the engine is known to take longer.
        pub hold: Duration = duration("5m");
        /// Requests per second that one engine serves within the objectives, if you know this rate
        /// (sluice bench --find-rate, sluice lab rate).
        pub rate: Option<f64> = optional("learned from requests").within("0.0001", "1000000").example("2.5");
    }
}
