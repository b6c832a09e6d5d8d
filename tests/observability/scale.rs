//! The size of the metrics page is bounded by the configuration, for all requests of clients and
//! any uptime.
//!
//! `cargo bench --bench telemetry` measures the time that the page takes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sluice_core::openai::ShedReason;
use sluice_gateway::flow::{Outcome, Record};
use sluice_gateway::telemetry::Telemetry;
use sluice_gateway::telemetry::testing::{
    BACKENDS_OF_A_POOL, MODELS_OF_A_PAIR, PAIRS, completed, large_admission, large_traffic, record,
};
use tokio::time::{Instant, advance};

/// Maximum series of a page with 200 backends and 50 models.
const MAX_SERIES: usize = 35_000;
/// Set in the environment of the process that simulates a day.
const DAY: &str = "SLUICE_TEST_DAY";
const HOURS: u32 = 24;
/// Simulated time between two rounds of requests.
const ROUND: Duration = Duration::from_secs(10);
const ROUNDS_OF_A_SCRAPE: u32 = 180;
/// Allowed growth of resident memory from the first hour to the last, bytes: memory that an
/// allocator retains. A leak of 100 bytes per request would add 130 MB.
const SLACK: u64 = 6 << 20;

fn series(page: &str) -> impl Iterator<Item = &str> {
    page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| Some(line.rsplit_once(' ')?.0))
}

/// The values of each label on a page.
fn values(page: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (_, labels) in series(page).filter_map(|name| name.split_once('{')) {
        for (label, value) in labels.trim_end_matches('}').split("\",").filter_map(|pair| pair.split_once("=\"")) {
            found.entry(label).or_default().insert(value.trim_end_matches('"'));
        }
    }
    found
}

/// A record with all texts that clients can choose: ids, paths and models that do not exist.
fn strange(number: u32) -> Record {
    Record {
        request_id: format!("client-{number}").into(),
        path: Some(format!("/nothing/{number}").into()),
        refused_model: Some(format!("unknown-{number}").into()),
        route: None,
        home: None,
        model: None,
        ..record(Outcome::Refused)
    }
}

#[test]
fn two_hundred_backends_and_fifty_models_have_bounded_series() {
    let admission = large_admission(Instant::now());
    let telemetry = Telemetry::with(Box::new(move || admission.view()), None);
    large_traffic().iter().for_each(|record| telemetry.record(record));
    telemetry.record(&strange(0));
    let before = telemetry.page();
    (1..1_000).for_each(|number| telemetry.record(&strange(number)));
    let page = telemetry.page();
    let names = |page: &str| series(page).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names(&before), names(&page), "clients have added series");
    let labels = values(&page);
    let count = |label: &str| labels.get(label).map_or(0, BTreeSet::len);
    let (pools, models) = (2 * PAIRS, PAIRS * MODELS_OF_A_PAIR);
    // One more value: a request that was refused early has neither label.
    assert_eq!([count("pool"), count("model"), count("backend")], [pools + 1, models + 1, pools * BACKENDS_OF_A_POOL]);
    assert!(series(&page).count() < MAX_SERIES, "{}", series(&page).count());
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Records the requests of ten seconds: many with existing models, and one of each bad kind.
fn requests(telemetry: &Telemetry, traffic: &[Record], round: u32) {
    let first = round as usize * 7;
    for index in 0..20 {
        let mut record = traffic[(first + index) % traffic.len()].clone();
        record.request_id = format!("{round}-{index}").into();
        record.upstream_id = record.request_id.clone();
        telemetry.record(&record);
    }
    telemetry.record(&strange(round));
    telemetry.record(&Record {
        outcome: Outcome::ClientGone,
        ..completed(Duration::from_millis(20), Duration::from_millis(5))
    });
    telemetry.record(&record(Outcome::Shed(ShedReason::QueueFull)));
}

/// Runs in a separate process, because other tests of this program use memory, too.
#[test]
fn a_day_adds_neither_series_nor_memory() {
    if std::env::var_os(DAY).is_some() {
        return a_day();
    }
    let name = "scale::a_day_adds_neither_series_nor_memory";
    let mut own = Command::new(std::env::current_exe().unwrap());
    let output = own.args([name, "--exact", "--nocapture"]).env(DAY, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("after a day"), "{said}");
    print!("{said}");
}

fn a_day() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let admission = large_admission(Instant::now());
        let telemetry = Arc::new(Telemetry::with(Box::new(move || admission.view()), None));
        let traffic = large_traffic();
        let mut first = None;
        for round in 0..HOURS * 360 {
            requests(&telemetry, &traffic, round);
            if round % ROUNDS_OF_A_SCRAPE == 0 {
                telemetry.page();
            }
            if round == 360 {
                first = Some((series(&telemetry.page()).count(), resident()));
            }
            advance(ROUND).await;
        }
        let (names, memory) = first.unwrap();
        let last = (series(&telemetry.page()).count(), resident());
        println!(
            "after an hour {names} series and {} KiB, after a day {} and {} KiB",
            memory >> 10,
            last.0,
            last.1 >> 10
        );
        assert_eq!(last.0, names);
        assert!(last.1 <= memory + SLACK, "memory has grown");
    });
}
