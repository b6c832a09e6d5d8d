//! `sluice backend logs NAME`: the log of an engine that the gateway runs.
//!
//! Prints the last lines, and with `--follow` new lines as they come, also after restarts of the
//! engine. The gateway masks secrets. Control characters are left out, because an engine may log
//! text from its clients. While the gateway does not respond, `--follow` retries, for at most
//! [`FAILED_POLLS_MAX`] polls.

use std::io::Write as _;
use std::time::Duration;

use sluice_admin::{AdminClient, AdminClientError, LOG_LINES_MAX, encode};
use sluice_fleet::LogLines;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Failed polls after which `--follow` gives up. They take 30 s, in which a gateway can restart.
const FAILED_POLLS_MAX: u32 = 60;

/// The flags of `sluice backend logs`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct LogsArgs {
    /// The backend, such as gpu0 or short/gpu0
    pub(super) name: String,
    /// Print new lines as they come, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// How many of the last lines to print, at most 1000
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u16).range(1..=LOG_LINES_MAX as i64))]
    lines: u16,
}

pub(super) async fn run(
    client: &AdminClient,
    (pool, backend): (&str, &str),
    args: &LogsArgs,
) -> Result<(), AdminClientError> {
    let path = format!("/admin/backends/{}/{}/log", encode(pool), encode(backend));
    let mut read = fetch(client, &path, &format!("lines={}", args.lines)).await?;
    if let Some(note) = &read.note {
        eprintln!("note: {note}");
    }
    let mut failures = 0;
    loop {
        // If the reader of stdout has left, such as `head`, the command ends.
        if print(&read.lines).is_err() || !args.follow {
            return Ok(());
        }
        // After a full response there is no pause, because more lines may be waiting.
        if read.lines.len() < LOG_LINES_MAX {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        match fetch(client, &path, &format!("lines={LOG_LINES_MAX}&after={}", read.next)).await {
            Ok(next) => (read, failures) = (next, 0),
            Err(AdminClientError::Unreachable { .. }) if failures < FAILED_POLLS_MAX => {
                if failures == 0 {
                    eprintln!("the gateway does not respond; trying again");
                }
                failures += 1;
                read.lines.clear();
            }
            Err(error) => return Err(error),
        }
    }
}

async fn fetch(client: &AdminClient, path: &str, query: &str) -> Result<LogLines, AdminClientError> {
    client.get(&format!("{path}?{query}")).await
}

fn print(lines: &[String]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    lines.iter().try_for_each(|line| writeln!(out, "{}", plain(line)))?;
    out.flush()
}

/// The text without terminal control sequences and control characters.
fn plain(line: &str) -> String {
    let (mut out, mut letters) = (String::with_capacity(line.len()), line.chars().peekable());
    while let Some(letter) = letters.next() {
        if letter == '\x1b' && letters.next_if_eq(&'[').is_some() {
            while letters.next().is_some_and(|letter| !('@'..='~').contains(&letter)) {}
        } else if letter == '\t' || !letter.is_control() {
            out.push(letter);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_of_an_engine_do_not_reach_the_terminal() {
        assert_eq!(plain("\x1b[1;36m(EngineCore)\x1b[0m\tready\r"), "(EngineCore)\tready");
        assert_eq!(plain("title \x1b]0;x\x07 é"), "title ]0;x é");
        assert_eq!(plain("cut \x1b[3"), "cut ");
    }
}
