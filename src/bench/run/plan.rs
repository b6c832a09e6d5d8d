//! The plan of a run: the requests, their due times, and the limits on requests in flight.
//!
//! The schedule follows from the plan and the workload's seed. Before the clock starts, connections
//! are opened and the first prompts are built, so the plan estimates how long that takes.

use std::sync::Arc;
use std::time::Duration;

use crate::load::arrival::{Arrival, Extent};
use crate::load::dataset::TokenCounter;
use crate::load::session::Sessions;
use crate::load::workload::{RequestSource, Workload};
use crate::result::record::{Ramp, RunConfig};

/// Minimum time from the start of a request's task until the request is due.
pub const LEAD: Duration = Duration::from_millis(20);
/// Maximum time for building prompts and opening connections before a request is due.
pub const MAX_LEAD: Duration = Duration::from_secs(5);
/// Planned time for building a prompt, per token: several times the real time.
const BUILD_TIME: Duration = Duration::from_nanos(100);
const CONNECT_TIME: Duration = Duration::from_millis(1);
/// Default bound on requests in flight, each with a file descriptor.
pub const MAX_IN_FLIGHT: usize = 10_000;

/// The load of a run.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// The requests.
    pub workload: Workload,
    /// When the requests are due.
    pub arrival: Arrival,
    /// How many requests, or for how long.
    pub extent: Extent,
    /// This process's limit on requests in flight. Time for which a request waits for it is lag of
    /// the client.
    pub max_in_flight: usize,
    /// The user's limit (`--max-concurrency`). Time for which a request waits for it is `queued`.
    pub max_concurrency: Option<u32>,
    /// Settings of conversations; `None`: single requests.
    pub sessions: Option<Sessions>,
    /// Servers whose `/metrics` are read during the run.
    pub scrape: Vec<String>,
    /// Whether records keep the text of their responses.
    pub keep_texts: bool,
    /// Counts the output tokens of responses without usage.
    pub counter: Option<Arc<TokenCounter>>,
}

impl RunPlan {
    /// A plan with defaults for the other settings.
    pub fn new(workload: Workload, arrival: Arrival, extent: Extent) -> Self {
        Self {
            workload,
            arrival,
            extent,
            max_in_flight: MAX_IN_FLIGHT,
            max_concurrency: None,
            sessions: None,
            scrape: Vec::new(),
            keep_texts: false,
            counter: None,
        }
    }

    /// The configuration in the result of this plan.
    pub fn config(&self, urls: Vec<String>, path: &str) -> RunConfig {
        let concurrency = match self.arrival {
            Arrival::ClosedLoop { concurrency } => Some(concurrency),
            _ => self.max_concurrency,
        };
        let burstiness = match self.arrival {
            Arrival::Gamma { burstiness, .. } | Arrival::Ramp { burstiness, .. } => Some(burstiness),
            Arrival::Constant { .. } => None,
            _ => Some(1.0),
        };
        let ramp = match &self.arrival {
            Arrival::Ramp { start, end, geometric, .. } => Some(Ramp {
                strategy: if *geometric { "exponential" } else { "linear" }.to_owned(),
                start: *start,
                end: *end,
            }),
            _ => None,
        };
        RunConfig {
            urls,
            endpoint: path.to_owned(),
            model: self.workload.model.clone(),
            num_prompts: if let Extent::Requests(count) = self.extent { count } else { 0 },
            dataset: match self.workload.source {
                RequestSource::Classes(_) => "random".to_owned(),
                RequestSource::Items(_) => "file".to_owned(),
            },
            arrival: self.arrival.name().to_owned(),
            request_rate: self.arrival.rate(),
            burstiness: burstiness.filter(|shape| shape.is_finite()),
            max_concurrency: concurrency,
            ramp,
            percentiles: vec![50.0, 90.0, 99.0],
            percentile_metrics: ["ttft", "tpot", "itl", "e2el"].map(str::to_owned).to_vec(),
            classes: self.workload.class_configs(),
            adapters: self.workload.adapters.names.clone(),
            seed: self.workload.seed,
            ..RunConfig::default()
        }
    }

    pub(super) fn initial_requests(&self) -> usize {
        let at_once = match (&self.arrival, self.extent) {
            (Arrival::ClosedLoop { concurrency }, _) => *concurrency as usize,
            (Arrival::Burst { size, .. }, _) => *size as usize,
            (Arrival::AtOnce, Extent::Requests(count)) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => 0,
        };
        at_once.min(self.max_in_flight).min(self.max_concurrency.map_or(usize::MAX, |most| most as usize))
    }

    /// Seconds from the call of [`run`](super::runner::run) until the clock starts.
    pub fn lead_seconds(&self) -> f64 {
        self.lead().as_secs_f64()
    }

    pub(super) fn lead(&self) -> Duration {
        let at_once = u32::try_from(self.initial_requests()).unwrap_or(u32::MAX);
        let tokens = u64::from(self.workload.request(0).prompt_tokens) * u64::from(at_once.max(1));
        let building = BUILD_TIME.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX));
        LEAD.saturating_add(building).saturating_add(CONNECT_TIME.saturating_mul(at_once)).min(MAX_LEAD)
    }
}
