//! The configuration bounds the size of the metrics page, whatever clients request and however long
//! the gateway runs.
//!
//! `cargo bench --bench telemetry` measures the time that the page takes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sluice_core::openai::ShedReason;
use sluice_gateway::flow::keys::{KeyInFlight, KeyTokens};
use sluice_gateway::flow::owner::KeyWork;
use sluice_gateway::flow::{Outcome, Record};
use sluice_gateway::telemetry::testing::{CLASSES, FEW_POOLS, KEYS, Large, MANY_POOLS, completed, record};
use sluice_gateway::telemetry::{EngineMetrics, EnginePage, Telemetry};
use tokio::time::{Instant, advance};

/// Maximum size of a page with 200 backends, 50 models, 8 classes and 100 keys: 3 MB.
const MAX_BYTES: usize = 3_000_000;
/// Variable in the environment of the process that simulates a day.
const DAY: &str = "SLUICE_TEST_DAY";
const HOURS: u32 = 24;
const ROUND: Duration = Duration::from_secs(10);
const ROUNDS_OF_A_SCRAPE: u32 = 180;
/// Allowed growth of resident memory from the first hour to the last, in bytes, because the
/// allocator may retain memory. A leak of 100 bytes per request would add 130 MB.
const SLACK: u64 = 6 << 20;

fn series(page: &str) -> impl Iterator<Item = &str> {
    page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| Some(line.rsplit_once(' ')?.0))
}

fn values(page: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (_, labels) in series(page).filter_map(|name| name.split_once('{')) {
        for (label, value) in labels.trim_end_matches('}').split("\",").filter_map(|pair| pair.split_once("=\"")) {
            found.entry(label).or_default().insert(value.trim_end_matches('"'));
        }
    }
    found
}

/// A record in which a client has made up every text that it can choose: ids, path and model.
fn strange(number: u32) -> Record {
    Record {
        request_id: format!("client-{number}").into(),
        path: Some(format!("/nothing/{number}").into()),
        refused_model: Some(format!("unknown-{number}").into()),
        route: None,
        home: None,
        key: None,
        model: None,
        ..record(Outcome::Refused)
    }
}

/// Telemetry of a large deployment in which the gateway runs every engine, every key has limits and
/// every pool has a fair queue.
fn large(shape: &Large) -> Telemetry {
    let admission = shape.admission(Instant::now());
    let config = shape.config();
    let telemetry = Telemetry::with(Box::new(move || admission.view()), None);
    let pools = config.pools.iter();
    let names: Vec<[String; 2]> =
        pools.flat_map(|pool| pool.backends.iter().map(|backend| [pool.name.clone(), backend.name.clone()])).collect();
    let engines = names.clone();
    telemetry.show_engines(PHASES.to_vec(), move || {
        let of = |[pool, backend]: [String; 2]| EngineMetrics {
            pool,
            backend,
            started: Some(1e9),
            ..EngineMetrics::default()
        };
        engines.iter().cloned().map(of).collect()
    });
    telemetry.show_engine_pages(move || {
        let of = |[pool, backend]: [String; 2]| EnginePage { pool, backend, running: 12.0, ..EnginePage::default() };
        names.iter().cloned().map(of).collect()
    });
    let keys: Vec<String> = config.auth.keys.iter().map(|key| key.name.clone()).collect();
    let pools: Vec<String> = config.pools.iter().map(|pool| pool.name.clone()).collect();
    let name = |key: &String| -> Arc<str> { key.as_str().into() };
    let (limited, counted) = (keys.clone(), keys.clone());
    telemetry.show_keys(move || {
        let count = Some((1_000, 2_000));
        limited.iter().map(|key| KeyTokens { name: name(key), minute: count, day: count }).collect()
    });
    telemetry.show_keys_in_flight(move || {
        let count = (10, Some(20));
        counted
            .iter()
            .map(|key| KeyInFlight { name: name(key), requests: count, sequences: count, tokens: count })
            .collect()
    });
    telemetry.show_key_work(move || {
        let of =
            |pool: &String, key: &String| KeyWork { pool: pool.clone(), key: key.clone(), seconds: 1.5, waiting: 2 };
        // Each key uses two pools.
        keys.iter()
            .enumerate()
            .flat_map(|(index, key)| [0, 1].map(|next| of(&pools[(index + next) % pools.len()], key)))
            .collect()
    });
    telemetry.configured(&config);
    shape.traffic().iter().for_each(|record| telemetry.record(record));
    telemetry
}

/// As many names as an engine has phases.
const PHASES: [&str; 12] =
    ["start", "warm_up", "serve", "drain", "stop", "backoff", "hold", "probe", "adopt", "wait", "sleep", "wake"];

#[test]
fn two_hundred_backends_and_fifty_models_have_a_bounded_page() {
    for (shape, merged) in [(MANY_POOLS, "class"), (FEW_POOLS, "model")] {
        let telemetry = large(&shape);
        telemetry.record(&strange(0));
        let before = telemetry.page();
        (1..1_000).for_each(|number| telemetry.record(&strange(number)));
        let begun = std::time::Instant::now();
        let page = telemetry.page();
        let (took, count) = (begun.elapsed(), series(&page).count());
        println!("{} pools: {count} series, {} bytes, {took:?}", 2 * shape.pairs, page.len());
        let names = |page: &str| series(page).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(names(&before), names(&page), "clients have added series");
        assert_eq!(names(&page).iter().collect::<BTreeSet<_>>().len(), count, "a series twice");
        assert!(page.len() < MAX_BYTES, "{}", page.len());
        assert!(page.contains(&format!("sluice_metrics_merged{{label=\"{merged}\",metrics=\"requests\"}} 1")));
        let labels = values(&page);
        let count = |label: &str| labels.get(label).map_or(0, BTreeSet::len);
        let pools = 2 * shape.pairs;
        // `pool` may also be empty, because a request that was refused early has no pool.
        assert_eq!(
            [count("pool"), count("backend"), count("key")],
            [pools + 1, pools * shape.backends_of_a_pool, KEYS]
        );
        // The metrics of objectives name every class and every model that the rule for merging
        // leaves.
        assert!(count("class") > CLASSES && count("model") > 30, "{} {}", count("class"), count("model"));
    }
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Records the requests of ten seconds. Many are for existing models, and there is one of each bad
/// kind.
fn requests(telemetry: &Telemetry, traffic: &[Record], round: u32) {
    // The rounds differ, so that every pool has requests within five minutes, the window of
    // attainment.
    let first = round as usize * 7;
    for index in 0..20 {
        let mut record = traffic[(first + 60 * index) % traffic.len()].clone();
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

/// The measurement runs in a separate process, because other tests of this program use memory, too.
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
        let telemetry = Arc::new(large(&MANY_POOLS));
        let traffic = MANY_POOLS.traffic();
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
        // The traffic has one backend that is in no pool. A scrape removes the series of such
        // backends.
        telemetry.page();
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
