//! Assignment by itself: shares are hit, a ramp moves no unit, gateways agree, and what is not for an experiment stays out.

use jiff::Timestamp;

use super::*;
use crate::config::{Config, Machine, Surroundings};
use sluice_core::base::ModelId;

const POOL: &str = "[[model]]\nname = \"m\"\n[[model]]\nname = \"lora\"\n[[model]]\nname = \"other\"\n[[pool]]\nname = \"p\"\n\
                    [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:7001\"\n";

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

/// The arm of a user of model `m`.
fn arm_of(set: &ExperimentSet, user: u64) -> Option<(String, usize)> {
    let subject = Subject { model: ModelId::new(0), key: None, class: 0 };
    let unit = Unit::new(format!("user-{user}").as_bytes());
    let assigned = set.assign(&subject, |_| Some(unit), |_| true)?;
    Some((assigned.arm().label.to_string(), assigned.arm))
}

fn set(text: &str) -> ExperimentSet {
    Experiments::default().configure(&config(text))
}

#[test]
fn five_million_units_hit_the_weights_and_two_gateways_agree_on_every_one() {
    const UNITS: u64 = 5_000_000;
    let config = config(&experiment("x", ""));
    let [one, other] = [(); 2].map(|()| Experiments::default().configure(&config));
    let subject = Subject { model: ModelId::new(0), key: None, class: 0 };
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
    // Written down once: a change would assign the users of every running experiment anew.
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
fn groups_are_independent_of_arms_and_equally_large() {
    let hash = UnitHash::new("default", "x");
    let mut counts = [[0u32; unit::GROUPS]; 2];
    for number in 0..640_000u64 {
        let unit = Unit::new(&number.to_le_bytes());
        counts[usize::from(hash.draw(unit) < 0.4)][hash.group(unit)] += 1;
    }
    // Means of 6,000 and 4,000; six standard deviations.
    assert!(counts[0].iter().all(|count| (5_535..6_465).contains(count)), "{:?}", counts[0]);
    assert!(counts[1].iter().all(|count| (3_620..4_380).contains(count)), "{:?}", counts[1]);
}

#[test]
fn only_requests_that_it_is_for_take_part() {
    let text = "[auth]\nkeys = [{ name = \"a\", sha256 = \"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\" }]\n";
    let set = set(&(text.to_owned() + &experiment("x", "keys = [\"a\"]\nclasses = [\"p\"]")));
    let takes_part = |model: usize, key: Option<&str>, class: usize, may_use: bool| {
        let subject = Subject { model: ModelId::new(model), key, class };
        set.assign(&subject, |_| Some(Unit::new(b"u")), |_| may_use).is_some()
    };
    assert!(takes_part(0, Some("a"), 0, true));
    assert!(!takes_part(2, Some("a"), 0, true), "another model");
    assert!(!takes_part(0, Some("b"), 0, true) && !takes_part(0, None, 0, true), "another key");
    assert!(!takes_part(0, Some("a"), 1, true), "another class");
    assert!(!takes_part(0, Some("a"), 0, false), "a key that may not use the models of all arms");
    let subject = Subject { model: ModelId::new(0), key: Some("a"), class: 0 };
    assert!(set.assign(&subject, |_| None, |_| true).is_none(), "nothing to be sticky by");
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
    let observation = |ordinal: u32| Observation {
        class: 1,
        group: 3,
        values: [Some(f64::from(ordinal).sqrt() / 1000.0); Quantity::ALL.len()],
        ending: Ending::Completed,
        missed: Some(false),
        fell_back: false,
        cached: None,
    };
    (0..500).for_each(|ordinal| x.state.observe(&x.plan, 1, &observation(ordinal)));
    first.find("y").unwrap().state.order(Phase::Promoted(1));
    let saved = serde_json::to_vec(&first.save()).unwrap();
    let second = Experiments::default();
    second.restore(serde_json::from_slice(&saved).unwrap());
    second.configure(&config(&text));
    assert_eq!(second.save(), first.save());
    assert_eq!(second.find("x").unwrap().state.progress().arms[1].requests(), 500);
    let other = Experiments::default();
    other.restore(serde_json::from_slice(&saved).unwrap());
    other.configure(&config(&text.replace("weight = 60", "weight = 50").replace("weight = 40", "weight = 50")));
    let phases = ["x", "y"].map(|name| other.find(name).unwrap().state.phase());
    assert_eq!(phases, [Phase::Running; 2], "other weights are another experiment");
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
