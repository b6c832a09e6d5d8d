//! Read access to a [`Tuner`]: reports for operators, and events about ended windows.
//!
//! Nothing here affects the next decision.

use std::time::Duration;

use super::Tuner;
use super::groups::Group;
use super::report::{BlockedReport, EngineTuningReport, GroupReport, LimitReport, ProposalReport, TunerReport};
use crate::event::{Event, EventKind, Proposal};
use crate::limits::Knob;
use crate::observe::diagnosis::diagnose;

impl Tuner {
    pub(crate) fn observed(&self, group: &Group, now: Duration) -> Event {
        let (score, belief) = group.controller.belief();
        let mut why = format!("{belief}; loss {:.3}, {:.2} requests/s", score.loss, score.rate);
        for found in diagnose(group.controller.experience(), &self.facts(group)) {
            why += &format!("; {}", found.evidence);
        }
        let key = format!("pool.{}", group.controller.names().join(","));
        Event { at: now.as_secs_f64(), kind: EventKind::Observed, key, values: Default::default(), why }
    }

    /// The report for operators; the caller adds events.
    pub fn report(&self) -> TunerReport {
        let several = self.groups.len() > 1;
        TunerReport {
            mode: self.mode.word().to_owned(),
            engines: self.report_of_engines(),
            frozen: self.frozen.clone().or_else(|| self.hindrance.map(str::to_owned)),
            groups: (1..).zip(&self.groups).map(|(number, group)| self.report_of(number, several, group)).collect(),
            events: Vec::new(),
        }
    }

    fn report_of_engines(&self) -> EngineTuningReport {
        let engines = &self.engines;
        let shown = |(proposal, is_approved): (&Proposal, bool)| {
            ProposalReport::new(format!("e{}", proposal.id), proposal, is_approved)
        };
        EngineTuningReport {
            doing: engines.doing(),
            why: engines.belief().to_owned(),
            proposal: engines.proposals.shown().map(shown),
            changes: engines.measured().to_vec(),
        }
    }

    pub(crate) fn resets(&self, now: Duration) -> Vec<Event> {
        let limits = self.report().groups.into_iter().flat_map(|group| group.limits);
        let event = |LimitReport { key, configured, in_force }| Event {
            at: now.as_secs_f64(),
            kind: EventKind::Reset,
            key,
            values: (in_force, configured),
            why: "by an operator: as it is configured".to_owned(),
        };
        limits.map(event).collect()
    }

    fn report_of(&self, number: usize, several: bool, group: &Group) -> GroupReport {
        let Group { pools, controller, .. } = group;
        let (score, why) = controller.belief();
        let why = if group.has_objectives {
            why
        } else {
            "there are no objectives to tune by: set ttft, tpot or e2el in [slo]"
        };
        let mut limits = Vec::new();
        let all = self.limits();
        for (place, at) in pools.iter().enumerate() {
            let in_force = &all.0[*at];
            for knob in Knob::ALL {
                let (configured, now) = (self.configured.0[*at].show(knob), in_force.show(knob));
                if configured != now {
                    let key = format!("pool.{}.{}", controller.names()[place], knob.key());
                    limits.push(LimitReport { key, configured, in_force: now });
                }
            }
        }
        let id = |proposal: &Proposal| {
            if several { format!("{number}.{}", proposal.id) } else { proposal.id.to_string() }
        };
        let shown = |(proposal, is_approved)| ProposalReport::new(id(proposal), proposal, is_approved);
        let blocked = controller.blocked().into_iter();
        let blocked = blocked.map(|(key, up, why, left)| BlockedReport { key, up, why, left }).collect();
        GroupReport {
            pools: controller.names().to_vec(),
            doing: controller.doing(),
            why: why.to_owned(),
            attainment: (score.requests > 0.0).then_some(score.attainment),
            target: controller.target(),
            limits,
            proposal: controller.proposals.shown().map(shown),
            blocked,
            diagnoses: diagnose(controller.experience(), &self.facts(group)),
        }
    }
}
