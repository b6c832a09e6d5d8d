//! `sluice status`: the pools and backends of a running gateway.
//!
//! Prints a line for each pool, a table of all backends, and the reasons of backends that are not
//! ready. `--json` prints the JSON as received. `--watch` repeats every second until Ctrl-C, even
//! while the gateway does not respond, because it may be restarting. Rates, latencies and counts
//! are about the requests that belong to the pool, in the last five minutes.
//!
//! Exit codes: 0 printed; 1 no valid response (the message gives the remedy); 2 wrong usage.

mod keys;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};

use keys::short;

use super::admin_command::{AdminPort, exit_code, with_client};
use super::backend_list::{activity_and_failure, fitted};
use super::terminal::{print_to_stdout, stdout_width, wrapped};
use sluice_admin::status::{BackendStatus, ClusterStatus, PoolStatus, Status, Used};
use sluice_admin::{AdminClient, AdminClientError};
use sluice_gateway::telemetry::Quantiles;

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
        Ok(text) => exit_code(print_to_stdout(&text)),
        Err(error) => exit_code(Err(error)),
    }
}

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

#[derive(Clone, Copy, Default)]
struct Style {
    colours: bool,
    width: Option<usize>,
}

impl Style {
    fn of_stdout() -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self { colours: terminal && std::env::var_os("NO_COLOR").is_none(), width: stdout_width() }
    }
}

/// Returns false once stdout is closed.
fn print(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

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
    } else if about.leaving {
        text.push_str("shutting down soon: /ready is 503, requests are still served\n");
    }
    if let Some(last) = about.last_reload.as_ref().filter(|last| !last.ok) {
        text.push_str(&format!("the last reload ({}) failed:\n", last.time));
        last.lines.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    let fit = |line: String| style.width.map_or_else(|| line.clone(), |width| wrapped(&line, width));
    if let Some(cluster) = &status.cluster {
        text += &fit(cluster_line(cluster) + &leader_line(cluster));
    }
    for finding in &status.findings {
        text += &fit(format!("! {}\n", finding.sentence));
    }
    if !status.findings.is_empty() {
        text += "  sluice diagnose has the evidence, and what to do\n";
    }
    text.push('\n');
    for pool in &status.pools {
        text += &fit(format!("{}\n", headline(pool)));
    }
    text.push_str(&format!("\n{}\n", table(status, style)));
    for pods in &status.kubernetes {
        if let Some(trouble) = &pods.trouble {
            text += &fit(format!("{}: its pods are those that were known last: {trouble}\n", pods.pool));
        }
        for pod in pods.pods.iter().filter(|pod| pod.state != "in_use" && pod.state != "managed") {
            let why = pod.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            text += &fit(format!("{}/{}: pod {}{why}\n", pods.pool, pod.name, pod.state.replace('_', " ")));
        }
    }
    for pool in &status.pools {
        if let Some(differences) = &pool.engines_differ {
            text += &fit(format!("{}: its engines serve different requests: {differences}\n", pool.name));
        }
    }
    let backends = status.pools.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
    for (pool, backend) in backends {
        let taken_back = backend.engine.as_ref().and_then(|engine| engine.taken_back.as_ref());
        let unknown = backend.models_unknown.as_ref();
        let said = [
            unknown.map(|unknown| format!("{unknown}: it gets requests for every model of its pool")),
            backend.engine_differs.clone(),
            share(backend).map(|share| format!("this gateway's share: {share}")),
            taken_back.map(|taken_back| format!("a change was taken back: {taken_back}")),
            why(backend),
        ];
        for said in said.into_iter().flatten() {
            text += &fit(format!("{}/{}: {said}\n", pool.name, backend.name));
        }
    }
    keys::lines(status).for_each(|line| text += &fit(line));
    text
}

fn cluster_line(cluster: &ClusterStatus) -> String {
    let count = cluster.gateways.len();
    let why = cluster.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!(
        "cluster: {} is {} ({}), {count} gateway{} in the ledger: {}{why}\n",
        cluster.name,
        cluster.standing.replace('_', " "),
        cluster.mode,
        if count == 1 { "" } else { "s" },
        cluster.gateways.join(", "),
    )
}

fn leader_line(cluster: &ClusterStatus) -> String {
    let Some(leader) = &cluster.leader else { return String::new() };
    let others = if leader.only_it_serves { "stands by" } else { "serves, and changes no engines or experiments" };
    let who = match (&leader.name, leader.leads) {
        (_, true) => format!("{} (this gateway)", cluster.name),
        (Some(name), false) if *name != cluster.name => format!("{name}; this gateway {others}"),
        _ => format!("none; this gateway {others}"),
    };
    let why = leader.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!("leader: {who}, for {:.0} s{why}\n", leader.seconds)
}

/// This gateway's parts of a backend's limits, if they are less than the limits.
fn share(backend: &BackendStatus) -> Option<String> {
    let limits = [
        ("slots", "slots", backend.slots),
        ("tokens", "tokens", backend.tokens),
        ("prefill_tokens", "prefill tokens", backend.prefill_tokens),
        ("permits", "permits", backend.long_prefills),
    ];
    let smaller = limits.into_iter().filter_map(|(unit, words, used)| {
        let (share, limit) = (*backend.share.get(unit)?, used.limit?);
        (share < limit).then(|| format!("{} of {} {words}", short(share), short(limit)))
    });
    let smaller: Vec<String> = smaller.collect();
    (!smaller.is_empty()).then(|| smaller.join(", "))
}

/// Seconds without bytes from an engine with requests in flight from which on a line says so. They
/// are longer than a long prefill.
const SILENCE_SHOWN: f64 = 10.0;

/// Why a backend is not ready, or the activity of its engine.
pub(super) fn why(backend: &BackendStatus) -> Option<String> {
    let busy = backend.engine.as_ref().filter(|engine| engine.step != "serve").map(activity_and_failure);
    let silence = backend.silent_seconds.filter(|seconds| *seconds >= SILENCE_SHOWN);
    let silent = silence.map(|seconds| format!("no bytes for {seconds:.0} s, {} in flight", backend.in_flight));
    match (busy, backend.reason.clone().or(silent)) {
        (Some(activity), Some(reason)) => Some(format!("{}: {reason}; engine: {activity}", backend.shown_state())),
        (Some(activity), None) => Some(format!("{}: {activity}", backend.shown_state())),
        (None, Some(reason)) => Some(format!("{}: {reason}", backend.shown_state())),
        (None, None) => None,
    }
}

fn headline(pool: &PoolStatus) -> String {
    let recent = &pool.last_5_minutes;
    let mut text =
        format!("{}: queue {}; last 5 min: {:.1} requests/s", pool.name, used(pool.queue), recent.requests_per_second);
    for (name, quantiles) in [("TTFT", recent.ttft_ms), ("TPOT", recent.tpot_ms)] {
        if let Some(Quantiles { p50, p99, .. }) = quantiles {
            text.push_str(&format!(", {name} P50 {} P99 {}", ms(p50), ms(p99)));
        }
    }
    if let Some(share) = recent.attainment {
        text.push_str(&format!(", {:.1} % within objectives", share * 100.0));
    }
    for (what, count) in [("shed", recent.shed), ("failed", recent.failed), ("spilled", recent.spilled)] {
        if count > 0 {
            text.push_str(&format!(", {count} {what}"));
        }
    }
    text
}

/// The table of backends. If addresses do not fit the terminal, they are left out. `sluice backend
/// list` shows addresses in every width.
fn table(status: &Status, style: Style) -> Table {
    // The width is measured without colours, because colours are characters, too.
    let plain = table_with(status, Style { colours: false, ..style }, true);
    let wide = plain.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    table_with(status, style, style.width.is_none_or(|width| wide <= width))
}

fn table_with(status: &Status, style: Style, addresses: bool) -> Table {
    let mut table = fitted(UTF8_HORIZONTAL_ONLY, style.width.filter(|_| !addresses));
    let mut header = vec!["backend", "state", "slots", "tokens", "prefill", "long", "ms/token"];
    header.extend(addresses.then_some("url"));
    table.set_header(header);
    for pool in &status.pools {
        for backend in &pool.backends {
            table.add_row(row(pool, backend, style.colours, addresses));
        }
    }
    for column in 2..=6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn row(pool: &PoolStatus, backend: &BackendStatus, colours: bool, addresses: bool) -> Vec<Cell> {
    let mut state = Cell::new(backend.shown_state());
    if colours {
        state = match backend.state.as_str() {
            _ if backend.failing => state.fg(Color::Red).add_attribute(Attribute::Bold),
            "ready" => state.fg(Color::Green),
            "ejected" | "down" => state.fg(Color::Red).add_attribute(Attribute::Bold),
            "probation" | "draining" | "starting" => state.fg(Color::Yellow),
            _ => state,
        };
    }
    let mut row = vec![
        Cell::new(format!("{}/{}", pool.name, backend.name)),
        state,
        Cell::new(used(backend.slots)),
        Cell::new(used(backend.tokens)),
        Cell::new(used(backend.prefill_tokens)),
        Cell::new(used(backend.long_prefills)),
        Cell::new(backend.tpot_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}"))),
    ];
    row.extend(addresses.then(|| Cell::new(&backend.url)));
    row
}

pub(super) fn used(used: Used) -> String {
    match used.limit {
        Some(limit) => format!("{}/{}", short(used.used), short(limit)),
        None => short(used.used),
    }
}

pub(super) fn ms(value: f64) -> String {
    if value >= 1_000.0 { format!("{:.2} s", value / 1e3) } else { format!("{value:.1} ms") }
}

pub(super) fn span(seconds: f64) -> String {
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
    use sluice_admin::About;
    use sluice_admin::status::LeaderStatus;
    use sluice_fleet::EngineView;
    use sluice_gateway::telemetry::WindowStats;

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
        let last_5_minutes = WindowStats {
            requests_per_second: 41.5,
            ttft_ms: Some(Quantiles { p50: 21.4, p99: 1_088.0, count: 2_490 }),
            tpot_ms: Some(Quantiles { p50: 6.2, p99: 11.9, count: 2_400 }),
            attainment: Some(0.987),
            shed: 3,
            ..WindowStats::default()
        };
        let short = PoolStatus {
            name: "short".into(),
            queue: some(3, 512),
            last_5_minutes,
            backends: vec![ready, ejected],
            ..PoolStatus::default()
        };
        let about = About {
            version: "0.1.0".into(),
            uptime_seconds: 5_025.0,
            listen: "127.0.0.1:8080".into(),
            config: Some("sluice.toml".into()),
            ..About::default()
        };
        Status { about, pools: vec![short], ..Status::default() }
    }

    #[test]
    fn the_table() {
        insta::assert_snapshot!(render(&status(), Style::default()));
    }

    #[test]
    fn the_ledger_has_a_line_and_shares_below_the_limits_are_named() {
        let mut status = status();
        status.cluster = Some(ClusterStatus {
            name: "gateway-1".into(),
            mode: "strict".into(),
            standing: "holding".into(),
            gateways: vec!["gateway-1".into(), "gateway-2".into()],
            ..ClusterStatus::default()
        });
        let share = [("slots", 20), ("tokens", 400_000), ("permits", 0)];
        status.pools[0].backends[0].share = share.map(|(unit, share)| (unit.to_owned(), share)).into();
        let text = render(&status, Style::default());
        assert!(
            text.contains("cluster: gateway-1 is holding (strict), 2 gateways in the ledger: gateway-1, gateway-2\n"),
            "{text}"
        );
        assert!(text.contains("short/gpu0: this gateway's share: 20 of 64 slots, 0 of 1 permits\n"), "{text}");
        assert!(!text.contains("short/gpu1: this gateway's share"), "{text}");
    }

    #[test]
    fn who_leads_has_a_line() {
        let mut status = status();
        let mut line = |leader: LeaderStatus| {
            let cluster = ClusterStatus { name: "gateway-1".into(), leader: Some(leader), ..ClusterStatus::default() };
            status.cluster = Some(cluster);
            let text = render(&status, Style::default());
            text.lines().find(|line| line.starts_with("leader: ")).map(str::to_owned).unwrap_or_default()
        };
        let of = |name: &str| LeaderStatus { name: Some(name.to_owned()), seconds: 7.4, ..LeaderStatus::default() };
        let leads = LeaderStatus { leads: true, ..of("gateway-1") };
        assert_eq!(line(leads), "leader: gateway-1 (this gateway), for 7 s");
        let stands_by = LeaderStatus { only_it_serves: true, ..of("gateway-2") };
        assert_eq!(line(stands_by), "leader: gateway-2; this gateway stands by, for 7 s");
        let lost = LeaderStatus { why: Some("no answer".to_owned()), ..of("gateway-1") };
        assert_eq!(
            line(lost),
            "leader: none; this gateway serves, and changes no engines or experiments, for 7 s: no answer"
        );
    }

    #[test]
    fn in_80_columns_no_cell_is_broken_and_the_reasons_are_below() {
        let style = Style { width: Some(80), ..Style::default() };
        let text = render(&status(), style);
        let table: Vec<&str> = text.lines().skip_while(|line| !line.starts_with('─')).collect();
        assert!(table.iter().all(|line| line.chars().count() <= 80), "{text}");
        assert!(table.iter().any(|line| line.contains("short/gpu1") && line.contains("ejected")), "{text}");
        assert!(text.ends_with("short/gpu1: ejected: failed connections, out for 4 s more\n"), "{text}");
        assert!(
            !text.contains("http://127.0.0.1:8001")
                && render(&status(), Style::default()).contains("http://127.0.0.1:8001")
        );
    }

    #[test]
    fn an_engine_that_starts_says_how_far_it_is() {
        let engine =
            EngineView { step: "start".into(), detail: "loading weights, 12 s".into(), ..EngineView::default() };
        let mut backend = BackendStatus { state: "starting".into(), engine: Some(engine), ..BackendStatus::default() };
        assert_eq!(why(&backend).as_deref(), Some("starting: start: loading weights, 12 s"));
        backend.reason = Some("its probes fail".into());
        assert_eq!(why(&backend).as_deref(), Some("starting: its probes fail; engine: start: loading weights, 12 s"));
        let killed = "killed: signal 9; look for the OOM killer";
        let waits = EngineView {
            step: "backoff".into(),
            detail: "next attempt after 1.0 s".into(),
            why: Some(killed.into()),
            ..EngineView::default()
        };
        let backend = BackendStatus { state: "starting".into(), engine: Some(waits), ..BackendStatus::default() };
        let said = format!("starting: backoff: next attempt after 1.0 s; last failure: {killed}");
        assert_eq!(why(&backend), Some(said));
        assert_eq!(why(&BackendStatus::default()), None);
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
