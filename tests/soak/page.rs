//! A metrics page in Prometheus' text format.
//!
//! The parser reads sums of whole numbers over the series with given labels. It does not support
//! types, histograms and escapes in label values.

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::reply::Reply;

const MAX_PAGE: usize = 4 << 20;

pub(crate) struct Page(String);

impl Page {
    pub(crate) async fn fetch(port: u16) -> anyhow::Result<Self> {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await.context("metrics")?;
        let request = format!("GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let reply = read_to_end(&mut socket, MAX_PAGE).await?;
        ensure!(reply.status == 200, "the metrics page has status {}", reply.status);
        Ok(Self(String::from_utf8(reply.start)?))
    }

    fn series<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?,
                None if rest.starts_with(' ') => ("", rest),
                None => return None,
            };
            Some((labels, value.split_whitespace().next()?.parse().ok()?))
        })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.series(name).next().is_some()
    }

    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let carries = |text: &str| {
            let wanted = |(key, value): &(&str, &str)| {
                let pair = format!("{key}=\"{value}\"");
                text == pair || text.starts_with(&format!("{pair},")) || text.contains(&format!(",{pair}"))
            };
            labels.iter().all(wanted)
        };
        self.series(name).filter(|(text, _)| carries(text)).map(|(_, value)| value as u64).sum()
    }

    pub(crate) fn all_zero(&self, name: &str) -> anyhow::Result<()> {
        for (labels, value) in self.series(name) {
            ensure!(value == 0.0, "{name}{{{labels}}} is {value}, not 0");
        }
        Ok(())
    }
}

/// Reads one response to its end, and keeps the first `keep` bytes of its body.
///
/// # Errors
/// When the connection breaks, ends early, or carries something other than a response.
pub(crate) async fn read_to_end(socket: &mut TcpStream, keep: usize) -> anyhow::Result<Reply> {
    let mut reply = Reply::keeping(keep);
    let mut buffer = vec![0; 16 << 10];
    while !reply.done() {
        match socket.read(&mut buffer).await? {
            0 => {
                reply.end();
                ensure!(reply.done(), "the connection ended inside a response");
            }
            count => reply.feed(&buffer[..count])?,
        }
    }
    Ok(reply)
}
