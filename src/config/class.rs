//! `[[class]]`: kinds of requests. Latency is shown, alerted on and judged for each kind, whichever
//! pool and engine serve the requests.
//!
//! A request belongs to the first class whose conditions all hold, otherwise to [`OTHER_CLASS`].
//! The length of a prompt is the estimate, or the engine's count once the request has ended. Bound:
//! [`limits::MAX_CLASSES`] classes.
//!
//! Without `[[class]]` the classes follow from the lengths at which the configuration treats
//! prompts differently: the ends of the pools' ranges and the thresholds of permits, or
//! [`USUAL_BOUNDARY`] if there is none. Two classes have the names "short" and "long", and three
//! "short", "medium" and "long". More classes are named by their ends, such as "to-2k" and
//! "from-16k".

use super::limits;
use super::pool::{Pool, PromptRange};
use super::problem::Situation;
use super::report::{Claimed, Report};
use super::server::Slo;
use super::table::table;
use super::value::check_name;
use sluice_core::base::Tokens;
use sluice_core::meter::slo::Objectives;

/// The class of a request that belongs to no class of the configuration.
pub const OTHER_CLASS: &str = "other";

/// Length from which prompts are long, in a configuration that treats all lengths alike.
const USUAL_BOUNDARY: u64 = 5_000;

table! {
    /// A kind of requests.
    pub struct Class {
        /// Name of the class: a label of metrics, pages and reports. Unique.
        pub name: String = required("name the class, such as \"short\"").check(check_name).example("short");
        /// Prompt lengths of the class.
        pub prompt_tokens: PromptRange = table();
        /// Whether requests for a LoRA adapter (true) or for other models (false) are in the class.
        pub adapter: Option<bool> = optional("both").example("true");
        /// Whether requests that generate tokens (true) or others, such as embeddings (false), are
        /// in the class.
        pub generates: Option<bool> = optional("both").example("true");
        /// Objectives of the class, in place of the objectives of the pool. A target that is absent
        /// here is the pool's.
        pub slo: Slo = table();
    }
}

impl Class {
    /// A class of all requests with prompts of these lengths, without objectives.
    pub fn of_lengths(name: &str, prompt_tokens: PromptRange) -> Self {
        Self { name: name.to_owned(), prompt_tokens, adapter: None, generates: None, slo: Slo::NONE }
    }

    /// The classes of a configuration in which nothing depends on the length of a prompt.
    pub fn usual() -> Vec<Self> {
        derived(&[])
    }

    /// The requests of the class in words.
    pub fn requests(&self) -> String {
        let adapter = self.adapter.map_or("", |wanted| if wanted { ", with adapter" } else { ", without adapter" });
        format!("{}{adapter}", self.prompt_tokens)
    }

    /// Whether a request with a prompt of this length is in the class.
    pub fn has(&self, tokens: u64, adapter: bool, generates: bool) -> bool {
        self.prompt_tokens.contains(Tokens(tokens))
            && self.adapter.is_none_or(|wanted| wanted == adapter)
            && self.generates.is_none_or(|wanted| wanted == generates)
    }

    /// The targets by which a request of this class in `pool` is judged.
    pub fn objectives_in(&self, pool: &Pool) -> Objectives {
        let (own, of_pool) = (self.slo.objectives(), pool.slo.objectives());
        let ttft_per_1k = if own.ttft.is_some() { own.ttft_per_1k } else { of_pool.ttft_per_1k };
        Objectives {
            ttft: own.ttft.or(of_pool.ttft),
            ttft_per_1k,
            tpot: own.tpot.or(of_pool.tpot),
            e2el: own.e2el.or(of_pool.e2el),
        }
    }

    /// The share of this class's requests in `pool` that should meet all targets.
    pub fn attainment_in(&self, pool: &Pool) -> f64 {
        if self.slo.objectives().is_empty() { pool.slo.attainment } else { self.slo.attainment }
    }
}

/// The share of the requests in `pool` that should meet all targets: the largest share of a class
/// with targets, otherwise the pool's.
pub fn attainment(classes: &[Class], pool: &Pool) -> f64 {
    let judged = classes.iter().filter(|class| !class.objectives_in(pool).is_empty());
    judged.map(|class| class.attainment_in(pool)).reduce(f64::max).unwrap_or(pool.slo.attainment)
}

/// Checks that names are unique and ranges are not empty.
pub(super) fn check(classes: &[Class], report: &mut Report<'_>) {
    let mut names = Claimed::default();
    for (index, class) in classes.iter().enumerate() {
        let path = format!("class[{index}]");
        names.claim(&class.name, format!("{path}.name"), report);
        if class.name == OTHER_CLASS {
            report.add_at(&format!("{path}.name"), Situation::ReservedClass);
        }
        class.prompt_tokens.check(&format!("{path}.prompt_tokens"), report);
    }
}

/// The classes of a configuration without `[[class]]`.
pub(super) fn derived(pools: &[Pool]) -> Vec<Class> {
    let mut ends: Vec<u64> = pools.iter().filter(|pool| !pool.arms_only).flat_map(ends).collect();
    ends.sort_unstable();
    // A prompt as long as the threshold needs no permit, so that end is one token above the
    // threshold, at which a pool usually begins. The two count as one end.
    ends.dedup_by(|later, earlier| *later <= *earlier + 1);
    if ends.is_empty() {
        ends.push(USUAL_BOUNDARY);
    }
    ends.truncate(limits::MAX_CLASSES - 1);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let stops = ends.iter().copied().map(Some).chain([None]);
    let ranges: Vec<(u64, Option<u64>)> = starts.zip(stops).collect();
    let count = ranges.len();
    let class = |(index, (min, max)): (usize, (u64, Option<u64>))| {
        let range = PromptRange { min: Tokens(min), max: max.map(Tokens) };
        Class::of_lengths(&name(index, count, min, max), range)
    };
    ranges.into_iter().enumerate().map(class).collect()
}

/// The lengths at which a pool begins to treat prompts differently.
fn ends(pool: &Pool) -> impl Iterator<Item = u64> {
    let range = pool.prompt_tokens;
    let threshold = pool.long_prefix.map(|long| long.threshold.0.saturating_add(1));
    let inside = threshold.filter(|end| range.contains(Tokens(*end)) && *end > range.min.0.saturating_add(1));
    [Some(range.min.0), range.max.map(|max| max.0), inside].into_iter().flatten().filter(|end| *end > 0)
}

fn name(index: usize, count: usize, min: u64, max: Option<u64>) -> String {
    match (count, index) {
        (2, 0) | (3, 0) => "short".to_owned(),
        (3, 1) => "medium".to_owned(),
        (2, 1) | (3, 2) => "long".to_owned(),
        _ => match max {
            Some(max) => format!("to-{}", Tokens(max)),
            None => format!("from-{}", Tokens(min)),
        },
    }
}
