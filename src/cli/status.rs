//! `sluice status`: the pools and backends of a running gateway.
//!
//! Reads `/admin/status` and prints one table per pool, or with `--json` the JSON as received; with `--watch` again every
//! second until Ctrl-C. Latencies are of the last minute, of requests that belong to the pool.
//! Exit codes: 0 printed; 1 no valid response (the message says what to do); 2 wrong usage.
//! `--watch` continues while the gateway does not respond: it may be restarting.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table};

use super::admin_command::{AdminPort, with_client};
use super::backend_list::activity;
use crate::admin::status::{BackendStatus, PoolStatus, Status, Used};
use crate::admin::{AdminClient, AdminClientError};
use crate::telemetry::Quantiles;

/// Between two polls with `--watch`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Moves the cursor home and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Show pools and backends of a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    #[command(flatten)]
    port: AdminPort,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Refresh every second
    #[arg(long)]
    pub watch: bool,
}

/// Runs the command.
pub fn run(args: &StatusArgs) -> ExitCode {
    with_client(&args.port, async |client| match args.watch {
        true => watch(client, args.json).await,
        false => once(client, args.json).await,
    })
}

async fn once(client: &AdminClient, json: bool) -> ExitCode {
    match fetch(client, json, Style::of_stdout()).await {
        Ok(text) if print(&text) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Refreshes until Ctrl-C, or until stdout is closed.
async fn watch(client: &AdminClient, json: bool) -> ExitCode {
    let screen = std::io::stdout().is_terminal() && !json;
    loop {
        let text = match fetch(client, json, Style::of_stdout()).await {
            Ok(text) => text,
            Err(error) => format!("{error}\n"),
        };
        if !print(&if screen { format!("{CLEAR}{text}") } else { text }) {
            return ExitCode::SUCCESS;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn fetch(client: &AdminClient, json: bool, style: Style) -> Result<String, AdminClientError> {
    if json {
        let whole: serde_json::Value = client.get("/admin/status").await?;
        return Ok(format!("{whole}\n"));
    }
    Ok(render(&client.get("/admin/status").await?, style))
}

/// What the terminal supports.
#[derive(Clone, Copy, Default)]
struct Style {
    /// States are coloured.
    colours: bool,
    /// Columns are wrapped to the width of the terminal.
    fitted: bool,
}

impl Style {
    fn of_stdout() -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self { colours: terminal && std::env::var_os("NO_COLOR").is_none(), fitted: terminal }
    }
}

/// Prints to stdout. Returns false once it is closed.
fn print(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// The status as text.
fn render(status: &Status, style: Style) -> String {
    let about = &status.about;
    let mut text = format!(
        "sluice {} up {} · clients on {} · {}\n",
        about.version,
        span(about.uptime_seconds),
        about.listen,
        about.config.as_deref().unwrap_or("started from flags"),
    );
    if about.shutting_down {
        text.push_str("shutting down: running requests finish, new ones are refused\n");
    }
    if let Some(last) = about.last_reload.as_ref().filter(|last| !last.ok) {
        text.push_str(&format!("the last reload ({}) failed:\n", last.time));
        last.lines.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    for pool in &status.pools {
        text.push_str(&format!("\n{}\n{}\n", headline(pool), table(pool, style)));
    }
    text
}

/// One line about a pool: queue, rate, latencies, failures.
fn headline(pool: &PoolStatus) -> String {
    let minute = &pool.last_minute;
    let mut text = format!("{}: queue {}, {:.1} requests/s", pool.name, used(pool.queue), minute.requests_per_second);
    for (name, quantiles) in [("TTFT", minute.ttft_ms), ("TPOT", minute.tpot_ms)] {
        if let Some(Quantiles { p50, p99, .. }) = quantiles {
            text.push_str(&format!(", {name} P50 {} P99 {}", ms(p50), ms(p99)));
        }
    }
    if let Some(share) = minute.attainment {
        text.push_str(&format!(", {:.1} % within objectives", share * 100.0));
    }
    for (what, count) in [("shed", minute.shed), ("failed", minute.failed), ("spilled", minute.spilled)] {
        if count > 0 {
            text.push_str(&format!(", {count} {what}/min"));
        }
    }
    text
}

fn table(pool: &PoolStatus, style: Style) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY);
    if style.fitted {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(["backend", "state", "slots", "tokens", "prefill tokens", "long prefills", "ms/token", "url"]);
    for backend in &pool.backends {
        table.add_row(row(backend, style.colours));
    }
    for column in 2..=6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn row(backend: &BackendStatus, colours: bool) -> Vec<Cell> {
    let busy = backend.engine.as_ref().filter(|engine| engine.step != "serve");
    let state = match (busy, &backend.reason) {
        (Some(engine), _) => format!("{} ({})", backend.state, activity(engine)),
        (None, Some(reason)) => format!("{}: {reason}", backend.state),
        (None, None) => backend.state.clone(),
    };
    let mut state = Cell::new(state);
    if colours {
        state = match backend.state.as_str() {
            _ if backend.failing => state.fg(Color::Red).add_attribute(Attribute::Bold),
            "ready" => state.fg(Color::Green),
            "ejected" | "down" => state.fg(Color::Red).add_attribute(Attribute::Bold),
            "probation" | "draining" | "starting" => state.fg(Color::Yellow),
            _ => state,
        };
    }
    vec![
        Cell::new(&backend.name),
        state,
        Cell::new(used(backend.slots)),
        Cell::new(used(backend.tokens)),
        Cell::new(used(backend.prefill_tokens)),
        Cell::new(used(backend.long_prefills)),
        Cell::new(backend.tpot_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}"))),
        Cell::new(&backend.url),
    ]
}

fn used(used: Used) -> String {
    match used.limit {
        Some(limit) => format!("{}/{}", short(used.used), short(limit)),
        None => short(used.used),
    }
}

/// Three digits and a k or M beyond ten thousand.
fn short(value: u64) -> String {
    match value {
        0..10_000 => value.to_string(),
        10_000..10_000_000 => format!("{:.0}k", value as f64 / 1e3),
        _ => format!("{:.0}M", value as f64 / 1e6),
    }
}

fn ms(value: f64) -> String {
    if value >= 1_000.0 { format!("{:.2} s", value / 1e3) } else { format!("{value:.1} ms") }
}

fn span(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3_600 => format!("{} min", whole / 60),
        3_600..86_400 => format!("{} h {} min", whole / 3_600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::About;
    use crate::telemetry::MinuteStats;

    fn status() -> Status {
        let some = |used, limit| Used { used, limit: Some(limit) };
        let ready = BackendStatus {
            name: "gpu0".into(),
            url: "http://127.0.0.1:8000".into(),
            state: "ready".into(),
            in_flight: 12,
            slots: some(12, 64),
            tokens: some(81_250, 400_000),
            long_prefills: some(1, 1),
            tpot_ms: Some(6.25),
            ..BackendStatus::default()
        };
        let ejected = BackendStatus {
            name: "gpu1".into(),
            url: "http://127.0.0.1:8001".into(),
            state: "ejected".into(),
            reason: Some("failed connections, out for 4 s more".into()),
            slots: some(0, 64),
            ..BackendStatus::default()
        };
        let last_minute = MinuteStats {
            requests_per_second: 41.5,
            ttft_ms: Some(Quantiles { p50: 21.4, p99: 1_088.0, count: 2_490 }),
            tpot_ms: Some(Quantiles { p50: 6.2, p99: 11.9, count: 2_400 }),
            attainment: Some(0.987),
            shed: 3,
            ..MinuteStats::default()
        };
        let short =
            PoolStatus { name: "short".into(), queue: some(3, 512), last_minute, backends: vec![ready, ejected] };
        let about = About {
            version: "0.1.0".into(),
            uptime_seconds: 5_025.0,
            listen: "127.0.0.1:8080".into(),
            config: Some("sluice.toml".into()),
            ..About::default()
        };
        Status { about, pools: vec![short] }
    }

    #[test]
    fn the_table() {
        insta::assert_snapshot!(render(&status(), Style::default()));
    }

    #[tokio::test]
    async fn a_gateway_that_does_not_respond_is_an_error_that_says_what_to_check() {
        let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let client = AdminClient::new(&unused, None).unwrap();
        let error = fetch(&client, false, Style::default()).await.unwrap_err().to_string();
        assert!(error.contains("is sluice serve running"), "{error}");
        assert_eq!(once(&client, true).await, ExitCode::FAILURE);
    }
}
