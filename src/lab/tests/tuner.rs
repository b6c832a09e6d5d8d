//! The online tuner on simulated engines: wrong limits are found and mended, and the problem of the
//! engines is named.

use crate::{LabFile, LabRun, Scenario, run};
use sluice_online::event::{Event, EventKind};
use sluice_online::observe::diagnosis::Reading;

const GATEWAY: &str = r#"
[tuner]
mode = "apply"
[slo]
ttft = "100ms"
ttft_per_1k_prompt_tokens = "160ms"
tpot = "20ms"
[[model]]
name = "llama-3.1-8b"
[[pool]]
name = "all"
long_prefix = { threshold = "5k", slots = 1 }
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[pool.backend]]
name = "gpu1"
url = "http://127.0.0.1:8001"
"#;

const SHORT_AND_LONG: &str = r#"class = [
    { name = "short", rate = 24, in = 200, out = 128 }, { name = "long", rate = 1.6, in = 16000, out = 64 },
]"#;

fn with(sets: &[&str], args: &str, traffic: &str, duration: &str) -> LabRun {
    let text = format!(
        "gateway = '''{GATEWAY}'''\nset = {sets:?}\nduration = \"{duration}\"\n[[engine]]\nargs = {args}\n[[traffic]]\n{traffic}\n"
    );
    let file = LabFile::parse(&text, "test").unwrap();
    let scenario = Scenario { file, folder: "/".into() };
    run(&scenario.lab(&scenario.file.variants()[0]).unwrap(), 1).unwrap()
}

const PIECES: &str = "{ long-prefill-token-threshold = 256 }";

/// The tuner's changes, without observations.
fn changes(events: &[Event]) -> impl Iterator<Item = &Event> {
    events.iter().filter(|event| event.kind.is_change())
}

#[test]
fn limits_that_are_set_wrongly_are_mended_and_then_left_alone() {
    for (wrong, key) in [
        ("pool.all.slots=4", "pool.all.slots"),
        ("pool.all.long_prefix.threshold=64", "pool.all.long_prefix.threshold"),
    ] {
        let run = with(&[wrong], PIECES, SHORT_AND_LONG, "5m");
        let report = run.tuner.expect("it acts");
        let group = &report.groups[0];
        assert!(group.attainment.unwrap() >= 0.97, "{wrong}: {report:?}");
        assert!(group.limits.iter().any(|limit| limit.key == key), "{wrong}: {report:?}");
        assert!(run.tuning.iter().any(|event| event.kind == EventKind::Kept), "{wrong}: {:?}", run.tuning);
        let late = changes(&run.tuning).filter(|event| event.at > 240.0).count();
        assert_eq!(late, 0, "{wrong}: it does not come to rest: {:?}", run.tuning);
        let failed = run.result.requests.iter().filter(|record| record.sent > 120.0 && !record.is_completed()).count();
        assert_eq!(failed, 0, "{wrong}");
    }
}

#[test]
fn good_limits_are_left_alone() {
    let run = with(&[], PIECES, SHORT_AND_LONG, "8m");
    assert_eq!(changes(&run.tuning).collect::<Vec<_>>(), Vec::<&Event>::new());
    assert!(run.tuner.unwrap().groups[0].attainment.unwrap() >= 0.99);
}

#[test]
fn a_change_of_limits_while_requests_run_loses_none() {
    // The limits begin at four slots, so they change many times under a full queue.
    let run = with(&["pool.all.slots=4", "pool.all.queue.timeout=\"10m\""], PIECES, SHORT_AND_LONG, "3m");
    assert!(run.tuning.iter().filter(|event| event.kind == EventKind::Tried).count() > 0);
    let lost = run.result.requests.iter().filter(|record| !record.is_completed()).count();
    let shed = run.result.requests.iter().filter(|record| record.is_failed()).count();
    assert_eq!(lost - shed, 0, "unfinished requests");
    assert!(shed < run.result.requests.len() / 4, "{shed} of {}", run.result.requests.len());
}

#[test]
fn what_is_the_matter_with_engines_is_named() {
    let chat = "class = [{ name = \"chat\", rate = 24, in = 300, out = 200 }]";
    let long_answers = "class = [{ name = \"chat\", rate = 17, in = 300, out = \"200-1000\" }]";
    let adapters =
        "class = [{ name = \"chat\", rate = 12, in = 200, out = 64 }]\nadapters = { names = [\"a\", \"b\", \"c\"] }";
    let few = "class = [{ name = \"chat\", rate = 0.2, in = 200, out = 64 }]";
    let small =
        "{ num-gpu-blocks-override = 1200, max-num-seqs = 512, enable-prefix-caching = false, max-model-len = 8192 }";
    for (name, args, traffic, expected) in [
        ("sequences", "{ max-num-seqs = 4 }", chat, Some(Reading::Sequences)),
        ("memory", small, long_answers, Some(Reading::Memory)),
        ("adapters", "{ enable-lora = true, max-loras = 1 }", adapters, Some(Reading::AdapterSlots)),
        ("interference", "{}", SHORT_AND_LONG, Some(Reading::Interference)),
        ("idle", "{}", few, Some(Reading::Idle)),
        ("nothing", PIECES, SHORT_AND_LONG, None),
    ] {
        let strict = if name == "interference" { "slo.tpot=\"9ms\"" } else { "slo.tpot=\"20ms\"" };
        let calm = if name == "interference" { "slo.ttft=\"30s\"" } else { "slo.ttft=\"100ms\"" };
        let run = with(&[strict, calm, "pool.all.slots=1024"], args, traffic, "130s");
        let found = &run.tuner.as_ref().unwrap().groups[0].diagnoses;
        assert_eq!(found.first().map(|found| found.reading), expected, "{name}: {:#?}", run.tuner);
    }
}
