//! Compares the data-parallel ranks of an engine with the ranks of the configuration.
//!
//! The engine's metrics page names its ranks. A backend with a rank that the engine does not have
//! counts as down, with the reason. Ranks without a backend get no requests and are logged once. An
//! engine without metrics names no ranks, so only a refused request shows a missing rank.

use sluice_config::Address;

/// The ranks of one backend's engine, as last read.
#[derive(Debug, Default)]
pub(super) struct ProbedRanks {
    /// Why the backend cannot be used.
    missing: Option<String>,
    /// The last remark, so that it is logged once.
    remark: Option<String>,
}

impl ProbedRanks {
    /// Why the backend cannot be used, if the engine does not have the backend's rank.
    pub(super) fn missing(&self) -> Option<&String> {
        self.missing.as_ref()
    }

    /// Notes the ranks on a page, in order; none: the page names none. `configured`: the ranks of
    /// this server that backends have.
    pub(super) fn note(&mut self, backend: &str, address: &Address, ranks: &[u16], configured: &[u16]) {
        let Some(last) = ranks.last() else { return };
        self.missing = address.rank.filter(|rank| !ranks.contains(rank)).map(|rank| {
            format!(
                "the engine has the data-parallel ranks 0 to {last}, and this backend is rank {rank}: lower `ranks`, or \
                 start the engine with --data-parallel-size {}",
                u32::from(rank) + 1
            )
        });
        let unused = ranks.iter().filter(|rank| !configured.contains(rank)).count();
        let remark = match address.rank {
            None if ranks.len() > 1 => Some(format!(
                "the engine has {0} data-parallel ranks and counts as one backend: with ranks = {0}, each has its own \
                 limits and expected prefixes",
                ranks.len()
            )),
            Some(rank) if configured.first() == Some(&rank) && unused > 0 => Some(format!(
                "{unused} of {} data-parallel ranks of the engine get no requests: raise `ranks`",
                ranks.len()
            )),
            _ => None,
        };
        if self.remark == remark {
            return;
        }
        match (&remark, address.rank) {
            (Some(text), None) => tracing::info!(backend, "{text}"),
            (Some(text), Some(_)) => tracing::warn!(backend, "{text}"),
            (None, _) => {}
        }
        self.remark = remark;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_config::Endpoint;

    fn address(rank: Option<u16>) -> Address {
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: 1, prefix: String::new() };
        Address { rank, ..Address::new(endpoint, None, None) }
    }

    #[test]
    fn a_rank_that_the_engine_does_not_have_is_missing_until_it_comes() {
        let mut probed = ProbedRanks::default();
        probed.note("b", &address(Some(2)), &[0, 1], &[0, 1, 2]);
        let why = probed.missing().unwrap().clone();
        assert!(why.contains("ranks 0 to 1, and this backend is rank 2") && why.contains("size 3"), "{why}");
        probed.note("b", &address(Some(2)), &[], &[0, 1, 2]);
        assert!(probed.missing().is_some(), "a page without ranks changes nothing");
        probed.note("b", &address(Some(2)), &[0, 1, 2], &[0, 1, 2]);
        assert!(probed.missing().is_none() && probed.remark.is_none());
    }

    #[test]
    fn ranks_without_requests_are_remarked_by_one_backend() {
        let remark = |rank, ranks: &[u16], configured: &[u16]| {
            let mut probed = ProbedRanks::default();
            probed.note("b", &address(rank), ranks, configured);
            assert!(probed.missing().is_none());
            probed.remark
        };
        assert!(remark(None, &[0, 1, 2, 3], &[]).unwrap().contains("with ranks = 4"));
        assert_eq!(remark(None, &[0], &[]), None);
        assert!(remark(Some(0), &[0, 1, 2], &[0, 1]).unwrap().contains("1 of 3 data-parallel ranks"));
        assert_eq!(remark(Some(1), &[0, 1, 2], &[0, 1]), None);
        assert_eq!(remark(Some(0), &[0, 1], &[0, 1]), None);
    }
}
