//! Passes a response on to the client, and looks for room elsewhere while the engine leaves
//! service.
//!
//! An engine that is drained serves a stream until another engine of the pool has room for the rest
//! (`drain.move_after`). Only then is the exchange closed. A stream stays until its end if no other
//! engine has room, or if it may not be continued.

use tokio::time::Instant;

use super::{Attempts, response_context};
use crate::flow::attempt::{AttemptResult, HeldResponse, ResponseStart};
use crate::flow::elsewhere::Credentials;
use crate::flow::exchange::{Downstream, Upstream};
use crate::flow::pump::Pump;
use crate::flow::record::{RecordGuard, Recorder};
use crate::pool::Lease;

impl<U: Upstream> Attempts<'_, U> {
    pub(super) async fn pass_on<D: Downstream, R: Recorder>(
        &mut self,
        response: Box<ResponseStart<U::Exchange>>,
        (mut deadline, credentials): (Instant, Credentials),
        lease: &mut Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> AttemptResult<U::Exchange> {
        let ResponseStart { exchange, head, sent, mut read } = *response;
        let (mut exchange, mut head) = (Some(exchange), Some(head));
        if let Some(unfinished) = &mut self.unfinished {
            unfinished.go_on();
        }
        loop {
            let mut context = response_context(self.incoming, &self.prepared, &self.backends, lease, (sent, deadline));
            context.credentials = Some(credentials);
            let (request, is_head_sent) = (&mut self.request, &mut self.is_head_sent);
            let mut pump = match (self.unfinished.take(), head.take()) {
                (Some(rest), _) => Pump::resume(*rest, self.seam.take(), context, request, lease, record, is_head_sent),
                (None, Some(head)) => Pump::new(head, context, request, lease, record, is_head_sent),
                (None, None) => return AttemptResult::Finished,
            };
            let mut failed = match pump.run(&mut exchange, std::mem::take(&mut read), down).await {
                AttemptResult::Finished => return AttemptResult::Finished,
                AttemptResult::Failed(failed) => failed,
            };
            if failed.is_move {
                let rest = pump.into_unfinished();
                self.next = self.room_elsewhere(&rest, lease, record);
                self.unfinished = Some(rest);
                if self.next.is_some() {
                    return AttemptResult::Failed(failed);
                }
                deadline = Instant::now() + self.prepared.placed.table.timeouts().idle;
                continue;
            }
            if failed.continues {
                self.unfinished = Some(pump.into_unfinished());
            }
            failed.response = exchange.zip(failed.held.take()).map(|(exchange, held)| {
                let HeldResponse { head, read } = held;
                ResponseStart { exchange, head, sent, read }
            });
            return AttemptResult::Failed(failed);
        }
    }
}
