//! A WebSocket (`/v1/realtime`): who may open one, and on which backend it holds a slot.
//!
//! A tunnel passes the same checks as a request: key, limits, model, admission. The model is in the
//! query (`?model=NAME`), because there is no body. The slot is held until the tunnel ends. `proxy`
//! connects and passes bytes on; it asks here for another backend only while no byte was sent.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admit::{self, AdmitError};
use super::exchange::Downstream;
use super::incoming::IncomingRequest;
use super::job;
use super::prepare::{self, PreparedRequest};
use super::record::{RecordGuard, Recorder, RetryReason};
use super::respond;
use super::response_owners::ResponseOwners;
use super::router::Router;
use crate::pool::{Admission, BackendFault, Lease};
use sluice_core::openai::Refusal;

/// A WebSocket that was accepted and has no backend yet.
#[derive(Debug)]
pub struct TunnelRequest {
    prepared: PreparedRequest,
    made: u32,
}

impl TunnelRequest {
    /// Checks a request for a WebSocket. An error is a refusal that has not been sent.
    pub(super) async fn accept<R: Recorder>(
        (owners, admission): (&ResponseOwners, &Admission),
        incoming: &IncomingRequest,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Self, Refusal> {
        Ok(Self { prepared: prepare::prepare((owners, admission), incoming, record).await?, made: 0 })
    }

    /// Waits for a slot; `None`: the client has left.
    pub(super) async fn lease<D: Downstream, R: Recorder>(
        &mut self,
        (admission, router, abort): (&Arc<Admission>, &Router, &CancellationToken),
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Option<Lease>, Refusal> {
        let begun = Instant::now();
        record.begin_wait();
        let (model, placed) = (record.model.clone(), &mut self.prepared.placed);
        let admitted = admit::admit(admission, router, abort, placed, model.as_deref(), down).await;
        record.queue_wait += begun.elapsed();
        record.set_home(self.prepared.placed.home());
        let mut lease = match admitted {
            Ok(lease) => lease,
            Err(AdmitError::ClientGone) => return Ok(None),
            Err(AdmitError::Refused(limit)) => return Err(Refusal::ExceedsBackend(limit)),
            Err(AdmitError::Unserved) => return Err(Refusal::UpstreamBroke),
            Err(AdmitError::Shed { reason, home }) => {
                let room_in = admission.retry_after(home, Instant::now());
                return Err(respond::shed(reason, room_in, record));
            }
        };
        self.made += 1;
        lease.set_origin(record.origin);
        let [pool, backend] = lease.place();
        (record.pool, record.backend) = (Some(pool), Some(backend));
        lease.first_token();
        Ok(Some(lease))
    }

    /// Reports that the leased backend could not be connected to. Returns whether another backend
    /// may be tried; `attempts`: the most tries.
    pub fn not_connected<R: Recorder>(&mut self, lease: Lease, attempts: u32, record: &mut RecordGuard<'_, R>) -> bool {
        lease.failure(BackendFault::Connect, Instant::now());
        self.prepared.placed.request.avoid.extend(lease.server());
        let goes_on = self.made < attempts;
        if goes_on {
            record.retried(RetryReason::Connect, lease.place());
        }
        goes_on
    }
}

/// The path and query for the engine: the query names the model `model`, and keeps the other
/// parameters of the client.
pub fn path_of(incoming: &IncomingRequest, model: &Arc<str>) -> String {
    let (path, query) = incoming.path.split_once('?').unwrap_or((&incoming.path, ""));
    let encoded: String = model.bytes().fold(String::new(), |mut text, byte| {
        match byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte) {
            true => text.push(char::from(byte)),
            false => text.push_str(&format!("%{byte:02X}")),
        }
        text
    });
    let others = query.split('&').filter(|pair| !pair.is_empty() && job::model_in(pair).is_none());
    let pairs: Vec<String> = std::iter::once(format!("model={encoded}")).chain(others.map(str::to_owned)).collect();
    format!("{path}?{}", pairs.join("&"))
}
