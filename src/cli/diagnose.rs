//! `sluice diagnose`: what is slow, for whom, since when, where the time goes, and what to do.
//!
//! Prints one screen from findings, history and the last requests of a running gateway. `--request
//! ID` explains one request instead. `--bundle FILE` writes everything that the admin port knows
//! into one file for a bug report ([`bundle`]).
//!
//! Exit codes: 0 printed; 1 no valid response; 2 wrong usage.

mod bundle;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, Table};
use serde::Deserialize;

use super::admin_command::{AdminPort, exit_code, with_client};
use super::terminal::{print_to_stdout, stdout_width, wrapped};
use sluice_admin::status::{Diagnosis, Status};
use sluice_admin::{AdminClient, AdminClientError};
use sluice_gateway::telemetry::{HistoryReport, HistoryRow, RequestView};
use sluice_online::findings::{Finding, LastMinute};

/// The most keys and engines that are shown.
const ROWS: usize = 12;
const WIDTH: usize = 100;

/// Find out what is slow, for whom, and why
#[derive(Clone, Debug, clap::Args)]
pub struct DiagnoseArgs {
    #[command(flatten)]
    port: AdminPort,
    /// Show latencies of this time: at most 5m, or 1h
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = since)]
    since: Duration,
    /// Show only this API key
    #[arg(long, value_name = "NAME")]
    key: Option<String>,
    /// Show only this class of requests
    #[arg(long, value_name = "NAME")]
    class: Option<String>,
    /// Explain one request, by the id in x-request-id
    #[arg(long, value_name = "ID", conflicts_with_all = ["key", "class", "bundle"])]
    request: Option<String>,
    /// Write all data for a bug report, without names of keys, ids of requests and addresses
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
}

fn since(text: &str) -> Result<Duration, String> {
    let time = text.parse::<sluice_core::base::Period>().map_err(|error| error.to_string())?.0;
    let hour = Duration::from_secs(3_600);
    if time > hour { Err("the gateway keeps one hour; sluice report reads older records".to_owned()) } else { Ok(time) }
}

#[derive(Debug, Default, Deserialize)]
struct Histories {
    recent: HistoryReport,
    hour: HistoryReport,
}

#[derive(Debug, Deserialize)]
struct Requests {
    requests: Vec<RequestView>,
}

/// Runs the command.
pub fn run(args: &DiagnoseArgs) -> ExitCode {
    with_client(&args.port, async |client| {
        let text = match (&args.request, &args.bundle) {
            (Some(id), _) => explain(client, id).await.map_err(|error| error.to_string()),
            (None, Some(file)) => bundle::write(client, file).await,
            (None, None) => screen(client, args).await.map_err(|error| error.to_string()),
        };
        match text {
            Ok(text) => exit_code(print_to_stdout(&text)),
            Err(error) => exit_code(Err(error)),
        }
    })
}

async fn screen(client: &AdminClient, args: &DiagnoseArgs) -> Result<String, AdminClientError> {
    let status: Status = client.get("/admin/status").await?;
    let diagnosis: Diagnosis = client.get("/admin/findings").await?;
    let histories: Histories = client.get("/admin/history").await?;
    let history = if args.since <= Duration::from_secs(300) { histories.recent } else { histories.hour };
    Ok(render(&status, &diagnosis, &history, args))
}

fn render(status: &Status, diagnosis: &Diagnosis, history: &HistoryReport, args: &DiagnoseArgs) -> String {
    let about = &status.about;
    let mut text =
        format!("sluice {} up {:.0} s · clients on {}\n\n", about.version, about.uptime_seconds, about.listen);
    let names = |finding: &&Finding| args.key.as_ref().is_none_or(|key| finding.subject == *key);
    let findings: Vec<&Finding> = diagnosis.findings.iter().filter(names).collect();
    if findings.is_empty() {
        text += "No finding: no engine, key or load stands out.\n";
        if about.uptime_seconds < 90.0 {
            text += "The gateway has just started; findings need about a minute and a half of requests.\n";
        }
    }
    for (number, finding) in findings.iter().enumerate() {
        text += &paragraph(&format!("{}. {} ({})", number + 1, finding.sentence, ago(finding.since_seconds)), "   ");
        text += &paragraph(&format!("   Seen: {}.", finding.evidence), "   ");
        text += &paragraph(&format!("   Do: {}", finding.advice), "   ");
    }
    let covered = Duration::from_secs_f64(history.covered_seconds.max(0.0)).as_secs();
    text += &format!("\nBy class, last {covered} s (ms; the slowest 5 % of first tokens, by where their time went)\n");
    let wanted = |row: &&HistoryRow| args.class.as_ref().is_none_or(|class| row.class.as_deref() == Some(class));
    text += &classes(history.classes.iter().filter(wanted));
    let keys: Vec<&LastMinute> =
        diagnosis.keys.iter().filter(|row| args.key.as_ref().is_none_or(|key| row.name == *key)).collect();
    if !keys.is_empty() {
        text += &format!("\nBy key, last minute\n{}", rows(&keys, "key"));
    }
    if args.key.is_none() {
        let engines: Vec<&LastMinute> = diagnosis.engines.iter().collect();
        text += &format!("\nBy engine, last minute\n{}", rows(&engines, "engine"));
    }
    text
}

fn paragraph(text: &str, indent: &str) -> String {
    let width = stdout_width().unwrap_or(WIDTH);
    let lines = wrapped(text, width);
    let mut lines = lines.lines();
    let first = lines.next().unwrap_or_default();
    std::iter::once(first.to_owned())
        .chain(lines.map(|line| format!("{indent}{}", line.trim_start())))
        .map(|line| line + "\n")
        .collect()
}

fn ago(seconds: f64) -> String {
    if seconds < 120.0 { format!("for {seconds:.0} s") } else { format!("for {:.0} min", seconds / 60.0) }
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY).set_header(head);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn whole(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

fn classes<'a>(rows: impl Iterator<Item = &'a HistoryRow>) -> String {
    let mut shown = table(&[
        "class", "ended", "lost", "TTFT p50", "p99", "TPOT p99", "E2EL p99", "queue", "engine", "connect", "other",
    ]);
    for row in rows {
        let class = row.class.as_deref().filter(|class| !class.is_empty()).unwrap_or("(refused)");
        let slowest = row.ttft_parts.as_ref().map(|parts| parts.slowest);
        let part = |read: fn(&sluice_gateway::telemetry::PartsOfGroup) -> f64| whole(slowest.as_ref().map(read));
        let ended = row.completed + row.shed + row.failed + row.client_gone + row.refused;
        shown.add_row([
            class.to_owned(),
            ended.to_string(),
            (row.shed + row.failed).to_string(),
            whole(row.ttft_ms.map(|tails| tails.p50)),
            whole(row.ttft_ms.map(|tails| tails.p99)),
            row.tpot_ms.map_or_else(|| "-".to_owned(), |tails| format!("{:.1}", tails.p99)),
            whole(row.e2el_ms.map(|tails| tails.p99)),
            part(|parts| parts.queue),
            part(|parts| parts.backend),
            part(|parts| parts.connect),
            part(|parts| parts.other),
        ]);
    }
    format!("{shown}\n")
}

fn rows(all: &[&LastMinute], kind: &str) -> String {
    let mut shown = table(&[kind, "ended", "lost", "tokens", "queue (ms)", "first token (ms)", "per token (ms)"]);
    let ms = |seconds: Option<f64>, digits| {
        seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{:.digits$}", seconds * 1e3))
    };
    for row in all.iter().take(ROWS) {
        let name = if row.pool.is_empty() { row.name.clone() } else { format!("{}/{}", row.pool, row.name) };
        shown.add_row([
            name,
            row.requests.to_string(),
            row.lost.to_string(),
            row.tokens.to_string(),
            ms(Some(row.queue_wait_s), 0),
            ms(row.engine_ttft_s, 0),
            ms(row.tpot_s, 1),
        ]);
    }
    let more = if all.len() > ROWS { format!("{} more are not shown\n", all.len() - ROWS) } else { String::new() };
    format!("{shown}\n{more}")
}

async fn explain(client: &AdminClient, id: &str) -> Result<String, AdminClientError> {
    let path =
        format!("/admin/requests/{}", percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC));
    let found: Requests = client.get(&path).await?;
    Ok(found.requests.iter().map(story).collect())
}

fn story(request: &RequestView) -> String {
    let mut text = format!("Request {} ended at {}: {}", request.request_id, request.time, request.outcome);
    if !request.detail.is_empty() {
        text += &format!(" ({})", request.detail);
    }
    let name = |name: &Option<std::sync::Arc<str>>| name.as_deref().unwrap_or("-").to_owned();
    text += &format!(
        ".\nKey {}, model {}, class {}, engine {}/{}; {} prompt tokens, {} generated.\n",
        name(&request.key),
        name(&request.model),
        name(&request.class),
        name(&request.pool),
        name(&request.backend),
        request.prompt_tokens.or(request.estimate_tokens).unwrap_or(0),
        request.completion_tokens.unwrap_or(0),
    );
    let ttft = request.backend_ttft_ms.unwrap_or(0.0);
    let decode = request.e2el_ms.zip(request.ttft_ms).map_or(0.0, |(e2el, ttft)| e2el - ttft);
    // The engine's own times, if it reports them. The rest of the wait is spent between gateway and
    // engine.
    let (queue, prefill) = (request.engine_queue_ms, request.engine_prefill_ms);
    let reported = queue.zip(prefill).filter(|_| request.backend_ttft_ms.is_some());
    let (queue, prefill) = reported.map_or((0.0, 0.0), |(queue, prefill)| (queue.min(ttft), prefill.min(ttft)));
    let rest = (ttft - queue - prefill).max(0.0);
    let until = if reported.is_some() {
        "between gateway and engine, before the first token"
    } else {
        "until the engine's first token"
    };
    let parts = [
        ("in the queue of the gateway", request.queue_ms),
        ("in the queue of the engine", queue),
        ("in the engine's prefill, until the first token", prefill),
        (until, rest),
        ("between the first and the last token", decode),
        ("waiting for the client to read", request.client_wait_ms),
        ("to connect", request.connect_ms),
        ("to read and estimate the prompt", request.estimate_ms),
    ];
    let total = request.total_ms.max(1e-9);
    text += &format!("It took {:.0} ms:\n", request.total_ms);
    for (part, ms) in parts.iter().filter(|(_, ms)| *ms >= 0.5) {
        text += &format!("  {ms:>8.0} ms {:>3.0} %  {part}\n", 100.0 * ms / total);
    }
    if let Some((part, ms)) = parts.iter().max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, ms)| *ms > 0.0) {
        text += &format!("Most of the time went {part} ({ms:.0} ms).\n");
    }
    if !request.retries.is_empty() {
        text += &format!("Attempts were repeated: {}.\n", request.retries.join(", "));
    }
    text
}

#[cfg(test)]
mod tests;
