//! Assignment alone: arms get the configured shares, a ramp moves no unit, gateways agree, and
//! other requests stay out.

use jiff::Timestamp;

use super::*;
use crate::origin::Origin;
use sluice_config::{Config, Machine, Surroundings};
use sluice_core::base::ModelId;
use sluice_core::openai::{Answer, FinishReason};

const POOL: &str = "[[model]]\nname = \"m\"\n[[model]]\nname = \"lora\"\n[[model]]\nname = \"other\"\n[[pool]]\nname = \"p\"\n\
                    [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:7001\"\n\
                    [[pool]]\nname = \"declared\"\nmodels = [\"m\", \"lora\", \"other\"]\narms_only = true\n\
                    [[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:7002\"\n";

pub(super) fn config(experiments: &str) -> Config {
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    Config::parse(&format!("{POOL}{experiments}"), "test", &[], &around)
        .unwrap_or_else(|error| panic!("{error}"))
        .config
}

pub(super) fn experiment(name: &str, keys: &str) -> String {
    format!(
        "[[experiment]]\nname = \"{name}\"\nmodels = [\"m\"]\n{keys}\n[[experiment.arm]]\nname = \"base\"\nweight = 60\n\
         [[experiment.arm]]\nname = \"lora\"\nweight = 40\nmodel = \"lora\"\n"
    )
}

fn arm_of(set: &ExperimentSet, user: u64) -> Option<(String, usize)> {
    let subject = Subject { model: Some(ModelId::new(0)), key: None, home: 0, stratum: 0 };
    let unit = Unit::new(format!("user-{user}").as_bytes());
    let assigned = set.assign(&subject, |_| Some(unit), |_| true)?;
    Some((assigned.arm().label.to_string(), assigned.arm))
}

/// A completed request with this duration for every quantity.
fn completed(seconds: f64, cell: u16, answer: Answer) -> Observation {
    Observation {
        origin: Origin::default(),
        blamed: true,
        stratum: 0,
        cell,
        values: [Some(seconds); Quantity::ALL.len()],
        ending: Ending::Completed,
        missed: None,
        fell_back: false,
        cached: None,
        answer,
    }
}

fn set(text: &str) -> ExperimentSet {
    Experiments::default().configure(&config(text))
}

#[test]
fn five_million_units_hit_the_weights_and_two_gateways_agree_on_every_one() {
    const UNITS: u64 = 5_000_000;
    let config = config(&experiment("x", ""));
    let [one, other] = [(); 2].map(|()| Experiments::default().configure(&config));
    let subject = Subject { model: Some(ModelId::new(0)), key: None, home: 0, stratum: 0 };
    let mut counts = [0u64; 2];
    for user in 0..UNITS {
        let arm = |set: &ExperimentSet| {
            let unit = Unit::new(&user.to_le_bytes());
            set.assign(&subject, |_| Some(unit), |_| true).expect("all take part").arm
        };
        let (here, there) = (arm(&one), arm(&other));
        assert_eq!(here, there, "user {user}");
        counts[here] += 1;
    }
    let share = counts[1] as f64 / UNITS as f64;
    assert!((share - 0.4).abs() < 0.001, "{share} instead of 0.4");
}

#[test]
fn the_arms_of_units_are_the_same_in_every_version() {
    // A change would reassign the users of every running experiment.
    let set = set(&experiment("x", ""));
    let arms: Vec<usize> = (0..16).map(|user| arm_of(&set, user).unwrap().1).collect();
    assert_eq!(arms, [1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0]);
}

#[test]
fn a_ramp_lets_units_join_and_moves_none_to_another_arm() {
    const USERS: u64 = 100_000;
    let text =
        experiment("x", "ramp = [\"5%\", \"25% after 1h\", \"100% after 2h\"]\nbegins = \"2026-01-01T00:00:00Z\"");
    let experiments = Experiments::default();
    let set = experiments.configure(&config(&text));
    let at = |time: &str| {
        experiments.advance(time.parse::<Timestamp>().unwrap());
        (0..USERS).map(|user| arm_of(&set, user)).collect::<Vec<_>>()
    };
    let before = at("2025-12-31T23:59:59Z");
    assert!(before.iter().all(Option::is_none), "not before it begins");
    let steps = [("00:00:00", 0.05), ("00:59:59", 0.05), ("01:00:00", 0.25), ("02:00:00", 1.0)];
    let mut last = before;
    for (time, share) in steps {
        let now = at(&format!("2026-01-01T{time}Z"));
        let joined = now.iter().flatten().count() as f64 / USERS as f64;
        assert!((joined - share).abs() < 0.005, "{joined} at {time}");
        let treated = now.iter().flatten().filter(|(_, arm)| *arm == 1).count() as f64 / USERS as f64;
        assert!((treated - share * 0.4).abs() < 0.005, "{treated} at {time}");
        for (before, after) in last.iter().zip(&now).filter(|(before, _)| before.is_some()) {
            assert_eq!(before, after, "moved at {time}");
        }
        last = now;
    }
}

#[test]
fn experiments_of_a_layer_never_share_a_unit_and_other_salts_assign_anew() {
    let text = experiment("x", "traffic = { to = 0.3 }") + &experiment("y", "traffic = { from = 0.3, to = 0.8 }");
    let both = set(&text);
    let count = |name: &str| {
        (0..20_000).filter_map(|user| arm_of(&both, user)).filter(|(arm, _)| arm.starts_with(name)).count()
    };
    assert!((5_700..6_300).contains(&count("x/")) && (9_700..10_300).contains(&count("y/")));
    let [one, other] = ["x", "x-2"].map(|salt| set(&experiment("x", &format!("salt = \"{salt}\""))));
    let same = (0..20_000).filter(|user| arm_of(&one, *user) == arm_of(&other, *user)).count();
    // Independent draws agree with the probability 0.6^2 + 0.4^2.
    assert!((10_000..10_800).contains(&same), "{same} of 20000");
}

#[test]
fn few_units_share_a_cell() {
    let hash = UnitHash::new("default", "salt");
    let cells: std::collections::BTreeSet<u16> =
        (0..1_000u64).map(|user| hash.cell(Unit::new(&user.to_le_bytes()))).collect();
    // The expected number is 1,000 - 1,000^2 / (2 x 65,536) = 992.
    assert!(cells.len() > 980, "{}", cells.len());
}

#[test]
fn groups_are_independent_of_arms_and_equally_large() {
    let hash = UnitHash::new("default", "x");
    let mut counts = [[0u32; unit::GROUPS]; 2];
    for number in 0..640_000u64 {
        let unit = Unit::new(&number.to_le_bytes());
        counts[usize::from(hash.draw(unit) < 0.4)][super::unit::group_of(hash.cell(unit))] += 1;
    }
    // The means are 6,000 and 4,000. The bounds are six standard deviations away.
    assert!(counts[0].iter().all(|count| (5_535..6_465).contains(count)), "{:?}", counts[0]);
    assert!(counts[1].iter().all(|count| (3_620..4_380).contains(count)), "{:?}", counts[1]);
}

#[test]
fn only_requests_that_it_is_for_take_part() {
    let text = "[auth]\nkeys = [{ name = \"a\", sha256 = \"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\" }]\n";
    let set = set(&(text.to_owned() + &experiment("x", "keys = [\"a\"]\nclasses = [\"p\"]")));
    let takes_part = |model: usize, key: Option<&str>, home: usize, may_use: bool| {
        let subject = Subject { model: Some(ModelId::new(model)), key, home, stratum: 0 };
        set.assign(&subject, |_| Some(Unit::new(b"u")), |_| may_use).is_some()
    };
    assert!(takes_part(0, Some("a"), 0, true));
    assert!(!takes_part(2, Some("a"), 0, true), "another model");
    assert!(!takes_part(0, Some("b"), 0, true) && !takes_part(0, None, 0, true), "another key");
    assert!(!takes_part(0, Some("a"), 1, true), "another class");
    assert!(!takes_part(0, Some("a"), 0, false), "a key that may not use the models of all arms");
    let subject = Subject { model: Some(ModelId::new(0)), key: Some("a"), home: 0, stratum: 0 };
    assert!(set.assign(&subject, |_| None, |_| true).is_none(), "nothing to be sticky by");
}

#[test]
fn models_that_are_not_declared_take_part_where_every_arm_serves_them_as_they_are() {
    let takes_part = |models: &str, arm: &str| {
        let text = format!(
            "[[experiment]]\nname = \"x\"\nmodels = [{models}]\n[[experiment.arm]]\nname = \"a\"\nweight = 50\n\
             [[experiment.arm]]\nname = \"b\"\nweight = 50\n{arm}\n"
        );
        let subject = Subject { model: None, key: None, home: 0, stratum: 0 };
        set(&text).assign(&subject, |_| Some(Unit::new(b"u")), |_| true).is_some()
    };
    assert!(takes_part("\"*\"", "pool = \"p\""));
    assert!(!takes_part("\"m\"", "pool = \"p\""), "it is for one model");
    assert!(!takes_part("\"*\"", "model = \"lora\""), "an arm has another model");
    assert!(!takes_part("\"*\"", "pool = \"declared\""), "an arm does not serve them");
}

#[test]
fn what_is_stopped_or_promoted_stays_so_over_a_reload_of_the_same_experiment_only() {
    let experiments = Experiments::default();
    let first = config(&experiment("x", ""));
    let set = experiments.configure(&first);
    experiments.find("x").unwrap().state.order(Phase::Promoted(1));
    assert!((0..100).all(|user| arm_of(&set, user).unwrap().1 == 1));
    experiments.find("x").unwrap().state.order(Phase::Stopped);
    assert!((0..100).all(|user| arm_of(&set, user).is_none()));
    let same = experiments.configure(&config(&experiment("x", "ramp = [\"50%\"]")));
    assert!((0..100).all(|user| arm_of(&same, user).is_none()));
    let other = experiments.configure(&config(&experiment("x", "salt = \"new\"")));
    assert!((0..100).all(|user| arm_of(&other, user).is_some()));
    assert!(experiments.find("y").is_none());
}

#[test]
fn a_later_gateway_goes_on_with_what_was_saved() {
    let text = experiment("x", "") + &experiment("y", "traffic = { to = 0.0001 }").replace("to = 0.0001", "from = 0.5");
    let text = text.replacen("models = [\"m\"]\n", "models = [\"m\"]\ntraffic = { to = 0.5 }\n", 1);
    let first = Experiments::default();
    first.configure(&config(&text));
    let x = first.find("x").unwrap();
    let observation = |ordinal: u32| {
        let seconds = f64::from(ordinal).sqrt() / 1000.0;
        Observation { missed: Some(false), ..completed(seconds, 3, Answer::default()) }
    };
    (0..500).for_each(|ordinal| x.state.observe(&x.plan, 1, &observation(ordinal)));
    first.find("y").unwrap().state.order(Phase::Promoted(1));
    let saved = serde_json::to_vec(&first.save(|_| false)).unwrap();
    let second = Experiments::default();
    second.restore(serde_json::from_slice(&saved).unwrap());
    second.configure(&config(&text));
    assert_eq!(second.save(|_| false), first.save(|_| false));
    assert_eq!(second.find("x").unwrap().state.progress().arms[1].requests(), 500);
    let other = Experiments::default();
    other.restore(serde_json::from_slice(&saved).unwrap());
    other.configure(&config(&text.replace("weight = 60", "weight = 50").replace("weight = 40", "weight = 50")));
    let phases = ["x", "y"].map(|name| other.find(name).unwrap().state.phase());
    assert_eq!(phases, [Phase::Running; 2], "other weights are another experiment");
}

#[test]
fn an_arm_that_misses_more_than_its_guardrail_allows_is_stopped_and_a_guardrail_of_1_allows_everything() {
    for (most, phase) in [("0.9", Phase::Stopped), ("1.0", Phase::Running)] {
        let experiments = Experiments::default();
        let keys = format!("sticky = \"request\"\nguardrail = {{ slo_misses = {most} }}");
        experiments.configure(&config(&experiment("x", &keys)));
        let x = experiments.find("x").unwrap();
        for number in 0..200_usize {
            let missed = Some(number % 2 == 1);
            let observation = Observation { missed, ..completed(0.1, (number % 64) as u16, Answer::default()) };
            x.state.observe(&x.plan, number % 2, &observation);
        }
        assert_eq!(x.state.phase(), phase, "{most}");
    }
}

fn fail(x: &Experiment, arm: usize, failing: usize) {
    for number in 0..200 {
        for (arm, failed) in [(0, false), (arm, number < failing)] {
            let ending = if failed { Ending::Failed } else { Ending::Completed };
            let observation = Observation { ending, ..completed(0.1, (number % 64) as u16, Answer::default()) };
            x.state.note_assigned(arm, observation.cell);
            x.state.observe(&x.plan, arm, &observation);
        }
    }
}

#[test]
fn an_experiment_that_a_guardrail_stopped_and_an_operator_starts_again_measures_anew() {
    let experiments = Experiments::default();
    experiments.configure(&config(&experiment("x", "sticky = \"request\"\nguardrail = { errors = 0.1 }")));
    let x = experiments.find("x").unwrap();
    fail(&x, 1, 200);
    assert_eq!(x.state.phase(), Phase::Stopped);
    x.state.order(Phase::Running);
    x.state.review(&x.plan, Timestamp::UNIX_EPOCH);
    assert_eq!((x.state.phase(), x.state.progress().arms[1].requests()), (Phase::Running, 0));
    fail(&x, 1, 0);
    x.state.order(Phase::Stopped);
    x.state.order(Phase::Running);
    assert_eq!(x.state.progress().arms[1].requests(), 200, "what an operator stopped goes on");
}

#[test]
fn an_arm_that_was_stopped_is_compared_with_the_control_of_its_time() {
    let keys = "sticky = \"request\"\nguardrail = { errors = 0.1 }";
    let third = "[[experiment.arm]]\nname = \"third\"\nmodel = \"other\"\nweight = 20\n";
    let text = experiment("x", keys).replace("weight = 60", "weight = 40") + third;
    let experiments = Experiments::default();
    experiments.configure(&config(&text));
    let x = experiments.find("x").unwrap();
    fail(&x, 1, 200);
    assert!(x.state.is_stopped(1) && x.state.phase() == Phase::Running);
    (0..20).for_each(|_| fail(&x, 2, 0));
    let progress = x.state.progress();
    assert!(progress.measured().control_of(1).requests() < 200);
    assert_eq!(progress.measured().control_of(2).requests(), 4_200);
    let saved: Progress = serde_json::from_value(serde_json::to_value(&progress).unwrap()).unwrap();
    assert_eq!(saved, progress);
}

#[test]
fn an_arm_whose_requests_take_longer_is_not_said_to_have_too_few() {
    let experiments = Experiments::default();
    experiments.configure(&config(&experiment("x", "sticky = \"request\"")));
    let x = experiments.find("x").unwrap();
    let mix = |ended| {
        for number in 0..400_u16 {
            let arm = usize::from(number % 5 > 2);
            x.state.note_assigned(arm, number % 64);
            if arm == 0 || ended {
                x.state.observe(&x.plan, arm, &completed(0.1, number % 64, Answer::default()));
            }
        }
        x.state.review(&x.plan, Timestamp::UNIX_EPOCH)[0].mismatch
    };
    assert_eq!(mix(false), None);
    assert_eq!(mix(true), None);
    (0..400).for_each(|number| x.state.note_assigned(0, number % 64));
    assert!(mix(true).is_some());
}

/// Both arms had 4,000 answers, 20 % faster in the second. `answer` returns each answer, and
/// whether it was rated as bad, by arm and number.
fn with_answers(keys: &str, answer: impl Fn(usize, usize) -> (Answer, bool)) -> Experiment {
    let experiments = Experiments::default();
    experiments.configure(&config(&experiment("x", keys)));
    let x = experiments.find("x").unwrap();
    for number in 0..8_000_usize {
        let (arm, cell) = (number % 2, (number / 2 % 64) as u16);
        let seconds = 0.1 * (1.0 - 0.2 * arm as f64) * (1.0 + (number % 7) as f64 / 100.0);
        let (answer, bad) = answer(arm, number / 2);
        x.state.observe(&x.plan, arm, &completed(seconds, cell, answer));
        let id = format!("request-{number}");
        x.state.note_answer(&id, arm, cell.into());
        assert_eq!(x.state.rate(&id, !bad), Some(arm));
    }
    x
}

const WHOLE: Answer = Answer { finish: Some(FinishReason::Stop), refused: false };
const CUT: Answer = Answer { finish: Some(FinishReason::Length), refused: false };
const REFUSED: Answer = Answer { finish: Some(FinishReason::Stop), refused: true };

/// 15 % of the answers of the second arm, 5 % of the others.
fn often(arm: usize, number: usize) -> bool {
    number % 100 < if arm == 1 { 15 } else { 5 }
}

#[test]
fn faster_with_worse_answers_is_said_with_an_interval_and_not_promoted() {
    type Answers = fn(usize, usize) -> (Answer, bool);
    let cases: [(Answers, &str); 3] = [
        (|arm, number| (if often(arm, number) { CUT } else { WHOLE }, false), "token limit"),
        (|arm, number| (if often(arm, number) { REFUSED } else { WHOLE }, false), "refusals"),
        (|arm, number| (WHOLE, often(arm, number)), "bad ratings"),
    ];
    for (position, (answers, name)) in cases.into_iter().enumerate() {
        let x = with_answers("promote = true", answers);
        let comparison = &x.state.review(&x.plan, Timestamp::UNIX_EPOCH)[0];
        assert_eq!(comparison.conclusion, Conclusion::Better, "by its speed");
        let worse = comparison.quality.map(|(_, worse)| worse);
        assert_eq!(worse, std::array::from_fn(|one| one == position), "{name}");
        let times = comparison.quality[position].0.times;
        assert!(times.low > 1.0 && times.contains(3.0), "{name}: {times:?}");
        let sentence = comparison.sentence(&x.plan);
        let wanted = format!("{name} 15.0 % instead of 5.0 %");
        assert!(sentence.contains("but its answers are worse: ") && sentence.contains(&wanted), "{sentence}");
        assert_eq!(x.state.phase(), Phase::Running, "not promoted");
    }
}

#[test]
fn equal_answers_are_not_called_worse_and_the_faster_arm_is_promoted() {
    let x = with_answers("promote = true", |_, number| match often(0, number) {
        true => (CUT, true),
        false => (WHOLE, false),
    });
    let comparison = &x.state.review(&x.plan, Timestamp::UNIX_EPOCH)[0];
    assert!(comparison.quality.iter().all(|(_, worse)| !worse));
    assert!(!comparison.sentence(&x.plan).contains("answers"));
    assert_eq!(x.state.phase(), Phase::Promoted(1));
    let report = ExperimentReport::new(&x, true);
    assert_eq!(report.arms[1].quality.bad_ratings, (200, 4_000));
    assert_eq!(report.arms[1].quality.finish[1], (FinishReason::Length, 200));
}

#[test]
fn the_budget_of_a_shadow_arm_bounds_its_copies_in_flight_and_their_rate() {
    let text = experiment("x", "")
        .replace("weight = 60", "weight = 100")
        .replace("weight = 40", "shadow = { share = 1.0, in_flight = 2, per_second = 10.0 }");
    let experiments = Experiments::default();
    let set = experiments.configure(&config(&text));
    let subject = Subject { model: Some(ModelId::new(0)), key: None, home: 0, stratum: 0 };
    let assigned = set.assign(&subject, |_| Some(Unit::new(b"user")), |_| true).unwrap();
    assert_eq!(assigned.arm, 0, "a shadow arm has no units");
    let (now, mut number) = (tokio::time::Instant::now(), 0);
    let mut copies = |at_ms: u64| {
        number += 1;
        let now = now + std::time::Duration::from_millis(at_ms);
        assigned.copies(&number.to_string(), now).map(|(arm, copy)| (arm.arm, copy)).collect::<Vec<_>>()
    };
    let first = copies(0);
    assert_eq!(first[0].0, 1);
    assert!(copies(99).is_empty(), "ten a second");
    let second = copies(100);
    assert!(second.len() == 1 && copies(200).is_empty(), "two in flight");
    drop(first);
    let third = copies(300);
    assert_eq!(third.len(), 1);
    let x = experiments.find("x").unwrap();
    let report = ExperimentReport::new(&x, true).arms[1].copies.clone().unwrap();
    let ended = |outcome| report.ended.iter().find(|(one, _)| *one == outcome).unwrap().1;
    assert_eq!((report.in_flight, ended(CopyOutcome::OverBudget), ended(CopyOutcome::Cut)), (2, 2, 1));
    x.state.order(Phase::Stopped);
    drop((second, third));
    assert!(set.assign(&subject, |_| Some(Unit::new(b"user")), |_| true).is_none());
}

#[test]
fn a_share_of_the_requests_is_copied_and_a_shadow_arm_is_not_promoted_by_itself() {
    let text = experiment("x", "promote = true")
        .replace("weight = 60", "weight = 100")
        .replace("weight = 40", "shadow = { share = 0.25, in_flight = 1024, per_second = 10000.0 }");
    let experiments = Experiments::default();
    let set = experiments.configure(&config(&text));
    let subject = Subject { model: Some(ModelId::new(0)), key: None, home: 0, stratum: 0 };
    let assigned = set.assign(&subject, |_| Some(Unit::new(b"user")), |_| true).unwrap();
    let (start, mut copied) = (tokio::time::Instant::now(), 0);
    for number in 0..10_000_u32 {
        let now = start + number * std::time::Duration::from_millis(1);
        copied += assigned.copies(&number.to_string(), now).count();
    }
    assert!((2_300..2_700).contains(&copied), "{copied}");
    let x = experiments.find("x").unwrap();
    for number in 0..4_000_usize {
        let arm = number % 2;
        let seconds = 0.1 * (1.0 - 0.3 * arm as f64) * (1.0 + (number % 7) as f64 / 100.0);
        x.state.observe(&x.plan, arm, &completed(seconds, (number / 2 % 64) as u16, WHOLE));
    }
    let comparison = &x.state.review(&x.plan, Timestamp::UNIX_EPOCH)[0];
    assert_eq!((comparison.conclusion, comparison.mismatch), (Conclusion::Better, None));
    assert_eq!(x.state.phase(), Phase::Running);
}

#[test]
fn the_history_is_bounded_and_covers_the_whole_time() {
    let experiments = Experiments::default();
    experiments.configure(&config(&experiment("x", "")));
    let x = experiments.find("x").unwrap();
    for second in 0..5_000 {
        x.state.review(&x.plan, Timestamp::from_second(second).unwrap());
    }
    let history = x.state.progress().history;
    assert!((state::HISTORY / 4..=state::HISTORY).contains(&history.len()), "{}", history.len());
    assert_eq!(history[0].at, 0);
    let gaps: Vec<i64> = history.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    assert!(gaps.iter().all(|gap| *gap < 200_000 && *gap > 0), "{gaps:?}");
}

/// Whether the arm is stopped when `requests` end. Each request has an origin, an arm, and whether
/// it failed.
fn stops(requests: impl Iterator<Item = (u64, usize, bool)>) -> bool {
    let experiments = Experiments::default();
    experiments.configure(&config(&experiment("x", "sticky = \"user\"")));
    let x = experiments.find("x").unwrap();
    for (number, (origin, arm, failed)) in requests.enumerate() {
        let ending = if failed { Ending::Failed } else { Ending::Completed };
        let origin = Origin::of_key(&origin.to_string());
        let observation = Observation { origin, ending, ..completed(0.1, number as u16, Answer::default()) };
        x.state.observe(&x.plan, arm, &observation);
    }
    x.state.is_stopped(1)
}

#[test]
fn one_client_among_several_does_not_stop_an_arm_and_one_alone_or_all_together_do() {
    let honest = (0..4_000u64).map(|number| (number % 5, (number % 2) as usize, false));
    let mixed = |evil: fn(u64) -> (u64, usize, bool)| {
        let evil = (0..4_000).map(evil);
        honest.clone().zip(evil).flat_map(|(one, other)| [one, other])
    };
    assert!(!stops(mixed(|_| (9, 1, true))), "a client that fails in one arm only");
    assert!(stops((0..4_000).map(|number| (9, (number % 2) as usize, number % 2 == 1))), "alone it is all there is");
    assert!(stops(mixed(|number| (number % 5, 1, number % 3 == 0))), "every client fails there");
}

#[test]
fn a_request_that_found_no_room_in_pools_that_all_arms_share_is_no_failure_of_its_arm() {
    let arm = |extra: &str| {
        let text = format!(
            "[[experiment]]\nname = \"y\"\nmodels = [\"m\"]\n[[experiment.arm]]\nname = \"base\"\nweight = 50\n\
             [[experiment.arm]]\nname = \"new\"\nweight = 50\n{extra}\n"
        );
        let experiments = Experiments::default();
        experiments.configure(&config(&text));
        experiments.find("y").unwrap().plan.shares_pools
    };
    assert!(arm(""));
    assert!(!arm("pool = \"declared\""));
    assert!(arm("model = \"lora\""), "the first pool serves every model");
    let shed = Observation {
        blamed: false,
        ending: Ending::Failed,
        missed: Some(true),
        ..completed(0.1, 1, Answer::default())
    };
    let mut ledger = ArmLedger::default();
    ledger.add(&shed);
    assert_eq!((ledger.requests(), ledger.failed(), ledger.missed()), (1, 0, (0, 0)));
    ledger.add(&Observation { blamed: true, ..shed });
    assert_eq!((ledger.failed(), ledger.missed()), (1, (1, 1)));
}
