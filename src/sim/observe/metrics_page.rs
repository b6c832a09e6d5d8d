//! `/metrics`: the numbers of [`crate::observe::stats`] under the names, labels and order of a
//! version of vLLM.
//!
//! | versions | difference |
//! |---|---|
//! | 0.6 | `model_name`; `gpu_cache_usage_perc`, `time_per_output_token_seconds`, throughput |
//! | 0.7-0.8 | label `engine`; `gpu_prefix_cache_*` count blocks |
//! | 0.9-0.10 | `kv_cache_usage_perc` and `prefix_cache_*` in addition to the old names |
//! | 0.11 | `inter_token_latency_seconds`, `request_time_per_output_token_seconds`; no `gpu_*` |
//! | 0.12-0.15 | `time_per_output_token_seconds` is hidden |
//! | 0.16- | only new names |
//!
//! `--show-hidden-metrics-for-version` shows hidden names. Names, labels and order are vLLM's; the
//! help texts are not.

use crate::engine::DraftStats;
use std::fmt::{self, Write};

use crate::observe::stats::{Cumulative, Gauges, Histogram, REASONS, Stats};
use sluice_core::vllm::version::Version;

/// Values on the page that are not in [`Stats`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) version: Version,
    pub(crate) model: &'a str,
    /// The data-parallel rank.
    pub(crate) rank: usize,
    /// Number of blocks, including the null block.
    pub(crate) blocks: u32,
    /// 0 if LoRA is off.
    pub(crate) max_loras: u32,
    pub(crate) max_model_len: u32,
    pub(crate) started: f64,
    pub(crate) prefix_caching: bool,
    pub(crate) utilisation: f64,
    pub(crate) cache_dtype: &'a str,
    pub(crate) show_hidden: bool,
}

const BLOCK: u64 = 16;

struct Page<'a> {
    out: String,
    facts: Facts<'a>,
    labels: String,
    version: Version,
}

/// The page of one data-parallel rank.
pub(crate) fn engine(stats: &Stats, facts: Facts<'_>) -> String {
    let model = format!("model_name={}", serde_json::json!(facts.model));
    let labels = if facts.version.since(7) { format!("engine=\"{}\",{model}", facts.rank) } else { model };
    let mut page = Page { out: String::with_capacity(64 * 1024), facts, labels, version: facts.version };
    page.gauges(stats);
    page.counters(stats);
    page.histograms(stats);
    page.information(stats);
    page.out
}

/// The page of a server, from the pages of the data-parallel ranks: each family once, with the rows
/// of all ranks in order. A row that several ranks have in common is shown once.
pub(crate) fn merged(pages: &[String]) -> String {
    const FAMILY: &str = "# HELP ";
    let [first, others @ ..] = pages else { return String::new() };
    let families = |page: &str| {
        page.split_inclusive('\n').fold(Vec::<String>::new(), |mut families, line| {
            match families.last_mut().filter(|_| !line.starts_with(FAMILY)) {
                Some(family) => family.push_str(line),
                None => families.push(line.to_owned()),
            }
            families
        })
    };
    let mut all = families(first);
    for page in others {
        for (family, own) in all.iter_mut().zip(families(page)) {
            for row in own.split_inclusive('\n').filter(|row| !row.starts_with('#')) {
                let labels = row.rsplit_once(' ').map_or(row, |(labels, _)| labels);
                if labels.contains("engine=\"") || !family.contains(labels) {
                    family.push_str(row);
                }
            }
        }
    }
    all.concat()
}

/// Prints a float as Prometheus' Python client does: whole numbers with `.0`, large numbers with an
/// exponent.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            _ if self.0.is_infinite() => f.write_str("+Inf"),
            x if x.abs() >= 1e6 => {
                // 1795259126.99 -> 1.79525912699e+09
                let text = format!("{x:e}");
                let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
                let point = if digits.contains('.') { "" } else { ".0" };
                write!(f, "{digits}{point}e+{exponent:0>2}")
            }
            x => write!(f, "{x:?}"),
        }
    }
}

impl Page<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
    }

    fn row(&mut self, name: &str, extra: &str, value: f64) {
        let labels = if extra.is_empty() { self.labels.clone() } else { sorted(&self.labels, extra) };
        let _ = writeln!(self.out, "vllm:{name}{{{labels}}} {}", Number(value));
    }

    fn gauge(&mut self, name: &str, help: &str, rows: &[(&str, f64)]) {
        self.head(name, "gauge", help);
        for (extra, value) in rows {
            self.row(name, extra, *value);
        }
    }

    fn counter(&mut self, name: &str, help: &str, rows: &[(&str, u64)]) {
        self.head(&format!("{name}_total"), "counter", help);
        for (extra, value) in rows {
            self.row(&format!("{name}_total"), extra, *value as f64);
        }
        self.head(&format!("{name}_created"), "gauge", help);
        for (extra, _) in rows {
            self.row(&format!("{name}_created"), extra, self.facts.started);
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram, largest: f64) {
        self.head(name, "histogram", help);
        let Cumulative { buckets, sum, count: total } = histogram.cumulative(largest);
        for (bound, count) in buckets.into_iter().chain([(f64::INFINITY, total)]) {
            self.row(&format!("{name}_bucket"), &format!("le=\"{}\"", Number(bound)), count as f64);
        }
        self.row(&format!("{name}_count"), "", total as f64);
        self.row(&format!("{name}_sum"), "", sum);
        self.head(&format!("{name}_created"), "gauge", help);
        self.row(&format!("{name}_created"), "", self.facts.started);
    }

    /// Whether the page has a name that vLLM hid in minor version `hidden` and removed in `gone`.
    fn old(&self, hidden: u16, gone: u16) -> bool {
        !self.version.since(hidden) || (self.facts.show_hidden && !self.version.since(gone))
    }

    fn gauges(&mut self, stats: &Stats) {
        let since = |minor| self.version.since(minor);
        let Gauges { running, waiting, deferred, kv_usage } = stats.gauges;
        if since(16) {
            for (name, what) in
                [("flops", "operations"), ("read_bytes", "bytes read"), ("write_bytes", "bytes written")]
            {
                let help = format!("Estimated {what} per GPU; 0 unless --enable-mfu-metrics.");
                self.counter(&format!("estimated_{name}_per_gpu"), &help, &[("", 0)]);
            }
        }
        self.gauge("num_requests_running", "Requests in the running list.", &[("", running as f64)]);
        if !self.version.since(9) {
            self.gauge("num_requests_swapped", "Requests swapped to the host.", &[("", 0.0)]);
        }
        self.gauge("num_requests_waiting", "Requests that wait.", &[("", (waiting + deferred) as f64)]);
        if self.version.since(20) {
            self.gauge(
                "num_requests_waiting_by_reason",
                "Requests that wait for capacity, or for something that passes (an adapter slot).",
                &[("reason=\"capacity\"", waiting as f64), ("reason=\"deferred\"", deferred as f64)],
            );
        }
        if self.version.since(11) {
            let state = |level| f64::from(u8::from(stats.sleep == level));
            self.gauge(
                "engine_sleep_state",
                "Whether the engine is awake, or how deep it sleeps.",
                &[
                    ("sleep_state=\"awake\"", state(None)),
                    ("sleep_state=\"weights_offloaded\"", state(Some(1))),
                    ("sleep_state=\"discard_all\"", state(Some(2))),
                ],
            );
        }
        let help = "Share of KV blocks in use, 0 to 1.";
        if self.version.since(9) {
            self.gauge("kv_cache_usage_perc", help, &[("", kv_usage)]);
        }
        if self.old(11, 12) {
            self.gauge("gpu_cache_usage_perc", help, &[("", kv_usage)]);
        }
        if !self.version.since(9) {
            self.gauge("cpu_cache_usage_perc", "Share of host blocks in use.", &[("", 0.0)]);
        }
        if !self.version.since(7) {
            let (queries, hits) = stats.prefix;
            let rate = if queries == 0 { -1.0 } else { hits as f64 / queries as f64 };
            self.gauge("gpu_prefix_cache_hit_rate", "Hit rate of the prefix cache.", &[("", rate)]);
            self.gauge("avg_prompt_throughput_toks_per_s", "Prompt tokens per second.", &[("", 0.0)]);
            self.gauge("avg_generation_throughput_toks_per_s", "Generated tokens per second.", &[("", 0.0)]);
        }
    }

    fn counters(&mut self, stats: &Stats) {
        let (queries, hits) = stats.prefix;
        if self.version.since(9) {
            self.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", &[("", queries)]);
            self.counter("prefix_cache_hits", "Tokens found in the prefix cache.", &[("", hits)]);
        }
        if self.version.since(7) && self.old(11, 12) {
            let per = if self.version.since(9) { 1 } else { BLOCK };
            self.counter("gpu_prefix_cache_queries", "Lookups in the prefix cache.", &[("", queries / per)]);
            self.counter("gpu_prefix_cache_hits", "Hits in the prefix cache.", &[("", hits / per)]);
        }
        if self.version.since(16) {
            self.counter("external_prefix_cache_queries", "Tokens asked of other instances.", &[("", 0)]);
            self.counter("external_prefix_cache_hits", "Tokens got from other instances.", &[("", 0)]);
            self.counter("mm_cache_queries", "Media looked up.", &[("", 0)]);
            self.counter("mm_cache_hits", "Media found.", &[("", 0)]);
        }
        if let Some(DraftStats { drafts, tokens, accepted }) = &stats.drafts {
            self.counter("spec_decode_num_drafts", "Number of spec decoding drafts.", &[("", *drafts)]);
            self.counter("spec_decode_num_draft_tokens", "Number of draft tokens.", &[("", *tokens)]);
            let sum = accepted.iter().sum();
            self.counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.", &[("", sum)]);
            let labels: Vec<String> = (0..accepted.len()).map(|position| format!("position=\"{position}\"")).collect();
            let rows: Vec<(&str, u64)> = labels.iter().map(String::as_str).zip(accepted.iter().copied()).collect();
            self.counter("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", &rows);
        }
        self.counter("num_preemptions", "Preemptions.", &[("", stats.preemptions)]);
        self.counter(
            "prompt_tokens",
            "Prompt tokens of requests that got their first token.",
            &[("", stats.prompt_tokens)],
        );
        let cached = stats.cached_tokens;
        if self.version.since(20) {
            self.counter(
                "prompt_tokens_by_source",
                "Prompt tokens by where they came from.",
                &[
                    ("source=\"local_compute\"", stats.prompt_tokens - cached),
                    ("source=\"local_cache_hit\"", cached),
                    ("source=\"external_kv_transfer\"", 0),
                ],
            );
            self.counter("prompt_tokens_cached", "Prompt tokens that were cached.", &[("", cached)]);
        }
        if self.version.since(30) {
            self.counter(
                "prompt_tokens_cached_by_source",
                "Cached prompt tokens by tier.",
                &[
                    ("source=\"device\"", cached),
                    ("source=\"host\"", 0),
                    ("source=\"p2p\"", 0),
                    ("source=\"disk\"", 0),
                    ("source=\"external_unspecified\"", 0),
                ],
            );
        }
        self.counter("generation_tokens", "Generated tokens.", &[("", stats.generation_tokens)]);
        let known = if self.version.since(25) { REASONS.len() } else { 3 };
        let reasons: Vec<String> = REASONS.iter().map(|reason| format!("finished_reason=\"{reason}\"")).collect();
        let rows: Vec<(&str, u64)> = reasons.iter().map(String::as_str).zip(stats.ended).take(known).collect();
        self.counter("request_success", "Requests that ended, by how.", &rows);
        if self.version.since(32) {
            let labels =
                std::mem::replace(&mut self.labels, format!("model_name={}", serde_json::json!(self.facts.model)));
            self.counter(
                "admission_rejections",
                "Requests refused by a queue limit.",
                &[
                    ("reason=\"max_num_queued_reqs\"", stats.rejections[0]),
                    ("reason=\"max_num_queued_tokens\"", stats.rejections[1]),
                ],
            );
            self.labels = labels;
        }
    }

    fn histograms(&mut self, stats: &Stats) {
        let longest = f64::from(self.facts.max_model_len);
        let all = f64::INFINITY;
        // In V0 the buckets end earlier.
        let (ttft, itl, e2e) = if self.version.since(7) { (all, all, all) } else { (10.0, 2.5, 60.0) };
        let since = |minor| self.version.since(minor);
        let old_itl = self.old(12, 16);
        let families: [(&str, &str, &Histogram, f64, bool); 17] = [
            ("request_prompt_tokens", "Prompt tokens per request.", &stats.prompts, longest, true),
            ("request_generation_tokens", "Generated tokens per request.", &stats.generations, longest, true),
            ("iteration_tokens_total", "Tokens per engine step.", &stats.iteration, all, since(7)),
            (
                "request_max_num_generation_tokens",
                "Most tokens generated by a choice.",
                &stats.generations,
                longest,
                since(8),
            ),
            ("request_params_n", "Choices asked for.", &stats.choices, all, true),
            ("request_params_max_tokens", "Limits asked for.", &stats.limits, longest, since(7)),
            ("time_to_first_token_seconds", "Time to first token.", &stats.ttft, ttft, true),
            ("inter_token_latency_seconds", "Time between outputs.", &stats.itl, all, since(11)),
            ("time_per_output_token_seconds", "Time between outputs.", &stats.itl, itl, old_itl),
            (
                "request_time_per_output_token_seconds",
                "Decode time per token, per request.",
                &stats.tpot,
                all,
                since(11),
            ),
            ("e2e_request_latency_seconds", "Time from arrival to end.", &stats.e2e, e2e, true),
            ("request_queue_time_seconds", "Time until first scheduled.", &stats.queue, all, since(7)),
            ("request_inference_time_seconds", "Time from first scheduled to end.", &stats.inference, all, since(7)),
            (
                "request_prefill_time_seconds",
                "Time from first scheduled to first token.",
                &stats.prefill,
                all,
                since(7),
            ),
            ("request_decode_time_seconds", "Time from first to last token.", &stats.decode, all, since(7)),
            ("request_num_preemptions", "Preemptions per request.", &stats.preempted, all, since(30)),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens computed per request.",
                &stats.computed,
                longest,
                since(20),
            ),
        ];
        for (name, help, histogram, largest, shown) in families {
            if shown {
                self.histogram(name, help, histogram, largest);
            }
        }
    }

    fn information(&mut self, stats: &Stats) {
        if self.facts.max_loras > 0 {
            self.head("lora_requests_info", "gauge", "Adapters that run and wait; the latest sample counts.");
            let most = self.facts.max_loras;
            // vLLM writes all names into both labels.
            for (names, seen) in &stats.adapters {
                let _ = writeln!(
                    self.out,
                    "vllm:lora_requests_info{{max_lora=\"{most}\",running_lora_adapters=\"{names}\",\
                     waiting_lora_adapters=\"{names}\"}} {}",
                    Number(*seen)
                );
            }
        }
        if !self.version.since(7) {
            return;
        }
        let Facts { rank, blocks, prefix_caching, utilisation, cache_dtype, max_model_len, .. } = self.facts;
        let tokens = u64::from(blocks) * BLOCK;
        let caching = if prefix_caching { "True" } else { "False" };
        let parallel = Number((tokens as f64 / f64::from(max_model_len) * 100.0).round() / 100.0);
        // A new field in 0.33.
        let added = if self.version.since(33) { "simple_cpu_offload_num_blocks=\"None\"," } else { "" };
        self.head("cache_config_info", "gauge", "Settings of the KV cache.");
        let _ = writeln!(
            self.out,
            "vllm:cache_config_info{{_block_size_resolved=\"True\",block_size=\"{BLOCK}\",cache_dtype=\"{cache_dtype}\",\
             cache_hit_alignment_tokens=\"None\",effective_attention_block_size=\"{BLOCK}\",\
             enable_mamba_shared_prefix_checkpoint=\"False\",enable_prefix_caching=\"{caching}\",engine=\"{rank}\",\
             gpu_memory_utilization=\"{utilisation}\",hash_block_size=\"None\",is_attention_free=\"False\",\
             kv_cache_dtype_skip_layers=\"[]\",kv_cache_layout=\"None\",kv_cache_max_concurrency=\"{parallel}\",\
             kv_cache_memory_bytes=\"None\",kv_cache_size_tokens=\"{tokens}\",kv_offloading_backend=\"native\",\
             kv_offloading_size=\"None\",kv_sharing_fast_prefill=\"False\",mamba_block_size=\"None\",\
             mamba_cache_dtype=\"auto\",mamba_cache_mode=\"none\",mamba_page_size_padded=\"None\",\
             mamba_ssm_cache_dtype=\"auto\",num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\",\
             num_gpu_blocks_override=\"None\",prefix_cache_retention_interval=\"0\",prefix_caching_hash_algo=\"sha256\",\
             prefix_match_unit=\"None\",replayssm_buffer_len=\"16\",{added}skip_page_size_padded=\"None\",sliding_window=\"None\",\
             swa_bounded_replay=\"True\",use_kda_recoverssm=\"False\",use_replayssm=\"False\",\
             user_specified_block_size=\"False\"}} 1.0"
        );
    }
}

/// Both label lists in the order of the labels' names, as the Python client writes them.
fn sorted(labels: &str, extra: &str) -> String {
    let name = |label: &str| label.split('=').next().unwrap_or_default().to_owned();
    // Served names may contain commas. Only the last label, `model_name`, is free text, so the text
    // is split in front of it.
    let mut all: Vec<&str> = match labels.split_once(",model_name=") {
        Some((engine, _)) => vec![engine, &labels[engine.len() + 1..], extra],
        None => vec![labels, extra],
    };
    all.sort_by_key(|label| name(label));
    all.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(version: Version, show_hidden: bool) -> Facts<'static> {
        Facts {
            version,
            model: "m",
            rank: 0,
            blocks: 1000,
            max_loras: 0,
            max_model_len: 8192,
            started: 1.795_259_126_99e9,
            prefix_caching: true,
            utilisation: 0.92,
            cache_dtype: "auto",
            show_hidden,
        }
    }

    fn page(version: Version, show_hidden: bool) -> String {
        engine(&Stats::default(), facts(version, show_hidden))
    }

    #[test]
    fn labels_are_sorted_and_numbers_are_pythons() {
        let page = page(Version::COMPARED, false);
        assert!(
            page.contains("vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"0.001\",model_name=\"m\"} 0.0\n")
        );
        assert!(
            page.contains("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"m\"} 0.0\n")
        );
        assert!(page.contains("vllm:num_preemptions_created{engine=\"0\",model_name=\"m\"} 1.79525912699e+09\n"));
        assert!(page.contains(
            ",kv_cache_max_concurrency=\"1.95\",kv_cache_memory_bytes=\"None\",kv_cache_size_tokens=\"16000\","
        ));
        assert!(page.contains("le=\"5000.0\"") && !page.contains("le=\"10000.0\""));
    }

    #[test]
    fn the_ranks_share_families_and_have_their_own_rows() {
        let of = |rank| {
            let facts = Facts { rank, ..facts(Version::COMPARED, false) };
            engine(&Stats { preemptions: rank as u64, ..Stats::default() }, facts)
        };
        let page = merged(&[of(0), of(1)]);
        assert!(page.contains(
            "# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{engine=\"0\",model_name=\"m\"} 0.0\n\
             vllm:num_preemptions_total{engine=\"1\",model_name=\"m\"} 1.0\n# HELP vllm:num_preemptions_created "
        ));
        assert_eq!(page.matches("vllm:admission_rejections_total{").count(), 2, "the API server counts these");
        assert_eq!(page.matches("vllm:cache_config_info{").count(), 2);
        assert_eq!(merged(&[of(0)]), of(0));
    }

    #[test]
    fn each_version_has_its_names() {
        let has = |version: (u16, u16), name: &str| {
            page(Version::new(0, version.0, version.1), false).contains(&format!("\nvllm:{name}{{"))
        };
        for (name, versions) in [
            ("gpu_cache_usage_perc", [true, true, true, false, false]),
            ("kv_cache_usage_perc", [false, false, true, true, true]),
            ("time_per_output_token_seconds_count", [true, true, true, true, false]),
            ("inter_token_latency_seconds_count", [false, false, false, true, true]),
            ("prefix_cache_hits_total", [false, false, true, true, true]),
            ("admission_rejections_total", [false, false, false, false, true]),
            ("avg_prompt_throughput_toks_per_s", [true, false, false, false, false]),
        ] {
            assert_eq!([(6, 3), (8, 5), (10, 0), (11, 0), (32, 0)].map(|v| has(v, name)), versions, "{name}");
        }
        assert!(page(Version::new(0, 13, 0), true).contains("vllm:time_per_output_token_seconds_count"));
        assert!(!page(Version::new(0, 16, 0), true).contains("vllm:time_per_output_token_seconds_count"));
        assert!(page(Version::new(0, 6, 3), false).contains("vllm:num_requests_running{model_name=\"m\"}"));
    }
}
