//! Groups of requests that are judged separately: in each class, the base model and each adapter
//! that is not rare.
//!
//! So the search does not sacrifice a small class or adapter. Adapters with fewer than [`RARE`] of
//! the requests form one group with the base model, because judging each of them would take too
//! many requests. Groups are numbered class by class, beginning with the base model.

use super::judge::Judge;
use crate::load::workload::Workload;
use crate::result::record::{ClassConfig, Record, Slo};
use crate::run::progress::InFlight;

/// Smallest share of the requests at which an adapter is not rare.
pub const RARE: f64 = 0.05;

/// The objectives and groups of requests.
#[derive(Clone, Debug)]
pub struct Groups {
    slos: Vec<Slo>,
    /// Names of the groups, class by class; empty if there is one group.
    names: Vec<String>,
    adapters: Vec<usize>,
}

impl Groups {
    /// One group. `slos`: the objectives of each class.
    pub fn one(slos: Vec<Slo>) -> Self {
        Self { slos, names: Vec::new(), adapters: Vec::new() }
    }

    /// A group for each class and each adapter that is not rare. `shares`: the share of the
    /// requests of each adapter.
    pub fn each(classes: &[ClassConfig], adapters: &[String], shares: &[f64]) -> Self {
        let mut kinds = vec![String::new()];
        let mut group = |place: usize, name: &String| {
            if shares.get(place).is_none_or(|share| *share < RARE) {
                return 0;
            }
            kinds.push(name.clone());
            kinds.len() - 1
        };
        let adapters = adapters.iter().enumerate().map(|(place, name)| group(place, name)).collect();
        let name = |class: &ClassConfig, adapter: &String| match adapter.as_str() {
            "" => class.name.clone(),
            adapter => format!("{} {adapter}", class.name),
        };
        let names = classes.iter().flat_map(|class| kinds.iter().map(move |adapter| name(class, adapter))).collect();
        Self { slos: classes.iter().map(|class| class.slo).collect(), names, adapters }
    }

    /// The groups of a workload.
    pub fn of(workload: &Workload) -> Self {
        let adapters = &workload.adapters;
        Self::each(&workload.class_configs(), &adapters.names, &adapters.shares())
    }

    /// The name of a group; empty for the only group.
    pub fn name(&self, group: usize) -> &str {
        self.names.get(group).filter(|_| self.names.len() > 1).map_or("", String::as_str)
    }

    /// The objectives of a class.
    pub fn slo(&self, class: u32) -> Slo {
        self.slos.get(class as usize).or(self.slos.first()).copied().unwrap_or_default()
    }

    /// The shortest bound on E2EL, seconds; infinite without one.
    pub fn shortest(&self) -> f64 {
        self.slos.iter().filter_map(|slo| slo.e2el).fold(f64::INFINITY, f64::min) / 1e3
    }

    /// Records with `judge` a request that has ended.
    pub fn record(&self, judge: &mut Judge, record: &Record) {
        let ratio = record.slo_ratio(&self.slo(record.class));
        let due = record.due.unwrap_or(record.sent);
        judge.record_in(self.group(record.class, record.adapter), record.index as usize, due, ratio);
    }

    /// Records with `judge` a miss for a request in flight.
    pub fn miss(&self, judge: &mut Judge, request: &InFlight) {
        let group = self.group(request.class, request.adapter);
        judge.record_in(group, request.index as usize, request.due, f64::INFINITY);
    }

    /// Whether a request in flight exceeds the bound on E2EL at `now` by over `grace` seconds.
    pub fn is_overdue(&self, request: &InFlight, now: f64, grace: f64) -> bool {
        self.slo(request.class).e2el.is_some_and(|bound| now - request.due > bound / 1e3 + grace)
    }

    fn group(&self, class: u32, adapter: Option<u32>) -> usize {
        if self.names.is_empty() {
            return 0;
        }
        let of_class = self.names.len() / self.slos.len().max(1);
        let adapter = adapter.and_then(|adapter| self.adapters.get(adapter as usize)).copied();
        class as usize * of_class + adapter.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::{TrialKind, TrialRule};

    #[test]
    fn a_class_and_a_frequent_adapter_have_groups_of_their_own_and_a_rare_adapter_has_not() {
        let class = |name: &str| ClassConfig { name: name.to_owned(), ..ClassConfig::default() };
        let names = ["a", "rare", "b"].map(str::to_owned);
        let groups = Groups::each(&[class("short"), class("long")], &names, &[0.5, 0.01, 0.3]);
        let all: Vec<&str> = (0..6).map(|group| groups.name(group)).collect();
        assert_eq!(all, ["short", "short a", "short b", "long", "long a", "long b"]);
        assert_eq!([None, Some(0), Some(1), Some(2)].map(|adapter| groups.group(1, adapter)), [3, 4, 3, 5]);
        let one = Groups::one(vec![Slo::default(); 2]);
        assert_eq!((one.group(1, Some(0)), one.name(0)), (0, ""));
        assert_eq!(Groups::each(&[class("chat")], &[], &[]).name(0), "");
    }

    #[test]
    fn an_overdue_request_is_a_miss_of_its_group() {
        let slo = Slo { e2el: Some(1000.0), ..Slo::default() };
        let class = ClassConfig { name: "a".to_owned(), slo, ..ClassConfig::default() };
        let groups = Groups::each(&[class], &["x".to_owned()], &[0.5]);
        let rule = TrialRule { kind: TrialKind::Look, target: 0.5, warmup: 0, length: 10 };
        let mut judge = Judge::new(rule);
        let open = InFlight { index: 0, class: 0, adapter: Some(0), due: 1.0 };
        assert!(!groups.is_overdue(&open, 2.2, 0.25) && groups.is_overdue(&open, 2.3, 0.25));
        groups.miss(&mut judge, &open);
        assert_eq!((judge.hits_of(0), judge.hits_of(1)), (vec![], vec![false]));
        assert_eq!(groups.shortest(), 1.0);
    }
}
