//! Warnings about a run whose figures mislead.
//!
//! There are three kinds: the load generator was the limit and measured its own delays, the server
//! did not keep up, or the run was too short.
//!
//! If no request completed, the server was the limit, so there is no warning about the client.
//! Results are not corrected.

use crate::result::metrics::Distribution;
use crate::result::record::{Outcome, Record, RunResult};
use crate::result::steady;

/// Smallest share of the scheduled rate that must be sent; below it there is a warning.
pub const MIN_DELIVERED: f64 = 0.98;
/// Largest P99 of the lag of requests without a warning, seconds.
pub const MAX_REQUEST_LAG: f64 = 0.005;
/// Largest P99 of the lag of timers without a warning, seconds.
pub const MAX_TIMER_LAG: f64 = 0.005;
/// Largest share of the machine's CPU time without a warning.
pub const MAX_CPU: f64 = 0.85;
/// Fewest completed requests without a warning about P99.
const MIN_FOR_P99: u64 = 100;

/// Configured and delivered load of an open loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Delivered {
    /// Configured requests per second.
    pub configured: f64,
    /// Requests of the drawn schedule, divided by the last due time.
    pub scheduled: f64,
    /// The same requests, divided by the time of the last send.
    pub sent: f64,
}

impl Delivered {
    /// `None` for closed loops, recorded times and changing rates.
    pub fn of(result: &RunResult) -> Option<Self> {
        let configured = result.config.request_rate?;
        let last = |of: &dyn Fn(&Record) -> f64| result.requests.iter().map(of).fold(0.0, f64::max);
        let due = last(&|record| record.due.unwrap_or(0.0));
        let sent = last(&|record| record.sent);
        let count = result.requests.len() as f64;
        (due > 0.0 && sent > 0.0).then(|| Self { configured, scheduled: count / due, sent: count / sent })
    }

    /// Share of the scheduled rate that was sent.
    pub fn share(&self) -> f64 {
        self.sent / self.scheduled
    }
}

/// The warnings about a run.
pub fn warnings(result: &RunResult) -> Vec<String> {
    let mut warnings = Vec::new();
    if result.partial {
        let unfinished = result.requests.iter().filter(|record| record.outcome == Outcome::Unfinished).count();
        warnings.push(format!(
            "the run was ended early: {} requests were sent, {unfinished} of them were still in flight and are not counted",
            result.requests.len()
        ));
    }
    if result.requests.iter().any(Record::is_completed) {
        delivery(result, &mut warnings);
    }
    if let Some((first, last)) = steady::growth(result) {
        warnings.push(format!(
            "the server did not keep up: requests in flight grew from {first:.0} to {last:.0} while load was steady, so \
             latencies depend on how long this run was"
        ));
    }
    few(result, &mut warnings);
    warnings
}

fn delivery(result: &RunResult, warnings: &mut Vec<String>) {
    let queued = Distribution::of(result.requests.iter().map(|record| record.queued).collect());
    let limited = result.config.request_rate.is_some() && queued.percentile(99.0) > MAX_REQUEST_LAG;
    if let Some(delivered) = Delivered::of(result).filter(|delivered| delivered.share() < MIN_DELIVERED) {
        let why = match limited {
            true => "--max-concurrency held requests back",
            false => "this client could not send them in time; use a faster machine or several clients",
        };
        warnings.push(format!(
            "the load was not delivered: {:.2} of {:.2} scheduled requests per second were sent: {why}",
            delivered.sent, delivered.scheduled
        ));
    } else if limited {
        warnings.push(format!(
            "--max-concurrency held requests back for up to {:.0} ms (P99): this is no longer an open loop; latencies count \
             from the moment a request was sent",
            queued.percentile(99.0) * 1e3
        ));
    }
    let lag = Distribution::of(result.requests.iter().map(Record::lag).collect());
    if lag.percentile(99.0) > MAX_REQUEST_LAG {
        warnings.push(format!(
            "this client was the bottleneck: requests were sent {:.1} ms late (P99)",
            lag.percentile(99.0) * 1e3
        ));
    }
    let client = &result.client;
    if client.lag_p99 > MAX_TIMER_LAG {
        warnings.push(format!(
            "this machine was busy: timers were {:.1} ms late (P99), and every latency may be too long by as much",
            client.lag_p99 * 1e3
        ));
    }
    let share = client.cpu_seconds / (result.duration * f64::from(client.cores.max(1)));
    if result.duration > 1.0 && share > MAX_CPU {
        warnings.push(format!("this process used {:.0} % of the machine's CPU", share * 100.0));
    }
}

fn few(result: &RunResult, warnings: &mut Vec<String>) {
    let completed = result.requests.iter().filter(|record| record.is_completed()).count() as u64;
    if completed == 0 && !result.requests.is_empty() {
        warnings.push("no request got a complete response: there are no latencies".to_owned());
    } else if completed < MIN_FOR_P99 && completed > 0 {
        warnings.push(format!("the P99 of {completed} requests is close to their maximum; send {MIN_FOR_P99} or more"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{ClientHealth, RunConfig};

    fn run(late: f64, queued: f64) -> RunResult {
        let requests = (1..=1_000).map(|i| {
            let due = i as f64 / 100.0;
            let sent = due + late * due + queued * due;
            Record {
                due: Some(due),
                sent,
                queued: queued * due,
                outcome: Outcome::Completed,
                latency: 0.01,
                ended: sent + 0.01,
                ..Record::default()
            }
        });
        let config = RunConfig { request_rate: Some(100.0), ..RunConfig::default() };
        RunResult { requests: requests.collect(), duration: 10.0, config, ..RunResult::default() }
    }

    #[test]
    fn a_run_that_went_as_planned_has_no_warnings() {
        assert_eq!(warnings(&run(0.0, 0.0)), [""; 0]);
        let delivered = Delivered::of(&run(0.0, 0.0)).unwrap();
        assert_eq!((delivered.configured, delivered.scheduled, delivered.share()), (100.0, 100.0, 1.0));
    }

    #[test]
    fn a_rate_that_the_client_cannot_deliver_is_reported() {
        let warnings = warnings(&run(0.25, 0.0));
        assert!(warnings[0].starts_with("the load was not delivered: 80.00 of 100.00"), "{warnings:?}");
        assert!(warnings[0].contains("use a faster machine"));
        assert!(warnings[1].contains("this client was the bottleneck"), "{warnings:?}");
    }

    #[test]
    fn without_a_complete_response_the_client_is_not_the_bottleneck() {
        let mut result = run(0.25, 0.0);
        result.requests.iter_mut().for_each(|record| record.outcome = Outcome::Failed("status 503".into()));
        let said = warnings(&result);
        assert!(said.iter().all(|warning| !warning.contains("client")), "{said:?}");
        assert!(said.last().unwrap().contains("no request got a complete response"), "{said:?}");
    }

    #[test]
    fn a_limit_that_holds_requests_back_is_not_the_clients_fault() {
        let warnings = warnings(&run(0.0, 0.25));
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("--max-concurrency held requests back"));
    }

    #[test]
    fn a_busy_machine_and_few_requests_are_reported() {
        let client = ClientHealth { lag_p99: 0.02, cpu_seconds: 19.0, cores: 2, ..ClientHealth::default() };
        let mut result = RunResult { client, ..run(0.0, 0.0) };
        let said = warnings(&result);
        assert!(said[0].contains("20.0 ms late") && said[1].contains("95 %"), "{said:?}");
        result.client = ClientHealth::default();
        result.requests.truncate(5);
        assert!(warnings(&result)[0].contains("P99 of 5 requests"));
        result.partial = true;
        result.requests.iter_mut().for_each(|record| record.outcome = Outcome::Unfinished);
        let said = warnings(&result);
        assert!(said[0].contains("ended early: 5 requests were sent, 5 of them"), "{said:?}");
        assert!(said.last().unwrap().contains("no request got a complete response"));
    }
}
