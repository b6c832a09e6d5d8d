//! Planted causes in made-up traffic of one pool are found, and good traffic has no finding.

use std::time::Duration;

use super::facts::{BackendFacts, Facts, PageFacts, PoolFacts};
use super::{Cause, Finding, Findings, LOOK};
use sluice_core::base::Rng;
use sluice_gateway::telemetry::totals::Totals;

const BEFORE: u32 = 60;
/// Looks within which a cause must be found: two minutes.
const WITHIN: u32 = 12;

#[derive(Clone, Copy)]
struct Engine {
    tpot: f64,
    /// Seconds to the first token at the engine, and on the way.
    ttft: (f64, f64),
    facts: PageFacts,
    silent: f64,
    /// Whether the page shows work although the engine sends nothing.
    works: bool,
    serves: bool,
    fails: f64,
    ends: bool,
}

struct Traffic {
    rng: Rng,
    engines: Vec<Engine>,
    slots: f64,
    /// Requests a second.
    rate: f64,
    /// Prompt tokens of most requests.
    prompt: f64,
    /// Prompt tokens of every tenth request.
    long: f64,
    queue: f64,
    wait: f64,
    /// Seconds by which the first tokens of every tenth request are later.
    long_ttft: f64,
    /// Whether all slots are in use while requests wait.
    is_full: bool,
    estimate: f64,
    /// Share of the requests with the first of two keys.
    first_key: f64,
    /// Additional turns of the first engine in a round of requests.
    more_turns: usize,
    facts: Facts,
}

impl Traffic {
    fn new(engines: usize) -> Self {
        let facts = PageFacts { running: 8.0, kv_usage: 0.3, cache_tokens: Some(500_000), ..PageFacts::default() };
        let engine = Engine {
            tpot: 0.006,
            ttft: (0.03, 0.002),
            facts,
            silent: 0.0,
            works: false,
            serves: true,
            fails: 0.0,
            ends: true,
        };
        let names =
            (0..engines).map(|index| BackendFacts { name: format!("gpu{index}").into(), ..BackendFacts::default() });
        let pool = PoolFacts { name: "all".into(), backends: names.collect(), ..PoolFacts::default() };
        Self {
            rng: Rng::new(7),
            engines: vec![engine; engines],
            slots: 64.0,
            rate: 12.0,
            prompt: 500.0,
            long: 3_000.0,
            queue: 0.0,
            wait: 0.0,
            long_ttft: 0.0,
            is_full: true,
            estimate: 1.0,
            first_key: 0.5,
            more_turns: 0,
            facts: Facts {
                pools: vec![pool],
                keys: ["a", "b"].map(|key| (key.into(), Totals::default())).to_vec(),
                ..Facts::default()
            },
        }
    }

    fn jitter(&mut self) -> f64 {
        0.6 + 0.8 * self.rng.unit()
    }

    fn pass(&mut self) {
        let requests = (self.rate * LOOK.as_secs_f64() * self.jitter().sqrt()) as usize;
        let turns = (0..self.engines.len()).chain(std::iter::repeat_n(0, self.more_turns));
        let serving: Vec<usize> = turns.filter(|index| self.engines[*index].serves).collect();
        for number in 0..requests {
            let at = serving[number % serving.len()];
            let engine = self.engines[at];
            let typical = if number % 10 == 9 { self.long } else { self.prompt };
            let (prompt, tpot, ttft) = (typical * self.jitter() * self.jitter(), self.jitter(), self.jitter());
            let fails = self.rng.unit() < engine.fails;
            if !engine.ends {
                continue;
            }
            let add = |totals: &mut Totals| {
                totals.ended += 1.0;
                totals.failed += f64::from(u8::from(fails));
                totals.sent += 1.0;
                totals.queue_wait += self.wait;
                totals.connect += 0.0003;
                totals.tokens += prompt + 100.0;
                totals.prompts.add(prompt);
                totals.long_prompts.add_weighted(prompt, prompt * prompt);
                totals.tpot.add(engine.tpot * tpot);
                let more = if number % 10 == 9 { self.long_ttft } else { 0.0 };
                totals.add_ttft(engine.ttft.0 * ttft + engine.ttft.1 + more, prompt);
                totals.estimates.add_weighted(self.estimate, prompt);
            };
            let key = usize::from((number as f64 + 0.5) / requests as f64 > self.first_key);
            let Facts { pools, keys, .. } = &mut self.facts;
            add(&mut pools[0].totals);
            add(&mut pools[0].backends[at].totals);
            add(&mut keys[key].1);
            let page = &mut self.engines[at].facts;
            page.ttft = (page.ttft.0 + engine.ttft.0 * ttft, page.ttft.1 + 1.0);
        }
        self.facts.pools[0].queue = self.queue;
        for (engine, backend) in self.engines.iter_mut().zip(&mut self.facts.pools[0].backends) {
            let gaps = &mut engine.facts.itl;
            *gaps = (gaps.0 + 100.0 * 0.006, gaps.1 + 100.0);
            let tokens = engine.facts.running * LOOK.as_secs_f64() / engine.tpot;
            engine.facts.tokens[1] += if engine.silent == 0.0 { tokens } else { 0.0 };
            backend.decoding.seconds += engine.facts.running * LOOK.as_secs_f64();
            backend.decoding.tokens = engine.facts.tokens[1];
            engine.facts.progress += f64::from(u8::from(engine.works || engine.silent == 0.0));
            backend.serves = engine.serves;
            backend.state = if engine.serves { "ready" } else { "ejected" };
            backend.slots = self.slots;
            backend.in_flight = if self.queue > 0.0 && self.is_full { self.slots } else { 8.0 };
            backend.silent = (engine.silent > 0.0).then(|| Duration::from_secs_f64(engine.silent));
            backend.engine = Some(engine.facts);
        }
    }
}

/// Calls `plant` before each look for two minutes, and returns the causes found at the last look.
/// Ten minutes of good traffic before that must have no finding.
fn found(engines: usize, plant: impl FnMut(&mut Traffic)) -> Vec<(Cause, String)> {
    found_in(Traffic::new(engines), plant)
}

fn found_in(mut traffic: Traffic, mut plant: impl FnMut(&mut Traffic)) -> Vec<(Cause, String)> {
    let mut findings = Findings::default();
    let mut look = |traffic: &mut Traffic, number: u32| {
        traffic.pass();
        findings.look(traffic.facts.clone(), LOOK * number);
        findings.all(LOOK * number)
    };
    for number in 1..=BEFORE {
        let before = look(&mut traffic, number);
        assert_eq!(before, [], "good traffic, look {number}");
    }
    let mut all: Vec<Finding> = Vec::new();
    for number in BEFORE + 1..=BEFORE + WITHIN {
        plant(&mut traffic);
        all = look(&mut traffic, number);
    }
    for finding in &all {
        assert!(!finding.sentence.is_empty() && !finding.evidence.is_empty() && !finding.advice.is_empty());
        assert!(["inf", "NaN"].iter().all(|text| !format!("{finding:?}").contains(text)), "{finding:?}");
        assert!(finding.since_seconds > 0.0, "{finding:?}");
    }
    all.into_iter().map(|finding| (finding.cause, finding.subject)).collect()
}

#[test]
fn each_planted_cause_is_found_within_two_minutes_and_nothing_else() {
    let one = |cause, subject: &str| vec![(cause, subject.to_owned())];
    let slow = found(3, |traffic| (traffic.engines[1].tpot, traffic.engines[1].ttft.0) = (0.06, 0.3));
    assert_eq!(slow, one(Cause::SlowEngine, "gpu1"));
    let hung = found(2, |traffic| traffic.engines[0].silent += 10.0);
    assert_eq!(hung, one(Cause::SilentEngine, "gpu0"));
    let down = found(2, |traffic| traffic.engines[0].serves = false);
    assert_eq!(down, one(Cause::EngineDown, "gpu0"));
    let busy = found(2, |traffic| (traffic.first_key, traffic.queue, traffic.wait) = (0.9, 9.0, 0.8));
    assert_eq!(busy, one(Cause::BusyKey, "a"));
    let burst = found(2, |traffic| (traffic.rate, traffic.queue, traffic.wait) = (40.0, 30.0, 2.0));
    assert_eq!(burst, one(Cause::Burst, ""));
    let first = found_in(Traffic { rate: 0.0, ..Traffic::new(2) }, |traffic| {
        (traffic.rate, traffic.queue, traffic.wait) = (40.0, 30.0, 2.0);
    });
    assert_eq!(first, one(Cause::Burst, ""));
    let starting = found_in(Traffic { rate: 0.0, ..Traffic::new(1) }, |traffic| {
        (traffic.queue, traffic.wait) = (30.0, 20.0);
        traffic.facts.pools[0].backends[0].is_put_aside = true;
        traffic.engines[0].serves = false;
    });
    assert_eq!(starting, []);
    let longer = found(2, |traffic| {
        (traffic.prompt, traffic.queue, traffic.wait) = (1_000.0, 5.0, 0.5);
        traffic.engines.iter_mut().for_each(|engine| engine.ttft.0 = 0.09);
    });
    assert_eq!(longer, one(Cause::LongerPrompts, ""));
    let slots = found(2, |traffic| (traffic.slots, traffic.queue, traffic.wait) = (4.0, 5.0, 0.5));
    assert_eq!(slots, one(Cause::SlotsTooSmall, ""));
    let memory = found(2, |traffic| {
        traffic.engines[1].facts.preemptions += 3.0;
        traffic.engines[1].facts.kv_usage = 0.99;
        traffic.engines[1].tpot = 0.02;
    });
    assert_eq!(memory, one(Cause::KvCacheFull, "gpu1"));
    let adapters = found(2, |traffic| {
        let facts = &mut traffic.engines[0].facts;
        (facts.adapters, facts.waiting, facts.deferred) = (Some((4, 2)), 3.0, 3.0);
    });
    assert_eq!(adapters, one(Cause::AdaptersWait, "gpu0"));
    let network = found(2, |traffic| traffic.engines[1].ttft.1 = 0.08);
    assert_eq!(network, one(Cause::SlowNetwork, "gpu1"));
    let flag = found(2, |traffic| {
        (traffic.engines[0].facts.running, traffic.engines[0].facts.waiting) = (4.0, 6.0);
        traffic.engines[1].facts.running = 20.0;
    });
    assert_eq!(flag, one(Cause::FlagsDiffer, ""));
    let estimates = found(2, |traffic| traffic.estimate = 1.6);
    assert_eq!(estimates, one(Cause::EstimatesOff, ""));
    let limit = found(2, |traffic| {
        (traffic.queue, traffic.wait) = (20.0, 1.0);
        traffic.engines.iter_mut().for_each(|engine| (engine.facts.waiting, engine.facts.kv_usage) = (5.0, 0.95));
    });
    assert_eq!(limit, one(Cause::NearLimit, ""));
}

#[test]
fn causes_that_look_like_others_are_kept_apart() {
    let one = |cause, subject: &str| vec![(cause, subject.to_owned())];
    let late = |traffic: &mut Traffic| traffic.engines.iter_mut().for_each(|engine| engine.ttft.0 = 0.06);
    // A tenth of the prompts, with most of the tokens, doubles in length.
    let longer = found(2, |traffic| {
        traffic.long = 6_000.0;
        late(traffic);
    });
    assert_eq!(longer, one(Cause::LongerPrompts, ""));
    let longer = found(2, |traffic| (traffic.long, traffic.long_ttft) = (6_000.0, 0.1));
    assert_eq!(longer, one(Cause::LongerPrompts, ""));
    // A burst of all keys, of which one always has most of the work.
    let burst = found_in(Traffic { first_key: 0.7, ..Traffic::new(2) }, |traffic| {
        (traffic.rate, traffic.queue, traffic.wait) = (40.0, 30.0, 2.0);
    });
    assert_eq!(burst, one(Cause::Burst, ""));
    // The share of that key grows a little by chance during the burst.
    let burst = found_in(Traffic { first_key: 0.55, ..Traffic::new(2) }, |traffic| {
        (traffic.rate, traffic.queue, traffic.wait, traffic.first_key) = (40.0, 30.0, 2.0, 0.68);
    });
    assert_eq!(burst, one(Cause::Burst, ""));
    // Few of its requests end, but the page counts the tokens, and shows the gaps if the engine's
    // clock is right.
    let slow = found(3, |traffic| {
        let engine = &mut traffic.engines[2];
        engine.ends = false;
        engine.facts.itl = (engine.facts.itl.0 + 100.0 * 0.06, engine.facts.itl.1 + 100.0);
    });
    assert_eq!(slow, one(Cause::SlowEngine, "gpu2"));
    let slow = found(3, |traffic| (traffic.engines[2].tpot, traffic.engines[2].ends) = (0.06, false));
    assert_eq!(slow, one(Cause::SlowEngine, "gpu2"));
    let all =
        found(2, |traffic| traffic.engines.iter_mut().for_each(|engine| (engine.tpot, engine.ttft.0) = (0.06, 0.3)));
    assert_eq!(all, one(Cause::SlowEngine, ""));
    // The key's requests wait, and few have ended.
    let mut open = 0.0;
    let waiting = found(2, |traffic| {
        open += 100.0;
        traffic.facts.in_flight = vec![("a".into(), open, 3_000.0 * open)];
        (traffic.queue, traffic.wait) = (open, 3.0);
    });
    assert_eq!(waiting, one(Cause::BusyKey, "a"));
    let failing = found(3, |traffic| traffic.engines[1].fails = 0.8);
    assert_eq!(failing, one(Cause::EngineDown, "gpu1"));
    // The cause at the engines explains why requests wait.
    let adapters = found(2, |traffic| {
        (traffic.queue, traffic.wait) = (9.0, 1.0);
        for engine in &mut traffic.engines {
            (engine.facts.adapters, engine.facts.waiting, engine.facts.deferred) = (Some((2, 2)), 3.0, 3.0);
        }
    });
    assert_eq!(adapters, ["gpu0", "gpu1"].map(|engine| (Cause::AdaptersWait, engine.to_owned())));
    // One of the engines never computes more than 512 tokens in a step.
    let pieces = found(2, |traffic| {
        for (engine, most) in traffic.engines.iter_mut().zip([4, 2]) {
            engine.facts.large_prompts[..3].iter_mut().for_each(|prompts| *prompts += 2.0);
            engine.facts.large_steps[..most - 1].iter_mut().for_each(|steps| *steps += 3.0);
        }
    });
    assert_eq!(pieces, one(Cause::FlagsDiffer, ""));
    let only = found(1, |traffic| traffic.engines[0].ttft.1 = 0.08);
    assert_eq!(only, one(Cause::SlowNetwork, "gpu0"));
}

#[test]
fn a_change_that_lasts_is_named_until_it_ends() {
    let (mut traffic, mut findings) = (Traffic::new(2), Findings::default());
    for number in 1..=180 {
        let is_busy = (60..150).contains(&number);
        (traffic.first_key, traffic.rate) = if is_busy { (0.95, 60.0) } else { (0.5, 12.0) };
        (traffic.queue, traffic.wait) = if is_busy { (30.0, 2.0) } else { (0.0, 0.0) };
        traffic.pass();
        findings.look(traffic.facts.clone(), LOOK * number);
        let found: Vec<Cause> = findings.all(LOOK * number).iter().map(|finding| finding.cause).collect();
        match number {
            72..150 => assert_eq!(found, [Cause::BusyKey], "look {number}"),
            1..60 | 160.. => assert_eq!(found, [], "look {number}"),
            _ => {}
        }
    }
}

#[test]
fn the_backlog_of_a_busy_key_is_no_other_finding() {
    let (mut traffic, mut findings) = (Traffic::new(2), Findings::default());
    for number in 1..=200 {
        let (is_busy, is_backlogged) = ((60..90).contains(&number), (90..104).contains(&number));
        (traffic.first_key, traffic.rate) = if is_busy { (0.95, 60.0) } else { (0.5, 12.0) };
        (traffic.queue, traffic.wait) = if is_busy || is_backlogged { (30.0, 2.0) } else { (0.0, 0.0) };
        traffic.prompt = if is_backlogged { 1_500.0 } else { 500.0 };
        traffic.pass();
        let appeared = findings.look(traffic.facts.clone(), LOOK * number).appeared;
        assert!(appeared.iter().all(|finding| finding.cause == Cause::BusyKey), "look {number}: {appeared:?}");
        let is_shown = !findings.all(LOOK * number).is_empty();
        assert!(is_shown == (72..104).contains(&number) || (60..72).contains(&number) || (104..112).contains(&number));
    }
}

#[test]
fn changes_without_harm_are_no_findings() {
    let busier = found(3, |traffic| (traffic.engines[0].tpot, traffic.more_turns) = (0.011, 2));
    assert_eq!(busier, []);
    // The prompts that end now were computed earlier.
    let mut computed = Traffic::new(2);
    computed.engines.iter_mut().for_each(|engine| engine.facts.large_steps = [50.0; 5]);
    computed.engines.iter_mut().for_each(|engine| engine.facts.large_prompts = [50.0; 5]);
    let mut ended = 7.0;
    let ends = found_in(computed, |traffic| traffic.engines[0].facts.large_prompts[1] += std::mem::take(&mut ended));
    assert_eq!(ends, []);
    // The engine computes a long prompt, or a response that is not a stream.
    let works = found(2, |traffic| (traffic.engines[0].silent, traffic.engines[0].works) = (25.0, true));
    assert_eq!(works, []);
    // A restart loses requests once.
    let mut is_first = true;
    let restart = found(3, |traffic| {
        traffic.facts.pools[0].backends[1].totals.failed += if std::mem::take(&mut is_first) { 200.0 } else { 0.0 };
    });
    assert_eq!(restart, []);
    let shed = found(2, |traffic| traffic.facts.pools[0].totals.shed = 1.0);
    assert_eq!(shed, []);
    let risen = found(2, |traffic| {
        (traffic.rate, traffic.prompt) = (30.0, 1_000.0);
        traffic.engines.iter_mut().for_each(|engine| engine.ttft.0 = 0.05);
    });
    assert_eq!(risen, []);
    let permits = found(2, |traffic| {
        (traffic.is_full, traffic.queue, traffic.wait) = (false, 2.0, 0.02);
    });
    assert_eq!(permits, []);
    let mut far = Traffic::new(3);
    far.engines.iter_mut().for_each(|engine| engine.ttft.1 = 0.08);
    assert_eq!(found_in(far, |_| {}), []);
    let chance = found_in(Traffic { first_key: 0.45, ..Traffic::new(2) }, |traffic| {
        (traffic.first_key, traffic.is_full, traffic.queue, traffic.wait) = (0.6, false, 2.0, 0.2);
    });
    assert_eq!(chance, []);
    // The engine's own times leave out the hang, so first tokens look late on the way.
    let mut looks = 0;
    let after = found(3, |traffic| {
        looks += 1;
        let engine = &mut traffic.engines[1];
        (engine.silent, engine.ttft.1) = if looks <= 2 { (5.0 + 10.0 * f64::from(looks), 0.0) } else { (0.0, 0.2) };
    });
    assert_eq!(after, []);
    // First tokens were late for a minute; the requests end later.
    let mut looks = 0;
    let past = found(2, |traffic| {
        looks += 1;
        let (engine, way) = if looks <= 6 { (0.6, 0.0) } else { (0.03, if looks <= 9 { 0.5 } else { 0.0 }) };
        traffic.engines.iter_mut().for_each(|own| own.ttft = (engine, way));
        traffic.engines[1].ttft.1 /= 8.0;
    });
    assert_eq!(past, []);
}

#[test]
fn a_finding_goes_with_the_cause_and_is_reported_once() {
    let (mut traffic, mut findings) = (Traffic::new(2), Findings::default());
    let (mut appeared, mut gone) = (0, 0);
    for number in 1..=120 {
        traffic.engines[0].silent = if (60..90).contains(&number) { traffic.engines[0].silent + 10.0 } else { 0.0 };
        traffic.pass();
        let change = findings.look(traffic.facts.clone(), LOOK * number);
        appeared += change.appeared.len();
        gone += change.gone.len();
    }
    assert_eq!((appeared, gone, findings.all(LOOK * 120).len()), (1, 1, 0));
}

#[test]
fn a_day_of_traffic_that_rises_and_falls_has_no_finding_and_bounded_memory() {
    let (mut traffic, mut findings) = (Traffic::new(3), Findings::default());
    for number in 1..=8_640 {
        let hour = f64::from(number) / 360.0;
        traffic.rate = 12.0 - 9.0 * (hour / 24.0 * std::f64::consts::TAU).cos();
        traffic.prompt = 500.0 * (1.0 + 0.5 * (hour / 12.0 * std::f64::consts::TAU).sin());
        traffic.pass();
        let change = findings.look(traffic.facts.clone(), LOOK * number);
        assert_eq!(change.appeared, [], "hour {hour:.2}");
    }
    assert!(findings.samples.len() <= super::SAMPLES_MAX);
}

#[test]
fn names_of_causes_are_distinct_and_a_finding_reads_back() {
    let names: std::collections::BTreeSet<&str> = Cause::ALL.iter().map(|cause| cause.label()).collect();
    assert_eq!(names.len(), Cause::ALL.len());
    for cause in Cause::ALL {
        assert_eq!(serde_json::to_value(cause).expect("JSON"), cause.label());
    }
}

#[test]
fn the_last_minute_has_the_engines_pages_and_the_work_of_keys() {
    let (mut traffic, mut findings) = (Traffic::new(2), Findings::default());
    for number in 1..=20 {
        traffic.engines[1].facts.preemptions += 2.0;
        traffic.engines[0].facts.preemptions = if number < 20 { 50.0 } else { 1.0 };
        traffic.facts.pools[0].keys = vec![("a".into(), 3.0 * f64::from(number), 4.0)];
        traffic.pass();
        findings.look(traffic.facts.clone(), LOOK * number);
    }
    let (keys, engines) = findings.last_minute();
    let key = |name: &str| keys.iter().find(|key| key.name == name).map(|key| (key.work_s, key.waiting));
    assert_eq!((key("a"), key("b")), (Some((Some(18.0), Some(4))), Some((None, None))));
    let preemptions: Vec<f64> = engines.iter().map(|engine| engine.engine.unwrap().preemptions).collect();
    assert_eq!(preemptions, [1.0, 12.0]);
    assert_eq!(
        engines[1].engine.map(|engine| (engine.running, engine.waiting, engine.kv_usage)),
        Some((8.0, 0.0, 0.3))
    );
}
