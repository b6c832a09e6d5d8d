//! The bodies of responses: a complete text, or a stream of events that lasts until the client
//! leaves.
//!
//! Both are in one enum, so that hyper serves both alike.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};

use super::connections::Progress;
use super::events::EventStream;

/// The body of a response.
#[derive(Debug)]
pub enum AdminBody {
    /// A text. `None` once the text was taken.
    Text(Option<Bytes>),
    /// A stream of events.
    Events(EventStream),
}

impl AdminBody {
    pub(super) fn watch(mut self, progress: Arc<Progress>) -> Self {
        if let Self::Events(stream) = &mut self {
            stream.watch(progress);
        }
        self
    }
}

impl From<String> for AdminBody {
    fn from(text: String) -> Self {
        Self::Text(Some(text.into()))
    }
}

impl From<&'static str> for AdminBody {
    fn from(text: &'static str) -> Self {
        Self::Text(Some(Bytes::from_static(text.as_bytes())))
    }
}

impl Body for AdminBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Text(text) => {
                Poll::Ready(text.take().filter(|text| !text.is_empty()).map(|text| Ok(Frame::data(text))))
            }
            Self::Events(stream) => stream.poll_next(cx).map(|next| next.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.as_ref().is_none_or(Bytes::is_empty),
            Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Self::Events(_) => SizeHint::default(),
        }
    }
}
