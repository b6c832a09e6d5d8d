//! `[tuner]`: the changes that the online tuner may make while requests run.
//!
//! The tuner is in the crate `online`; it reads the limits of a configuration and changes the
//! limits of pools. Without objectives the tuner changes nothing in any mode.

use std::time::Duration;

use super::file::Entry;
use super::limits;
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::Scalar;
use super::table::table;
use super::value::{not_empty, words};

table! {
    /// The online tuner, which adjusts limits to the latencies of live requests. It needs
    /// objectives ([slo]).
    pub struct Tuner {
        /// How far the tuner goes. "advise" shows the changes that it would make, and why;
        /// "approve" makes a change when an operator approves it; "apply" makes changes by itself,
        /// one at a time, and undoes changes that do not help; "off" does nothing. The tuner moves
        /// slots, long_prefix, prefill_tokens and the prompt lengths that separate pools, but every
        /// request stays servable. A reload keeps the values found, unless limits, objectives or
        /// backends in the file have changed.
        pub mode: TunerMode = default("advise");
        /// Flags of engines that the tuner may change where limits no longer help, by restarting
        /// one engine after the other: max-num-seqs, max-num-batched-tokens,
        /// long-prefill-token-threshold, prefill-schedule-interval (vLLM 0.33 or later),
        /// max-cudagraph-capture-size, gpu-memory-utilization. It changes them only in pools of two
        /// or more engines that the gateway runs (launch or control) with the same flags. The first
        /// engine serves copies of requests, then a share of the requests, before the other engines
        /// follow.
        pub flags: Vec<String> = default("[\"max-num-seqs\", \"max-num-batched-tokens\", \"long-prefill-token-threshold\"]")
            .check(check_flag).at_most(limits::MAX_TUNER_FLAGS);
        /// Time for which objectives must be missed, although no limit helps, before engines are
        /// changed.
        pub missed_for: Duration = duration("10m");
        /// Restarts of engines that the tuner may cause in an hour. A change of two engines takes
        /// two restarts, or four if it is undone.
        pub restarts_per_hour: u32 = default("12").within("2", "1000");
        /// Time for which engines are left alone after a change that did not help.
        pub cool_down: Duration = duration("30m");
        /// Times of day, in UTC, at which the tuner may restart engines, such as ["02:00-05:00"]. A
        /// change that has begun may be undone at any time. Empty: engines may be restarted at any
        /// time.
        pub windows: Vec<DailyWindow> = default("[]").at_most(limits::MAX_WINDOWS);
        /// Limit on the misses that changes of engines may cause, as a share of the misses that the
        /// objectives allow in 30 days.
        pub error_budget: f64 = default("0.05").within("0", "1");
        /// Hardware and model of the engines, for a simulation that forecasts the effect of a
        /// change.
        pub simulation: TunerSimulation = table();
    }
}

table! {
    /// The engines as a simulation needs them.
    pub struct TunerSimulation {
        /// The GPU: a preset of `sluice sim` such as "h200", or a file of `sluice sim fit`.
        pub gpu: Option<String> = optional("changes are made by what is seen, without a forecast").check(not_empty).example("h200");
        /// The host: a preset, or a file of `sluice sim fit`.
        pub host: Option<String> = optional("an average one").check(not_empty).example("quiet");
        /// The model: a preset, or a folder with its config.json. Required for a forecast.
        pub model: Option<String> = optional("changes are made by what is seen, without a forecast").check(not_empty).example("llama-3.1-8b");
    }
}

/// A period of every day, from one minute to another, which may be on the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DailyWindow {
    /// The begin, in minutes after midnight.
    pub from: u16,
    /// The end, in minutes after midnight.
    pub to: u16,
}

impl DailyWindow {
    /// Whether the window contains a minute after midnight.
    pub fn contains(&self, minute: u16) -> bool {
        if self.from <= self.to {
            (self.from..self.to).contains(&minute)
        } else {
            !(self.to..self.from).contains(&minute)
        }
    }
}

fn minutes(text: &str) -> Option<u16> {
    let (hours, minutes) = text.trim().split_once(':')?;
    let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
    (hours < 24 && minutes < 60 || (hours, minutes) == (24, 0)).then_some(60 * hours + minutes)
}

impl Scalar for DailyWindow {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let text = String::parse(written, report)?;
        let ends = text.split_once('-').and_then(|(from, to)| Some((minutes(from)?, minutes(to)?)));
        match ends.filter(|(from, to)| from != to) {
            Some((from, to)) => Ok(Self { from, to }),
            None => Err(Situation::Window { found: text }),
        }
    }

    fn text(&self, _: &Names) -> String {
        let show = |at: u16| format!("{:02}:{:02}", at / 60, at % 60);
        format!("{}-{}", show(self.from), show(self.to))
    }
}

/// Flags that the online tuner can change.
pub const TUNER_FLAGS: [&str; limits::MAX_TUNER_FLAGS] = [
    "max-num-seqs",
    "max-num-batched-tokens",
    "long-prefill-token-threshold",
    "prefill-schedule-interval",
    "max-cudagraph-capture-size",
    "gpu-memory-utilization",
];

fn check_flag(name: &str) -> Result<(), Situation> {
    match TUNER_FLAGS.contains(&name) {
        true => Ok(()),
        false => Err(Situation::TunerFlag { found: name.to_owned() }),
    }
}

words! {
    /// The permission of the online tuner.
    pub enum TunerMode {
        /// Nothing.
        Off = "off",
        /// Show changes without making them.
        Advise = "advise",
        /// Make a change that an operator approved.
        Approve = "approve",
        /// Make changes.
        Apply = "apply",
    }
}
