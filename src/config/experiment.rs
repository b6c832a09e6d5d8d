//! `[[experiment]]`: arms that serve the same requests in different ways, side by side, and are
//! compared.
//!
//! The first arm is the control, with which the others are compared. An arm may differ in the model
//! name that is sent upstream (a LoRA adapter against its base), in the pool, or in the backends
//! (the same model with other settings of vLLM). An arm without any of these serves requests as if
//! there were no experiment. A shadow arm serves copies of requests, whose responses no client
//! sees.
//!
//! A request takes part in at most one experiment. Experiments that could want the same request
//! must be in one layer, with parts of the traffic that do not overlap (`experiment_rules.rs`).
//! `sluice_gateway::experiment` assigns the units.

use std::time::Duration;

use jiff::Timestamp;

use super::file::Entry;
use super::limits;
use super::model::ModelScope;
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::Scalar;
use super::table::table;
use super::value::{check_model_name, check_name, not_empty, words};
use sluice_core::base::{Period, PoolId};

table! {
    /// A comparison of ways to serve the same requests.
    pub struct Experiment {
        /// Name of the experiment, a part of the label of each arm. Unique.
        pub name: String = required("name the experiment").check(check_name).example("sql-adapter");
        /// Models whose requests take part. "*" means all models. Models that are not declared then
        /// take part if no arm has a model and the pools of all arms serve "*".
        pub models: ModelScope = default("[\"*\"]").at_most(limits::MAX_MODELS + limits::MAX_ALIASES);
        /// API keys (auth.keys.name) whose requests take part. Empty: all.
        pub keys: Vec<String> = default("[]").at_most(limits::MAX_KEYS);
        /// Pools whose requests take part, by the home that a request would have without the
        /// experiment. Empty: all.
        pub classes: Vec<PoolId> = default("[]").at_most(limits::MAX_POOLS);
        /// Unit of requests that stays in one arm: all requests with the same header, the same end
        /// user (user or safety_identifier of the body), API key, session (session_id or
        /// prompt_cache_key of the body, or the header x-session-id) or beginning of the prompt
        /// (the first 1,024 bytes), or each request by itself. A request without the chosen value
        /// takes no part.
        pub sticky: Sticky = default("request");
        /// Name of the header for sticky = "header".
        pub header: String = default("x-user-id").check(check_header);
        /// Text that determines, with `sticky`, the arm of each unit. Gateways with the same salt
        /// agree on every unit; another salt assigns the units anew.
        pub salt: Option<String> = optional("the name").check(not_empty).example("sql-adapter-2");
        /// Layer of the experiment. Experiments in one layer divide the units of the layer among
        /// themselves.
        pub layer: String = default("default").check(check_name);
        /// The part of the layer's units that belongs to this experiment.
        pub traffic: Traffic = table();
        /// Time at which the ramp begins, such as "2026-01-31T12:00:00Z". Gateways with the same
        /// time are at the same step.
        pub begins: Option<Timestamp> = optional("when the experiment was first started").example("2026-01-31T12:00:00Z");
        /// Steps by which more of the experiment's units take part, in all arms together. A unit
        /// that takes part stays in the same arm at every later step. Empty: all at once.
        pub ramp: Vec<RampStep> =
            default("[]").at_most(limits::MAX_RAMP_STEPS).example("[\"2%\", \"10% after 30m\", \"100% after 2h\"]");
        /// Whether the experiment runs from the beginning; otherwise `sluice experiment start`
        /// starts it. An experiment that was started or stopped by hand stays so.
        pub running: bool = default("true");
        /// Smallest relative change of TTFT, TPOT and E2EL that matters. Arms that differ by less
        /// are called equal.
        pub min_effect: f64 = default("0.05").within("0.001", "1");
        /// Certainty of the verdicts, all of an experiment together and whenever you look at them.
        /// In an experiment whose arms do not differ, the chance that they are ever called
        /// different is at most 1 minus this.
        pub confidence: f64 = default("0.95").within("0.5", "0.9999");
        /// Limits at which an arm is stopped at once. The requests of the arm are then served as
        /// without the experiment.
        pub guardrail: Guardrail = table();
        /// Whether an arm that is better gets all units as soon as the verdict is known. Otherwise
        /// `sluice experiment promote` gives it all units.
        pub promote: bool = default("false");
        /// One table per arm; the first is the control.
        pub arms as "arm": Vec<Arm> = tables(limits::MAX_ARMS);
    }
}

table! {
    /// Units from `from` to below `to`, as shares of all units of a layer.
    pub struct Traffic {
        /// Start of the part.
        pub from: f64 = default("0.0").within("0", "1");
        /// End of the part.
        pub to: f64 = default("1.0").within("0", "1");
    }
}

/// One step of a ramp, written `5%` or `25% after 2h`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RampStep {
    /// Share of the experiment's units that take part, in all arms together; above 0, at most 1.
    pub share: f64,
    /// Time from the begin of the ramp to this step.
    pub after: Duration,
}

table! {
    /// Limits at which an arm is stopped at once, if it is certain that the arm is worse than the
    /// control.
    pub struct Guardrail {
        /// How much the share of failed requests may exceed the share in the control.
        pub errors: f64 = default("0.01").within("0", "1");
        /// How much the share of requests that missed an objective ([slo]) may exceed the share in
        /// the control.
        pub slo_misses: f64 = default("0.05").within("0", "1");
    }
}

table! {
    /// One way to serve the requests of an experiment.
    pub struct Arm {
        /// Name of the arm; with the name of the experiment, a label of metrics and a response
        /// header. Unique in the experiment.
        pub name: String = required("name the arm").check(check_name).example("base");
        /// Percent of the participating units that the arm serves. The weights of an experiment add
        /// up to 100. A shadow arm has 0, and no other arm may have 0.
        pub weight: f64 = default("0.0").within("0", "100");
        /// Makes the arm a shadow arm: it serves no units, but copies of requests, whose responses
        /// are measured and dropped. Requests come first: a copy is sent only to a backend that has
        /// room for it at once, and is cut as soon as a request needs that room. Copies on a
        /// separate engine do not slow requests either.
        pub shadow: Option<Shadow> = optional("an arm with units");
        /// Model name that the gateway sends to the engine, such as a LoRA adapter. The model must
        /// be declared.
        pub model: Option<String> = optional("the one that the client sent").check(check_model_name).example("sql");
        /// Pool that serves the arm.
        pub pool: Option<String> = optional("by prompt length, as without the experiment").check(check_name).example("canary");
        /// Backends of the pool that serve the arm. Empty: all.
        pub backends: Vec<String> = default("[]").at_most(limits::MAX_BACKENDS);
    }
}

table! {
    /// The copies that a shadow arm gets.
    #[derive(Copy)]
    pub struct Shadow {
        /// Share of the experiment's requests of which the arm gets a copy.
        pub share: f64 = required("write the share of the requests that are copied").within("0.0001", "1").example("0.1");
        /// Copies in flight at once.
        pub in_flight: u32 = default("4").within("1", "1024");
        /// Copies that begin in a second, evenly spaced.
        pub per_second: f64 = default("10.0").within("0.001", "10000");
    }
}

words! {
    /// The unit that stays in one arm.
    pub enum Sticky {
        /// Requests with the same value of a header.
        Header = "header",
        /// Requests of one end user.
        User = "user",
        /// Requests with one API key.
        Key = "key",
        /// Requests of one session.
        Session = "session",
        /// Requests whose prompts begin alike.
        Prefix = "prefix",
        /// No unit: each request by itself.
        Request = "request",
    }
}

impl Scalar for Timestamp {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let text = String::parse(written, report)?;
        text.parse().map_err(|_| Situation::Time { found: text })
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }
}

impl Scalar for RampStep {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let text = String::parse(written, report)?;
        let (share, after) = text.split_once(" after ").unwrap_or((&text, "0s"));
        let percent = share.trim().strip_suffix('%').and_then(|number| number.trim_end().parse::<f64>().ok());
        let after = after.trim().parse::<Period>().ok();
        match (percent.filter(|percent| *percent > 0.0 && *percent <= 100.0), after) {
            (Some(percent), Some(Period(after))) => Ok(Self { share: percent / 100.0, after }),
            _ => Err(Situation::Ramp { found: text }),
        }
    }

    fn text(&self, _: &Names) -> String {
        let percent = (self.share * 100.0 * 1e9).round() / 1e9;
        if self.after.is_zero() { format!("{percent}%") } else { format!("{percent}% after {}", Period(self.after)) }
    }
}

fn check_header(name: &str) -> Result<(), Situation> {
    match http::HeaderName::try_from(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(Situation::Header { found: name.to_owned() }),
    }
}
