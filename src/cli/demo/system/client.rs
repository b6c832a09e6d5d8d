//! A client that counts its tokens, records the time of the first, and may disconnect.

use bytes::Bytes;
use memchr::memmem;
use tokio::time::Instant;

use crate::flow::{ClientGone, Downstream, ResponseHead};

/// A test client.
#[derive(Default)]
pub(super) struct TestClient {
    pub(super) tokens: usize,
    pub(super) first: Option<Instant>,
    pub(super) status: u16,
    pub(super) done: bool,
    pub(super) finished: bool,
    pub(super) aborted: bool,
    pub(super) leaves_at: Option<Instant>,
}

impl Downstream for TestClient {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        assert_eq!(self.status, 0, "one head per response");
        self.status = head.status.as_u16();
        Ok(())
    }

    async fn body(&mut self, bytes: Bytes, _last: bool) -> Result<(), ClientGone> {
        assert!(!self.finished && !self.aborted, "bytes after the end");
        self.tokens += memmem::find_iter(&bytes, "\"text\":").count();
        assert_eq!(memmem::find(&bytes, b"\"usage\":"), None, "usage that the client did not request");
        self.done |= memmem::find(&bytes, b"[DONE]").is_some();
        if self.tokens > 0 {
            self.first.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        match self.leaves_at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }
}
