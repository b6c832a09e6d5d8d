//! Metrics pages of engines over the last minutes.
//!
//! A counter that goes backwards shows a restart, so earlier samples are dropped. Bounds: [`SPAN`]
//! and [`SAMPLES_MAX`] of each engine.

use std::collections::VecDeque;
use std::time::Duration;

use sluice_core::vllm::metrics::MetricsSnapshot;

/// How far back a diagnosis looks.
pub const SPAN: Duration = Duration::from_secs(300);
const SAMPLES_MAX: usize = 120;
const KV_FULL: f64 = 0.95;

/// One metrics page.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineSample {
    /// Running sequences.
    pub running: f64,
    /// Waiting sequences.
    pub waiting: f64,
    /// Share of the KV cache in use.
    pub kv_usage: f64,
    /// Preemptions since the engine started.
    pub preemptions: f64,
    /// Prompt tokens since the engine started.
    pub prompt_tokens: f64,
    /// Sequences that wait for an adapter slot or the like, if shown.
    pub deferred: Option<f64>,
    /// Adapters that one step may use, and the number of adapters with requests.
    pub adapters: Option<(u64, usize)>,
}

impl EngineSample {
    /// The needed values of a page; `None`: one of them is missing.
    pub fn of(page: &MetricsSnapshot) -> Option<Self> {
        let is_whole = page.lacks().next().is_none();
        is_whole.then(|| Self {
            running: page.running,
            waiting: page.waiting,
            kv_usage: page.kv_usage,
            preemptions: page.preemptions,
            prompt_tokens: page.prompt_tokens,
            deferred: page.deferred,
            adapters: page.adapters.as_ref().map(|adapters| (adapters.slots, adapters.names.len())),
        })
    }
}

/// The samples of one engine.
#[derive(Clone, Debug, Default)]
pub struct EngineWatch {
    samples: VecDeque<(Duration, Option<EngineSample>)>,
}

/// Summary of the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineFacts {
    /// Samples with a page.
    pub samples: usize,
    /// Share of the looks without a page.
    pub missing: f64,
    /// Mean number of running sequences.
    pub running: f64,
    /// Most running sequences.
    pub running_peak: f64,
    /// Share of the samples with waiting sequences.
    pub waiting: f64,
    /// Median of the running sequences in samples with waiting sequences.
    pub running_while_waiting: f64,
    /// Mean use of the KV cache in samples with waiting sequences.
    pub kv_while_waiting: f64,
    /// Share of the samples with a full KV cache.
    pub kv_full: f64,
    /// Preemptions per minute.
    pub preemptions: f64,
    /// Share of the samples with a sequence that waits for an adapter slot.
    pub deferred: f64,
    /// Adapters that one step may use, and the most adapters with requests.
    pub adapters: Option<(u64, usize)>,
    /// `max-num-seqs`, if the gateway runs the engine.
    pub max_num_seqs: Option<f64>,
}

impl EngineWatch {
    /// Adds the sample at `now`; `None`: no page.
    pub fn add(&mut self, now: Duration, sample: Option<EngineSample>) {
        let last = self.samples.iter().rev().find_map(|(_, sample)| *sample);
        let restarted = last
            .zip(sample)
            .is_some_and(|(last, new)| new.prompt_tokens < last.prompt_tokens || new.preemptions < last.preemptions);
        let went_back = self.samples.back().is_some_and(|(at, _)| *at > now);
        if restarted || went_back {
            self.samples.clear();
        }
        self.samples.push_back((now, sample));
        let from = now.saturating_sub(SPAN);
        while self.samples.len() > SAMPLES_MAX || self.samples.front().is_some_and(|(at, _)| *at < from) {
            self.samples.pop_front();
        }
    }

    /// Summarizes the samples.
    pub fn facts(&self) -> EngineFacts {
        let seen: Vec<(Duration, EngineSample)> =
            self.samples.iter().filter_map(|(at, sample)| Some((*at, (*sample)?))).collect();
        let looks = self.samples.len();
        let missing = if looks == 0 { 1.0 } else { 1.0 - seen.len() as f64 / looks as f64 };
        let (Some(first), Some(last)) = (seen.first(), seen.last()) else {
            return EngineFacts { missing, ..EngineFacts::default() };
        };
        let count = seen.len() as f64;
        let share = |of: &dyn Fn(&EngineSample) -> bool| seen.iter().filter(|(_, s)| of(s)).count() as f64 / count;
        let mut waiting: Vec<EngineSample> =
            seen.iter().map(|(_, sample)| *sample).filter(|sample| sample.waiting >= 1.0).collect();
        waiting.sort_by(|one, other| one.running.total_cmp(&other.running));
        let minutes = (last.0 - first.0).as_secs_f64() / 60.0;
        let kv = waiting.iter().map(|sample| sample.kv_usage).sum::<f64>() / waiting.len().max(1) as f64;
        let adapters = seen.iter().filter_map(|(_, sample)| sample.adapters);
        EngineFacts {
            samples: seen.len(),
            missing,
            running: seen.iter().map(|(_, sample)| sample.running).sum::<f64>() / count,
            running_peak: seen.iter().map(|(_, sample)| sample.running).fold(0.0, f64::max),
            waiting: share(&|sample| sample.waiting >= 1.0),
            running_while_waiting: waiting.get(waiting.len() / 2).map_or(0.0, |sample| sample.running),
            kv_while_waiting: kv,
            kv_full: share(&|sample| sample.kv_usage >= KV_FULL),
            preemptions: if minutes > 0.0 { (last.1.preemptions - first.1.preemptions) / minutes } else { 0.0 },
            deferred: share(&|sample| sample.deferred.is_some_and(|deferred| deferred >= 1.0)),
            adapters: adapters.reduce(|one, other| (other.0, one.1.max(other.1))),
            max_num_seqs: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::metrics::SCHEDULER;

    const STEP: Duration = Duration::from_secs(5);

    fn watch(samples: impl IntoIterator<Item = Option<EngineSample>>) -> EngineFacts {
        let mut watch = EngineWatch::default();
        for (number, sample) in (1..).zip(samples) {
            watch.add(STEP * number, sample);
        }
        watch.facts()
    }

    #[test]
    fn facts_are_of_the_samples_with_a_page() {
        let sample = |running: f64, waiting: f64, preemptions: f64| {
            Some(EngineSample { running, waiting, preemptions, kv_usage: 0.5, ..EngineSample::default() })
        };
        let facts = watch([sample(1.0, 0.0, 0.0), sample(4.0, 2.0, 1.0), None, sample(4.0, 9.0, 3.0)]);
        assert_eq!((facts.samples, facts.missing, facts.running), (3, 0.25, 3.0));
        assert_eq!((facts.running_peak, facts.running_while_waiting, facts.kv_while_waiting), (4.0, 4.0, 0.5));
        assert_eq!((facts.waiting * 3.0, facts.preemptions), (2.0, 12.0));
        assert_eq!(watch([None, None]), EngineFacts { missing: 1.0, ..EngineFacts::default() });
        assert_eq!(watch([]).missing, 1.0);
    }

    #[test]
    fn a_page_without_one_of_the_names_is_no_sample() {
        let page: String = SCHEDULER.iter().map(|name| format!("vllm:{name} 0.5\n")).collect();
        let of = |page: &str| EngineSample::of(&MetricsSnapshot::parse(page));
        assert_eq!(of(&page).map(|sample| sample.waiting), Some(0.5));
        for name in SCHEDULER {
            assert_eq!(of(&page.replace(name, "renamed")), None, "{name}");
        }
        assert_eq!(watch([of(&page.replace("num_", "count_")); 10]).missing, 1.0);
    }

    #[test]
    fn a_restart_and_a_clock_that_goes_back_begin_anew_and_old_samples_are_forgotten() {
        let sample = |prompt_tokens| Some(EngineSample { prompt_tokens, ..EngineSample::default() });
        assert_eq!(watch([sample(10.0), sample(20.0), sample(3.0)]).samples, 1);
        let mut watch = EngineWatch::default();
        for number in 1..1_000 {
            watch.add(STEP * number, sample(f64::from(number)));
        }
        assert_eq!(watch.facts().samples, 61);
        watch.add(STEP, sample(5_000.0));
        assert_eq!(watch.facts().samples, 1);
    }
}
