//! Reads the values that a prober needs from vLLM's Prometheus page.
//!
//! Values are summed over the `engine` label (data-parallel ranks), except the KV use, for which
//! the highest rank counts. Names have changed between versions: [`ALIASES`] maps old names to new
//! names. If a page has both, the new name counts. Under Ray the colon of `vllm:` is an underscore.
//!
//! Lines that cannot be parsed are skipped. [`MetricsSnapshot::samples`] counts the lines with a
//! name of vLLM; 0 means that the page is not vLLM's. Bound: at most [`MAX_PAGE`] bytes are read.

use super::drafts::DraftCounts;
use super::kv_size::{KvDoubt, KvSize};

/// Largest number of adapter names that are read from a page.
pub const MAX_ADAPTERS: usize = 64;
/// Most bytes of a page that are read. A real page has about 100 kB.
pub const MAX_PAGE: usize = 8 << 20;

/// Old names, and the names since 0.12, both without prefix.
pub const ALIASES: &[(&str, &str)] = &[
    ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
    ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
    ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
    ("time_per_output_token_seconds", "inter_token_latency_seconds"),
];

/// Names for the state of the scheduler. Every page of vLLM has samples of them from the start on.
pub const SCHEDULER: [&str; 5] = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "num_preemptions_total",
];

/// The name to which other kinds of engine translate their own name for the size of the KV cache in
/// tokens.
pub const KV_TOKENS: &str = "kv_cache_tokens";

/// Bounds of buckets of `iteration_tokens_total`, tokens.
pub const STEP_TOKENS: [f64; 5] = [256.0, 512.0, 1_024.0, 2_048.0, 4_096.0];
/// For each of [`STEP_TOKENS`], the smallest bound in vLLM's buckets of prompt lengths that is not
/// below it.
const PROMPT_TOKENS: [f64; STEP_TOKENS.len()] = [500.0, 1_000.0, 2_000.0, 5_000.0, 5_000.0];

/// The number of samples of a histogram that lie above each bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Above {
    all: f64,
    /// Samples up to each bound; `None` if the page has no such bucket.
    up_to: [Option<f64>; STEP_TOKENS.len()],
}

impl Above {
    /// The number of samples above each bound; 0 where it is not known.
    pub fn counts(&self) -> [f64; STEP_TOKENS.len()] {
        self.up_to.map(|up_to| up_to.map_or(0.0, |up_to| self.all - up_to))
    }

    fn add_bucket(&mut self, bounds: &[f64; STEP_TOKENS.len()], labels: &str, count: f64) {
        let bound = label(labels, "le").and_then(|bound| bound.parse::<f64>().ok());
        for (up_to, _) in self.up_to.iter_mut().zip(bounds).filter(|(_, own)| bound == Some(**own)) {
            *up_to = Some(up_to.unwrap_or(0.0) + count);
        }
    }
}

/// The values of a page, summed over engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsSnapshot {
    /// Samples with vLLM's prefix; 0 if the page is not vLLM's.
    pub samples: usize,
    /// Requests in the running list.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// Highest share of KV blocks in use, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens since the start.
    pub prompt_tokens: f64,
    /// Generated tokens since the start.
    pub generation_tokens: f64,
    /// Finished requests by reason.
    pub success: Success,
    /// Preemptions since the start.
    pub preemptions: f64,
    /// Engine steps since the start (samples of `iteration_tokens_total`).
    pub iterations: f64,
    /// Tokens looked up in the prefix cache since the start (blocks in 0.8).
    pub prefix_queries: f64,
    /// Tokens found in the prefix cache since the start.
    pub prefix_hits: f64,
    /// Time to first token: number of samples and their sum, seconds.
    pub ttft: (f64, f64),
    /// Inter-token latency: number of gaps and their sum, seconds.
    pub itl: (f64, f64),
    /// Speculative decoding.
    pub drafts: DraftCounts,
    /// Value of `num_gpu_blocks`, if the page shows it.
    pub gpu_blocks: Option<u64>,
    /// Tokens that the prefix cache of one engine holds in GPU memory, if the page shows it: the
    /// size of the KV cache, 0 if prefix caching is off.
    pub cache_tokens: Option<u64>,
    /// Tokens in the KV caches of all engines of the page together, with prefix caching or without.
    pub kv_tokens: Option<u64>,
    /// Why the size of a KV cache that the page states is not used.
    pub cache_doubt: Option<KvDoubt>,
    /// Tokens that one engine can keep in host memory. 0 without that tier, or if the page does not
    /// show the tier's size in tokens. vLLM 0.33 shows the size of its own tier from the first step
    /// on.
    pub offloaded_tokens: u64,
    /// Requests that wait for a passing condition, such as a free adapter slot; `None` before 0.20.
    pub deferred: Option<f64>,
    /// Adapters with requests, if the engine serves adapters and has had a request for one.
    pub adapters: Option<AdaptersInUse>,
    /// Engine steps since the start that computed more tokens than each of [`STEP_TOKENS`].
    pub steps_above: Above,
    /// For each of [`STEP_TOKENS`]: requests since the start for which more prompt tokens were
    /// computed than the next higher bound of vLLM's buckets; 0 before 0.20.
    pub computed_above: Above,
    progress: f64,
    /// The names of [`SCHEDULER`] that have samples.
    shown: [bool; SCHEDULER.len()],
}

/// The latest sample of `lora_requests_info`. The value of a sample is a timestamp, and older
/// samples stay on the page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdaptersInUse {
    /// Adapters that one step may use (`--max-loras`).
    pub slots: u64,
    /// Adapters with requests that run or wait, sorted; at most [`MAX_ADAPTERS`]. vLLM lists each
    /// adapter under both labels.
    pub names: Vec<String>,
    at: f64,
}

/// Numbers of finished requests, by `finished_reason`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Success {
    /// End of sequence or stop string.
    pub stop: f64,
    /// The length limit was reached.
    pub length: f64,
    /// The client disconnected.
    pub abort: f64,
    /// Failed.
    pub error: f64,
    /// Any other reason.
    pub other: f64,
}

impl MetricsSnapshot {
    /// Reads a page of vLLM.
    pub fn parse(page: &str) -> Self {
        Self::read(page, own_name)
    }

    /// Reads a page of an engine whose names `name` translates to names of vLLM without prefix. A
    /// line whose name is not translated is skipped.
    pub fn read<'a>(page: &'a str, name: impl Fn(&'a str) -> Option<&'a str> + Copy) -> Self {
        let mut end = page.len().min(MAX_PAGE);
        while !page.is_char_boundary(end) {
            end -= 1;
        }
        let page = &page[..end];
        let new_names: Vec<&str> = ALIASES.iter().map(|(_, new)| *new).filter(|new| shows(page, new, name)).collect();
        let mut snapshot = Self::default();
        for line in page.lines() {
            // No value of an engine is negative. A negative sample is skipped, because in a sum it
            // would hide other samples.
            let read = sample(line).and_then(|(written, labels, value)| Some((name(written)?, labels, value)));
            if let Some((name, labels, value)) = read.filter(|(_, _, value)| *value >= 0.0) {
                let name = match ALIASES.iter().find(|(old, _)| family_matches(name, old)) {
                    Some((_, new)) if new_names.contains(new) => continue,
                    Some((old, new)) => [new, &name[old.len()..]].concat(),
                    None => name.to_owned(),
                };
                snapshot.add(&name, labels, value);
            }
        }
        snapshot
    }

    fn add(&mut self, name: &str, labels: &str, value: f64) {
        self.samples += 1;
        if let Some(at) = SCHEDULER.iter().position(|known| *known == name) {
            self.shown[at] = true;
        }
        if moves_only_with_work(name) {
            self.progress += value;
        }
        match name {
            "num_requests_running" => self.running += value,
            "num_requests_waiting" => self.waiting += value,
            "kv_cache_usage_perc" => self.kv_usage = self.kv_usage.max(value),
            "prompt_tokens_total" => self.prompt_tokens += value,
            "generation_tokens_total" => self.generation_tokens += value,
            "num_preemptions_total" => self.preemptions += value,
            "iteration_tokens_total_count" => {
                self.iterations += value;
                self.steps_above.all += value;
            }
            "iteration_tokens_total_bucket" => self.steps_above.add_bucket(&STEP_TOKENS, labels, value),
            "request_prefill_kv_computed_tokens_count" => self.computed_above.all += value,
            "request_prefill_kv_computed_tokens_bucket" => {
                self.computed_above.add_bucket(&PROMPT_TOKENS, labels, value);
            }
            "prefix_cache_queries_total" => self.prefix_queries += value,
            "prefix_cache_hits_total" => self.prefix_hits += value,
            "time_to_first_token_seconds_count" => self.ttft.0 += value,
            "time_to_first_token_seconds_sum" => self.ttft.1 += value,
            "inter_token_latency_seconds_count" => self.itl.0 += value,
            "inter_token_latency_seconds_sum" => self.itl.1 += value,
            "spec_decode_num_drafts_total" => self.drafts.drafts += value,
            "spec_decode_num_draft_tokens_total" => self.drafts.tokens += value,
            "spec_decode_num_accepted_tokens_per_pos_total" => self.drafts.add(label(labels, "position"), value),
            "request_success_total" => {
                let slot = match label(labels, "finished_reason") {
                    Some("stop") => &mut self.success.stop,
                    Some("length") => &mut self.success.length,
                    Some("abort") => &mut self.success.abort,
                    Some("error") => &mut self.success.error,
                    _ => &mut self.success.other,
                };
                *slot += value;
            }
            "num_requests_waiting_by_reason" if label(labels, "reason") == Some("deferred") => {
                self.deferred = Some(self.deferred.unwrap_or_default() + value);
            }
            KV_TOKENS => {
                self.cache_tokens = Some(value as u64);
                self.kv_tokens = self.cache_tokens;
            }
            "lora_requests_info" => self.add_adapters(labels, value),
            "cache_config_info" => {
                let blocks = label(labels, "num_gpu_blocks").and_then(|blocks| blocks.parse::<u64>().ok());
                let size = KvSize::read(|name| label(labels, name));
                let on = label(labels, "enable_prefix_caching") != Some("False");
                let tokens = size.tokens.map(|tokens| if on { tokens } else { 0 });
                self.cache_tokens = self.cache_tokens.or(tokens);
                let sum = size.tokens.map(|tokens| tokens.saturating_add(self.kv_tokens.unwrap_or(0)));
                self.kv_tokens = sum.or(self.kv_tokens);
                self.cache_doubt = self.cache_doubt.or(size.doubt);
                self.gpu_blocks = match (self.gpu_blocks, blocks) {
                    (Some(sum), Some(more)) => Some(sum.saturating_add(more)),
                    (known, new) => known.or(new),
                };
            }
            "kv_offload_config_info" => {
                let tokens = label(labels, "cpu_kv_cache_size_tokens").and_then(|tokens| tokens.parse().ok());
                self.offloaded_tokens = self.offloaded_tokens.max(tokens.unwrap_or(0));
            }
            _ => {}
        }
    }

    /// Tokens that one engine's prefix cache can hold, on the GPU or in host memory. The tier in
    /// host memory gets a copy of every block when the block is computed, so the larger of the two
    /// sizes counts, not the sum.
    pub fn prefix_tokens(&self) -> Option<u64> {
        self.cache_tokens.map(|tokens| if tokens == 0 { 0 } else { tokens.max(self.offloaded_tokens) })
    }

    fn add_adapters(&mut self, labels: &str, at: f64) {
        let Some(slots) = label(labels, "max_lora").and_then(|slots| slots.parse().ok()) else { return };
        if self.adapters.as_ref().is_some_and(|known| known.at > at) {
            return;
        }
        let lists = ["running_lora_adapters", "waiting_lora_adapters"].map(|name| label(labels, name).unwrap_or(""));
        let mut names: Vec<String> =
            lists.iter().flat_map(|list| list.split(',')).filter(|name| !name.is_empty()).map(str::to_owned).collect();
        names.sort_unstable();
        names.dedup();
        names.truncate(MAX_ADAPTERS);
        self.adapters = Some(AdaptersInUse { slots, names, at });
    }

    /// The names of [`SCHEDULER`] that the page lacks, perhaps because a later vLLM renamed them.
    /// Their values count as 0.
    pub fn lacks(&self) -> impl Iterator<Item = &'static str> {
        SCHEDULER.into_iter().zip(self.shown).filter(|(_, shown)| !shown).map(|(name, _)| name)
    }

    /// A number that grows only while the engine works: the sum of all `_total`, `_count` and
    /// `_sum` samples that move only with engine steps. Aborts and refusals are left out, because
    /// the API server counts them even while the engine hangs.
    pub fn progress(&self) -> f64 {
        self.progress
    }
}

/// Whether the family `name` (without suffix) occurs on the page.
fn shows<'a>(page: &'a str, family: &str, name: impl Fn(&'a str) -> Option<&'a str>) -> bool {
    page.lines().filter_map(|line| name(sample(line)?.0)).any(|found| family_matches(found, family))
}

/// The name of a sample of vLLM without prefix.
fn own_name(written: &str) -> Option<&str> {
    written.strip_prefix("vllm:").or_else(|| written.strip_prefix("vllm_"))
}

/// Whether `name` is the family or one of its histogram samples.
fn family_matches(name: &str, family: &str) -> bool {
    name.strip_prefix(family).is_some_and(|rest| matches!(rest, "" | "_count" | "_sum" | "_bucket" | "_created"))
}

fn moves_only_with_work(name: &str) -> bool {
    const ENGINE: [&str; 8] = [
        "prompt_tokens",
        "generation_tokens",
        "num_preemptions",
        "iteration_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "prefix_cache_",
        "spec_decode_",
    ];
    let counts = ["_total", "_count", "_sum"].iter().any(|suffix| name.ends_with(suffix));
    counts && ENGINE.iter().any(|family| name.starts_with(family))
}

/// Name, labels without braces, value. `None` for comments and for numbers that are not finite.
pub(super) fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let rest = line.trim();
    if rest.starts_with('#') {
        return None;
    }
    let (name, labels, value) = match rest.find('{') {
        Some(open) => {
            let close = open + rest[open..].rfind('}')?;
            (&rest[..open], &rest[open + 1..close], &rest[close + 1..])
        }
        None => {
            let (name, value) = rest.split_once(char::is_whitespace)?;
            (name, "", value)
        }
    };
    // A time stamp may follow the value.
    let value: f64 = value.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name, labels, value))
}

/// The value of a label, escaped as on the page.
pub(super) fn label<'a>(labels: &'a str, wanted: &str) -> Option<&'a str> {
    let mut rest = labels;
    loop {
        let (name, after) = rest.split_once("=\"")?;
        let mut escaped = false;
        let end = after.find(|c: char| {
            let closes = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            closes
        })?;
        if name.trim_start_matches([',', ' ']) == wanted {
            return Some(&after[..end]);
        }
        rest = &after[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn engines_are_summed() {
        let page = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a,\\\"}b\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
            vllm:request_success_total{engine=\"0\",finished_reason=\"abort\"} 2.0\n\
            vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"} 5.0\n\
            vllm:iteration_tokens_total_count{engine=\"0\"} 9\nhttp_requests_total 99\n\
            vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"57301\"} 1.0\n";
        let snapshot = MetricsSnapshot::parse(page);
        assert_eq!((snapshot.running, snapshot.kv_usage, snapshot.iterations), (7.0, 0.5, 9.0));
        assert_eq!((snapshot.success.abort, snapshot.success.stop), (2.0, 5.0));
        assert_eq!((snapshot.gpu_blocks, snapshot.samples), (Some(57301), 8));
        assert_eq!(snapshot.cache_tokens, Some(57_301 * 16));
        let off =
            "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\",num_gpu_blocks=\"9\"} 1.0\n";
        assert_eq!(MetricsSnapshot::parse(off).cache_tokens, Some(0));
        assert_eq!(snapshot.progress(), 9.0);
    }

    #[test]
    fn the_stated_size_of_the_cache_and_a_tier_in_host_memory_count() {
        let gpu = |on: &str| {
            format!(
                "vllm:cache_config_info{{block_size=\"16\",enable_prefix_caching=\"{on}\",engine=\"0\",\
                 kv_cache_size_tokens=\"9000\",num_gpu_blocks=\"1000\"}} 1.0\n"
            )
        };
        let tier = |tokens: &str| {
            format!("vllm:kv_offload_config_info{{cpu_kv_cache_size_tokens=\"{tokens}\",engine=\"0\"}} 1.0\n")
        };
        let prefix = |page: String| MetricsSnapshot::parse(&page).prefix_tokens();
        assert_eq!(prefix(gpu("True")), Some(9_000));
        assert_eq!(prefix(gpu("True") + &tier("40000")), Some(40_000));
        assert_eq!(prefix(gpu("True") + &tier("500")), Some(9_000), "the tier has copies of the same blocks");
        for unknown in ["None", "", "-5", "lots"] {
            assert_eq!(prefix(gpu("True") + &tier(unknown)), Some(9_000), "{unknown}");
        }
        assert_eq!(prefix(gpu("False") + &tier("40000")), Some(0), "prefix caching is off");
        assert_eq!(prefix(tier("40000")), None);
    }

    #[test]
    fn old_names_count_unless_the_new_ones_are_there_too() {
        let old = "vllm:gpu_cache_usage_perc{} 0.5\nvllm:gpu_prefix_cache_hits_total 8\n";
        let both = format!("{old}vllm:kv_cache_usage_perc 0.7\nvllm:prefix_cache_hits_total 128\n");
        assert_eq!((MetricsSnapshot::parse(old).kv_usage, MetricsSnapshot::parse(old).prefix_hits), (0.5, 8.0));
        assert_eq!((MetricsSnapshot::parse(&both).kv_usage, MetricsSnapshot::parse(&both).prefix_hits), (0.7, 128.0));
    }

    #[test]
    fn the_latest_sample_says_which_adapters_have_requests() {
        let at = |running: &str, waiting: &str, at: u32| {
            format!(
                "vllm:lora_requests_info{{max_lora=\"1\",running_lora_adapters=\"{running}\",\
                 waiting_lora_adapters=\"{waiting}\"}} 1.76{at}e+09\n"
            )
        };
        let deferred = "vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 4.0\n\
             vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"deferred\"} 3.0\n";
        let page = at("", "", 1) + &at("sql", "chat,sql", 5) + &at("chat", "", 4) + deferred;
        let snapshot = MetricsSnapshot::parse(&page);
        let adapters = snapshot.adapters.unwrap();
        assert_eq!(
            (adapters.slots, adapters.names.join(" "), snapshot.deferred),
            (1, "chat sql".to_owned(), Some(3.0))
        );
        let idle = MetricsSnapshot::parse(&(page + &at("", "", 6)));
        assert_eq!(idle.adapters.unwrap().names, [""; 0]);
        assert_eq!(MetricsSnapshot::parse("vllm:num_requests_waiting 3\n").adapters, None);
    }

    #[test]
    fn steps_and_prompts_above_a_number_of_tokens_are_counted_where_the_page_has_the_bucket() {
        let bucket = |family: &str, bound: &str, count: u32| {
            format!("vllm:{family}_bucket{{engine=\"0\",le=\"{bound}\"}} {count}\n")
        };
        let page = bucket("iteration_tokens_total", "256.0", 70)
            + &bucket("iteration_tokens_total", "512.0", 100)
            + &bucket("iteration_tokens_total", "1024.0", 100)
            + &bucket("iteration_tokens_total", "2048.0", 100)
            + &bucket("iteration_tokens_total", "4096.0", 100)
            + "vllm:iteration_tokens_total_count{engine=\"0\"} 100\n"
            + &bucket("request_prefill_kv_computed_tokens", "500.0", 4)
            + &bucket("request_prefill_kv_computed_tokens", "1000.0", 5)
            + &bucket("request_prefill_kv_computed_tokens", "2000.0", 8)
            + "vllm:request_prefill_kv_computed_tokens_count{engine=\"0\"} 9\n";
        let snapshot = MetricsSnapshot::parse(&page);
        assert_eq!(snapshot.steps_above.counts(), [30.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(snapshot.computed_above.counts(), [5.0, 4.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_page_of_something_else_has_no_samples() {
        assert_eq!(MetricsSnapshot::parse("<html>not found</html>").samples, 0);
        assert_eq!(MetricsSnapshot::parse("").samples, 0);
    }

    #[test]
    fn numbers_that_are_none_are_not_read_and_names_that_are_not_there_are_named() {
        let page: String = SCHEDULER.iter().map(|name| format!("vllm:{name}{{engine=\"0\"}} 2\n")).collect();
        let lacks = |page: &str| MetricsSnapshot::parse(page).lacks().collect::<Vec<_>>().join(" ");
        assert_eq!(lacks(&page), "");
        assert_eq!(lacks(&page.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")), "", "the name until 0.11");
        let renamed = page.replace("num_requests_waiting", "requests_waiting");
        assert_eq!(lacks(&renamed), "num_requests_waiting");
        for none in ["NaN", "+Inf", "-1"] {
            let page = page.replace("num_requests_running{engine=\"0\"} 2", &format!("num_requests_running {none}"));
            assert_eq!((MetricsSnapshot::parse(&page).running, lacks(&page)), (0.0, "num_requests_running".to_owned()));
        }
    }

    #[test]
    fn an_abort_in_a_hung_engine_is_no_progress() {
        let at = |aborts| {
            format!(
                "vllm:generation_tokens_total 5\nvllm:request_success_total{{finished_reason=\"abort\"}} {aborts}\n"
            )
        };
        assert_eq!(MetricsSnapshot::parse(&at(1)).progress(), MetricsSnapshot::parse(&at(7)).progress());
    }

    proptest! {
        #[test]
        fn no_page_makes_it_panic(page in "(vllm[:_])?[a-z_]{0,12}[{\"=\\\\},a-z]{0,20}[ 0-9.eN]{0,8}\n?.{0,40}") {
            MetricsSnapshot::parse(&page);
        }
    }
}
