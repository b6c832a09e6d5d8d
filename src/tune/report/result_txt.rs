//! A tuning as the `result.txt` of vLLM's `auto_tune.sh`, for programs that read it.
//!
//! One line for each tried setting of the two dimensions, then the best. A flag that is left alone
//! is `default`. In the last line both flags are, if the defaults are as good. A bracketed rate was
//! not run, so E2EL is `unknown`. Throughput and goodput are the rate at which the objectives hold.
//! Without a best setting, the values are 0 as in the script.

use crate::goal::Goal;
use crate::report::answer;
use crate::search::best;
use crate::setting::Setting;
use crate::trial::{Outcome, Trial};
use crate::tuner::Report;

const SEQS: &str = "vllm.max-num-seqs";
const TOKENS: &str = "vllm.max-num-batched-tokens";

/// The file's text.
pub fn text(report: &Report, goal: &Goal) -> String {
    let mut text = String::from("hash:unknown\n");
    let of_grid =
        |trial: &&Trial| trial.is_search() && trial.setting.contains_key(SEQS) && trial.setting.contains_key(TOKENS);
    for trial in report.trials.iter().filter(of_grid) {
        let (seqs, tokens) = (value(&trial.setting, SEQS), value(&trial.setting, TOKENS));
        let head = format!("max_num_seqs: {seqs}, max_num_batched_tokens: {tokens}");
        text += &match &trial.outcome {
            Outcome::Measured { value, certified, .. } => {
                let rate = certified.map_or(value.value, |certified| certified.rate);
                let value = value.value;
                format!("{head}, request_rate: {rate}, e2el: unknown, throughput: {value}, goodput: {value}\n")
            }
            Outcome::Starts => continue,
            _ => format!("{head} does not meet latency requirement\n"),
        };
    }
    let (mut seqs, mut tokens, mut throughput) = ("0".to_owned(), "0".to_owned(), 0.0);
    let keep = answer::advised(report, goal).is_some_and(|setting| setting.is_empty());
    let winner = report.default.as_ref().filter(|_| keep).or(report.winner.as_ref());
    let winner = winner.or_else(|| best(&report.trials, goal));
    if let Some((winner, found)) = winner.and_then(|winner| Some((winner, winner.value()?))) {
        (seqs, tokens, throughput) = (value(&winner.setting, SEQS), value(&winner.setting, TOKENS), found);
    }
    text + &format!(
        "best_max_num_seqs: {seqs}, best_num_batched_tokens: {tokens}, best_throughput: {throughput}, profile saved in: none\n"
    )
}

fn value(setting: &Setting, key: &str) -> String {
    setting.get(key).map_or_else(|| "default".to_owned(), ToString::to_string)
}
