//! The differences between two results apart from their measurements.
//!
//! A comparison should show a change of the server, and a change of the load makes it worthless. So
//! differences of the load are listed separately: arrivals; for each class the lengths, weight and
//! shared prefix; the prompt tokens that the servers counted; and every flag that is not known to
//! leave requests unchanged (`flags`). A value that only one file has is not a difference, because
//! files of other tools and earlier versions lack some values.

use super::flags::flags;
use crate::result::record::{ClassConfig, Record, RunConfig, RunResult, Slo};

/// Relative difference of mean prompt lengths beyond which loads differ, unless by chance.
const MAX_LENGTH: f64 = 0.05;
/// Number of standard errors by which two means may differ by chance.
const CHANCE: f64 = 3.0;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Differences {
    pub(super) load: Vec<String>,
    pub(super) other: Vec<String>,
}

impl Differences {
    fn add(&mut self, load: bool, sentence: String) {
        if load { self.load.push(sentence) } else { self.other.push(sentence) }
    }
}

pub(super) fn differences(a: &RunResult, b: &RunResult) -> Differences {
    let mut found = Differences::default();
    for ((load, name, was), (too, _, is)) in settings(&a.config).into_iter().zip(settings(&b.config)) {
        if was != is && !was.is_empty() && !is.is_empty() {
            found.add(load || too, sentence(name, &was, &is));
        }
    }
    classes(&a.config, &b.config, &mut found);
    for flag in flags(&a.config, &b.config) {
        found.add(flag.is_load, sentence(&flag.name, &flag.was, &flag.is));
    }
    if found.load.is_empty() {
        found.load.extend(lengths(a, b));
    }
    found
}

/// Differences of the prompt lengths that the servers counted, because configurations may not state
/// all lengths.
fn lengths(a: &RunResult, b: &RunResult) -> Vec<String> {
    let has_several = |run: &RunResult| run.config.classes.len() > 1;
    let mut names = vec![None];
    if has_several(a) && has_several(b) {
        names = a.config.classes.iter().map(|class| Some(class.name.as_str())).collect();
    }
    names.into_iter().filter_map(|name| class_lengths(a, b, name)).collect()
}

/// The prompt lengths of one class, or of all requests.
///
/// If an engine fails on long prompts, the mean over completed requests falls although the load is
/// the same. So the lengths must also differ when the requested lengths of failed requests are
/// included.
fn class_lengths(a: &RunResult, b: &RunResult, class: Option<&str>) -> Option<String> {
    let completed = |run: &RunResult| PromptLengths::of(run, class, Record::is_completed);
    let ended = |run: &RunResult| PromptLengths::of(run, class, |record| record.is_completed() || record.is_failed());
    let (was, is) = (completed(a)?, completed(b)?);
    let differ = was.differs(&is) && ended(a)?.differs(&ended(b)?);
    let of = class.map_or_else(String::new, |class| format!(" of class '{class}'"));
    differ.then(|| {
        format!("prompts{of} had {:.0} tokens in A and {:.0} in B on average, by the servers' count", was.mean, is.mean)
    })
}

struct PromptLengths {
    mean: f64,
    error: f64,
}

impl PromptLengths {
    fn of(run: &RunResult, class: Option<&str>, counts: impl Fn(&Record) -> bool) -> Option<Self> {
        let name = |record: &Record| run.config.classes.get(record.class as usize).map(|class| class.name.as_str());
        let known = |record: &&Record| counts(record) && record.prompt_tokens > 0;
        let of_class = |record: &&Record| class.is_none() || name(record) == class;
        let records = run.requests.iter().filter(known).filter(of_class);
        let tokens: Vec<f64> = records.map(|record| record.prompt_tokens as f64).collect();
        let many = tokens.len() as f64;
        let mean = tokens.iter().sum::<f64>() / many;
        let squares: f64 = tokens.iter().map(|tokens| (tokens - mean).powi(2)).sum();
        let error = (squares / (many - 1.0).max(1.0) / many).sqrt();
        (!tokens.is_empty()).then_some(Self { mean, error })
    }

    fn differs(&self, other: &Self) -> bool {
        let apart = (self.mean - other.mean).abs();
        let chance = CHANCE * self.error.hypot(other.error);
        apart - chance > MAX_LENGTH * self.mean.max(other.mean)
    }
}

fn sentence(name: &str, was: &str, is: &str) -> String {
    format!("{name} was '{was}' in A and '{is}' in B")
}

/// The settings. Each has a flag for a part of the load, the name and the value. An empty value is
/// unknown.
fn settings(config: &RunConfig) -> [(bool, &'static str, String); 17] {
    let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    let ramp = config.ramp.as_ref().map_or_else(
        || "none".to_owned(),
        |ramp| format!("{} from {} to {} per second", ramp.strategy, ramp.start, ramp.end),
    );
    // Files of other tools do not hold the seed.
    let seed = if config.version.is_empty() { String::new() } else { config.seed.to_string() };
    // If all requests are sent at once, their number is the length of the queue, a part of the
    // load.
    let many = config.arrival == "at once";
    [
        (false, "model", config.model.clone()),
        (false, "tokenizer", config.tokenizer.clone().unwrap_or_default()),
        (false, "API", config.backend.clone()),
        (true, "endpoint", config.endpoint.clone()),
        (false, "server", config.urls.join(", ")),
        (false, "version of vLLM", config.server_versions.join(", ")),
        (false, "version of the load generator", config.version.clone()),
        (true, "dataset", config.dataset.clone()),
        (true, "arrivals", config.arrival.clone()),
        (true, "request rate", number(config.request_rate)),
        (true, "burstiness", number(config.burstiness)),
        (true, "ramp", ramp),
        (true, "max concurrency", number(config.max_concurrency.map(f64::from))),
        (many, "number of prompts", config.num_prompts.to_string()),
        (false, "seed", seed),
        (false, "classes of the gateway", classes_of(config)),
        (true, "adapters", if config.adapters.is_empty() { "none".to_owned() } else { config.adapters.join(", ") }),
    ]
}

fn classes_of(config: &RunConfig) -> String {
    let each = config.gateway_classes.iter().map(|class| format!("{}: {}", class.name, class.requests));
    each.collect::<Vec<_>>().join("; ")
}

fn classes(a: &RunConfig, b: &RunConfig, found: &mut Differences) {
    let named = |config: &RunConfig, name: &str| config.classes.iter().position(|class| class.name == name);
    for (one, other, here, there) in [(a, b, 'A', 'B'), (b, a, 'B', 'A')] {
        let alone = one.classes.iter().filter(|class| named(other, &class.name).is_none());
        let alone = alone.filter(|_| !other.classes.is_empty());
        found.load.extend(alone.map(|class| format!("class '{}' is in {here} and not in {there}", class.name)));
    }
    let single = a.classes.len() == 1 && b.classes.len() == 1;
    for (at, class) in a.classes.iter().enumerate() {
        let Some(other) = named(b, &class.name) else { continue };
        let of = if single { String::new() } else { format!(" of class '{}'", class.name) };
        for ((load, name, was), (_, _, is)) in class_settings(a, at).into_iter().zip(class_settings(b, other)) {
            if was != is && !was.is_empty() && !is.is_empty() {
                found.add(load, sentence(&format!("{name}{of}"), &was, &is));
            }
        }
    }
}

fn class_settings(config: &RunConfig, at: usize) -> [(bool, &'static str, String); 7] {
    let class: &ClassConfig = &config.classes[at];
    let total: f64 = config.classes.iter().map(|class| class.weight).sum();
    let share = if total > 0.0 { format!("{:.2} %", 100.0 * class.weight / total) } else { String::new() };
    // In files of earlier versions a class has no lengths.
    let prefix = match (class.prompt.is_empty(), class.prefix.is_empty()) {
        (true, _) => String::new(),
        (false, true) => "none".to_owned(),
        (false, false) => class.prefix.clone(),
    };
    let Slo { ttft, tpot, e2el } = *config.slo_of(u32::try_from(at).unwrap_or(u32::MAX));
    let bound = |bound: Option<f64>| bound.map_or_else(|| "none".to_owned(), |ms| format!("{ms} ms"));
    [
        (true, "prompt length", class.prompt.clone()),
        (true, "output length", class.output.clone()),
        (true, "shared prefix", prefix),
        (true, "share", share),
        (false, "objective for TTFT", bound(ttft)),
        (false, "objective for TPOT", bound(tpot)),
        (false, "objective for E2EL", bound(e2el)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> RunConfig {
        let class = |name: &str, weight: f64, prompt: &str| ClassConfig {
            name: name.to_owned(),
            weight,
            prompt: prompt.to_owned(),
            output: "128".to_owned(),
            ..ClassConfig::default()
        };
        RunConfig {
            version: "0.1.0".to_owned(),
            server_versions: vec!["0.32.0".to_owned()],
            arguments: ["--class", "short:in=200", "--temperature", "0", "--save-result"].map(str::to_owned).to_vec(),
            classes: vec![class("short", 15.0, "200"), class("long", 1.0, "16000")],
            ..RunConfig::default()
        }
    }

    fn both(change: impl FnOnce(&mut RunConfig)) -> Differences {
        let a = RunResult { config: config(), ..RunResult::default() };
        let mut b = a.clone();
        change(&mut b.config);
        differences(&a, &b)
    }

    fn found(change: impl FnOnce(&mut RunConfig)) -> Vec<String> {
        let Differences { load, other } = both(change);
        [load, other].concat()
    }

    #[test]
    fn what_changes_the_requests_is_a_difference_of_the_load_and_the_server_is_none() {
        let in_load = |change: &dyn Fn(&mut RunConfig)| {
            let found = both(change);
            assert_eq!(found.load.len() + found.other.len(), 1, "{found:?}");
            !found.load.is_empty()
        };
        assert!(in_load(&|b| b.request_rate = Some(3.0)));
        assert!(in_load(&|b| b.classes[0].prompt = "300".to_owned()));
        assert!(in_load(&|b| b.arguments.push("--leave-share=0.5".to_owned())));
        assert!(in_load(&|b| b.arguments.push("--some-flag-of-tomorrow".to_owned())));
        assert!(!in_load(&|b| b.num_prompts = 77));
        assert!(in_load(&|b| (b.arrival, b.num_prompts) = ("at once".to_owned(), 77)));
        assert!(!in_load(&|b| b.version = "0.2.0".to_owned()));
        assert!(!in_load(&|b| b.arguments.push("--insecure".to_owned())));
        assert!(!in_load(&|b| b.classes[0].slo.ttft = Some(1.0)));
    }

    #[test]
    fn changed_lengths_weights_and_objectives_of_a_class_are_named() {
        assert_eq!(found(|_| ()), Vec::<String>::new());
        assert_eq!(
            found(|b| b.classes[1].prompt = "32000".to_owned()),
            ["prompt length of class 'long' was '16000' in A and '32000' in B"]
        );
        assert_eq!(
            found(|b| b.classes[0].output = "64".to_owned()),
            ["output length of class 'short' was '128' in A and '64' in B"]
        );
        assert_eq!(
            found(|b| b.classes[0].prefix = "100 tokens more, 1 of them".to_owned()),
            ["shared prefix of class 'short' was 'none' in A and '100 tokens more, 1 of them' in B"]
        );
        assert_eq!(
            found(|b| b.classes[1].weight = 5.0),
            [
                "share of class 'short' was '93.75 %' in A and '75.00 %' in B",
                "share of class 'long' was '6.25 %' in A and '25.00 %' in B"
            ]
        );
        assert_eq!(
            found(|b| (b.classes[0].weight, b.classes[1].weight) = (30.0, 2.0)),
            Vec::<String>::new(),
            "the same mix"
        );
        assert_eq!(
            found(|b| b.classes[0].slo.ttft = Some(300.0)),
            ["objective for TTFT of class 'short' was 'none' in A and '300 ms' in B"]
        );
        assert_eq!(
            found(|b| b.classes[1].name = "longer".to_owned()),
            ["class 'long' is in A and not in B", "class 'longer' is in B and not in A"]
        );
    }

    #[test]
    fn versions_and_flags_without_a_field_are_named_and_those_of_the_output_are_not() {
        assert_eq!(
            found(|b| b.server_versions = vec!["0.33.0".to_owned()]),
            ["version of vLLM was '0.32.0' in A and '0.33.0' in B"]
        );
        let arguments = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            found(|b| b.arguments = arguments("--class short:in=200 --temperature=0.5 --ignore-eos --csv x.csv")),
            ["--ignore-eos was 'not given' in A and 'given' in B", "--temperature was '0' in A and '0.5' in B"]
        );
    }

    #[test]
    fn what_a_file_does_not_say_is_no_difference() {
        let bare = |b: &mut RunConfig| {
            let classes = b.classes.iter().map(|class| ClassConfig {
                name: class.name.clone(),
                weight: class.weight,
                ..ClassConfig::default()
            });
            *b = RunConfig { classes: classes.collect(), ..RunConfig::default() };
        };
        assert_eq!(found(bare), Vec::<String>::new());
    }
}
