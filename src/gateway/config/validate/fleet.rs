//! Reads `[fleet]`.
//!
//! The folder is not looked at here: whether it can be written shows when the first engine is to be started, and a check on
//! another machine must not fail for it.

use std::ops::RangeInclusive;

use super::super::problem::Situation;
use super::super::{Fleet, defaults};
use super::section::{Report, Section};
use super::server::{duration, duration_or_zero};
use super::text::path_in;
use sluice_core::base::Period;

pub(super) fn fleet(root: &mut Section<'_>, report: &mut Report<'_>) -> Fleet {
    let mut at = root.section_or_empty("fleet", report);
    let state: String = at.value("state", defaults::FLEET_STATE.to_owned(), report);
    if state.is_empty() {
        report.add(&at.place_of("state"), Situation::NameEmpty);
    }
    let fleet = Fleet {
        state: path_in(&report.around.folder, &state),
        ports: ports(&mut at, report),
        on_start: at.value("on_start", defaults::FLEET_ON_START, report),
        on_exit: at.value("on_exit", defaults::FLEET_ON_EXIT, report),
        drain: duration(&mut at, "drain", defaults::FLEET_DRAIN, report),
        grace: duration(&mut at, "grace", defaults::FLEET_GRACE, report),
        start_timeout_scale: at.within(
            "start_timeout_scale",
            defaults::FLEET_START_TIMEOUT_SCALE,
            0.001..=1_000.0,
            report,
        ),
        warm_up: at.within("warm_up", defaults::FLEET_WARM_UP, 0..=defaults::MAX_FLEET_WARM_UP, report),
        ramp: duration_or_zero(&mut at, "ramp", defaults::FLEET_RAMP, report),
        settle: duration(&mut at, "settle", defaults::FLEET_SETTLE, report),
        restarts: at.within("restarts", defaults::FLEET_RESTARTS, 0..=defaults::MAX_FLEET_RESTARTS, report),
        restart_window: duration(&mut at, "restart_window", defaults::FLEET_RESTART_WINDOW, report),
        backoff: duration(&mut at, "backoff", defaults::FLEET_BACKOFF, report),
        backoff_max: duration(&mut at, "backoff_max", defaults::FLEET_BACKOFF_MAX, report),
        headroom: at.within("headroom", defaults::FLEET_HEADROOM, 0.01..=1.0, report),
    };
    if fleet.backoff > fleet.backoff_max {
        let (base, max) = (Period(fleet.backoff).to_string(), Period(fleet.backoff_max).to_string());
        report.add(&at.place_of("backoff"), Situation::EjectionOrder { base, max });
    }
    at.finish(report);
    fleet
}

/// Two ports with a dash between.
fn ports(at: &mut Section<'_>, report: &mut Report<'_>) -> RangeInclusive<u16> {
    let place = at.place_of("ports");
    let Some(text) = at.optional::<String>("ports", report) else { return defaults::FLEET_PORTS };
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
    let range = text.split_once('-').and_then(|(first, last)| Some(port(first)?..=port(last)?));
    range.filter(|range| !range.is_empty()).unwrap_or_else(|| {
        let reason = format!("'{text}' is not a range of ports; write the first and the last, such as \"8100-8999\"");
        report.add(&place, Situation::Unit { reason });
        defaults::FLEET_PORTS
    })
}
