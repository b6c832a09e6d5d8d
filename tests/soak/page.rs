//! A metrics page in Prometheus' text format, read as far as the soak's accounts need it.
//!
//! Values are summed over the series that carry all wanted labels; counts are whole numbers. A page is fetched over a
//! connection of its own. It knows no types, no histograms and no escapes in label values.

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::reply::Reply;

/// Largest page read, bytes.
const MAX_PAGE: usize = 4 << 20;

/// One page as it was fetched.
pub(crate) struct Page(String);

impl Page {
    /// Fetch `/metrics` from a loopback port.
    pub(crate) async fn fetch(port: u16) -> anyhow::Result<Self> {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await.context("metrics")?;
        let request = format!("GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut reply = Reply::keeping(MAX_PAGE);
        let mut buffer = vec![0; 16 << 10];
        while !reply.done() {
            match socket.read(&mut buffer).await? {
                0 => {
                    reply.end();
                    ensure!(reply.done(), "metrics page cut off");
                }
                n => reply.feed(&buffer[..n])?,
            }
        }
        ensure!(reply.status == 200, "metrics page answered {}", reply.status);
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

    /// Whether the page has any series of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.series(name).next().is_some()
    }

    /// Sum over the series of `name` that carry all `labels`.
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

    /// Every series of `name` is exactly 0.
    pub(crate) fn all_zero(&self, name: &str) -> anyhow::Result<()> {
        for (labels, value) in self.series(name) {
            ensure!(value == 0.0, "{name}{{{labels}}} is {value}, not 0");
        }
        Ok(())
    }
}
