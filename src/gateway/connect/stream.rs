//! A connection to an engine, plain or inside TLS: one type for both.
//!
//! Requests keep it in the pool of idle connections, by its descriptor; probes give it to hyper.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// A connection to an engine.
#[derive(Debug)]
pub enum EngineStream {
    /// For `http` URLs.
    Plain(TcpStream),
    /// For `https` URLs.
    Secure(Box<TlsStream<TcpStream>>),
}

/// Calls a function of `AsyncRead` or `AsyncWrite` on the stream inside.
macro_rules! inner {
    ($stream:expr, $call:ident, $($argument:expr),+) => {
        match $stream.get_mut() {
            Self::Plain(stream) => Pin::new(stream).$call($($argument),+),
            Self::Secure(stream) => Pin::new(stream).$call($($argument),+),
        }
    };
}

impl AsyncRead for EngineStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        inner!(self, poll_read, cx, into)
    }
}

impl AsyncWrite for EngineStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inner!(self, poll_write, cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, poll_flush, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, poll_shutdown, cx)
    }
}

impl AsRawFd for EngineStream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Plain(stream) => stream.as_raw_fd(),
            Self::Secure(stream) => stream.get_ref().0.as_raw_fd(),
        }
    }
}
