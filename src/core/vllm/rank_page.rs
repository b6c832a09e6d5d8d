//! One rank's part of the metrics page of a server with several data-parallel ranks.
//!
//! vLLM shows the rank in the label `engine`. Lines without the label are about the whole server.
//! Counters of a rank are on the page from the start, gauges from the first request on. Bound:
//! [`MAX_RANKS`] ranks of a page are distinguished.

use std::collections::BTreeSet;

use super::metrics::{label, sample};

/// The most ranks of a server.
pub const MAX_RANKS: usize = 256;

/// The lines of a page that are about this data-parallel rank, which the label `engine` names, or
/// about the whole server.
pub fn of_rank(page: &str, rank: u16) -> String {
    let wanted = rank.to_string();
    let is_own = |line: &&str| engine(line).is_none_or(|engine| engine == wanted);
    page.lines().filter(is_own).flat_map(|line| [line, "\n"]).collect()
}

/// The ranks on a page in ascending order; none if no line has the label `engine`.
pub fn ranks(page: &str) -> Vec<u16> {
    let mut found = BTreeSet::new();
    for rank in page.lines().filter_map(engine).filter_map(|engine| engine.parse().ok()) {
        if found.len() < MAX_RANKS {
            found.insert(rank);
        }
    }
    found.into_iter().collect()
}

fn engine(line: &str) -> Option<&str> {
    let (_, labels, _) = sample(line)?;
    label(labels, "engine")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::metrics::MetricsSnapshot;

    #[test]
    fn a_rank_has_its_own_lines_and_the_lines_about_no_engine() {
        let page = "# HELP vllm:x y\nvllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"11\"} 5\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 7\nvllm:num_preemptions_total 2\n";
        let of = |rank| MetricsSnapshot::parse(&of_rank(page, rank));
        assert_eq!([0, 1, 11, 2].map(|rank| of(rank).running), [3.0, 7.0, 5.0, 0.0]);
        assert_eq!((of(1).preemptions, MetricsSnapshot::parse(page).running), (2.0, 15.0));
        assert_eq!((ranks(page), ranks("vllm:num_preemptions_total 2\n")), (vec![0, 1, 11], vec![]));
    }
}
