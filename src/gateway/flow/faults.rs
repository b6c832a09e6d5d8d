//! Reports a backend's fault to the health of the backend and to the log.
//!
//! Every ejection is logged. A failed response is logged within the limit of lines per minute for a
//! backend (`pool/fault_report.rs`). Both lines have the level `warn`. A line names the backend,
//! the request and the reason. It never has text of a prompt or of an engine's error, because such
//! an error may repeat a prompt.

use std::fmt::Display;

use tokio::time::Instant;

use crate::pool::{BackendFault, FaultReport, Lease, RefusedGateway, Verdict};

/// Notes that the engine behind `lease` refuses the gateway's credentials, and logs the refusal if
/// it is new.
pub(super) fn report_refused(lease: &Lease, status: u16, request_id: &str, now: Instant) {
    if lease.refused_gateway(status, now) {
        let (pool, backend) = (&**lease.pool_name(), &**lease.name());
        let refused = RefusedGateway { status, by_probe: false };
        tracing::warn!(pool, backend, request_id, "{}", refused.text(lease.address().api_key.is_some()));
    }
}

/// Counts a fault of the leased backend against the health of the backend. `why`: the failure that
/// the request met.
pub(super) fn report(lease: &Lease, fault: BackendFault, request_id: &str, why: &dyn Display, now: Instant) {
    let FaultReport { verdict, line } = lease.failure(fault, now);
    let (pool, backend) = (&**lease.pool_name(), &**lease.name());
    if let Some(left_out) = line {
        let (is_spared, reason) = match verdict {
            Verdict::Spared(why) => ("; the backend is not ejected, ", why.text()),
            Verdict::Counted | Verdict::Ejected(_) => ("", ""),
        };
        let left_out = (left_out > 0).then_some(left_out);
        tracing::warn!(pool, backend, request_id, left_out, "response failed: {why}{is_spared}{reason}");
    }
    if let Verdict::Ejected(time) = verdict {
        tracing::warn!(pool, backend, "ejected for {:.1} s: {}; last: {why}", time.as_secs_f64(), fault.text());
    }
}
