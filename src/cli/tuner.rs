//! `sluice tuner show|approve|freeze|resume|reset`: the online tuner of a running gateway.
//!
//! Each subcommand is one or two calls of the admin API.
//!
//! Exit codes: 0 done; 1 refused or failed (the message says why, and the remedy); 2 wrong usage.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Subcommand;

use super::admin_command::{AdminPort, exit_code, with_client};
use super::terminal::print_to_stdout;
use sluice_admin::{AdminClient, AdminClientError, encode};
use sluice_online::engines::forecast::Realised;
use sluice_online::tuner::report::{BlockedReport, GroupReport, ProposalReport, TimedEvent, TunerReport};

/// The online tuner of a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct TunerArgs {
    #[command(flatten)]
    port: AdminPort,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Show the tuner's activity, the proposed changes with their reasons, and past changes
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Events to show, the latest first
        #[arg(long, default_value_t = 10, value_name = "N")]
        events: usize,
    },
    /// Approve a proposed change (tuner.mode = "approve")
    Approve {
        /// The number of the proposal
        id: String,
    },
    /// Stop all changes by the tuner; a change on trial is undone
    Freeze,
    /// Let a frozen tuner make changes again
    Resume,
    /// Put the limits of the configuration file in force again
    Reset,
}

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Client(#[from] AdminClientError),
    #[error("cannot write to stdout: {0}")]
    Output(std::io::Error),
}

/// Runs the command.
pub fn run(args: &TunerArgs) -> ExitCode {
    with_client(&args.port, async |client| exit_code(act(client, &args.command).await))
}

async fn act(client: &AdminClient, command: &Command) -> Result<(), Failed> {
    let (path, events) = match command {
        Command::Show { json, events } => {
            let report: TunerReport = client.get("/admin/tuner").await?;
            // This cannot fail, because all keys are strings.
            let as_json = || serde_json::to_string(&report).unwrap_or_default();
            return print(&if *json { as_json() } else { text(&report, *events) });
        }
        Command::Approve { id } => (format!("/admin/tuner/approve/{}", encode(id)), 0),
        Command::Freeze => ("/admin/tuner/freeze".to_owned(), 1),
        Command::Resume => ("/admin/tuner/resume".to_owned(), 0),
        Command::Reset => ("/admin/tuner/reset".to_owned(), 0),
    };
    let asked: TunerReport = match command {
        Command::Approve { .. } => client.get("/admin/tuner").await?,
        _ => TunerReport::default(),
    };
    let report: TunerReport = client.post(&path).await?;
    let Command::Approve { id } = command else { return print(&text(&report, events)) };
    // The report is from before the approval. The tuner makes the change within seconds.
    let proposal = asked.proposals().find(|proposal| proposal.id == *id);
    let what = proposal.map_or_else(String::new, |one| format!(": {} = {} (is {})", one.key, one.to, one.from));
    print(&format!("proposal {id} is approved{what}; the change is made within seconds, sluice tuner show says when"))
}

fn print(text: &str) -> Result<(), Failed> {
    print_to_stdout(&format!("{text}\n")).map_err(Failed::Output)
}

fn text(report: &TunerReport, events: usize) -> String {
    let mut text = match (report.mode.as_str(), &report.frozen) {
        ("off", _) => return "the tuner is off (tuner.mode)".to_owned(),
        (mode, Some(why)) => {
            format!("frozen {why}: makes no changes (tuner.mode is \"{mode}\"; sluice tuner resume)\n")
        }
        ("advise", None) => "advises: makes no changes (tuner.mode)\n".to_owned(),
        ("approve", None) => "makes changes that are approved (tuner.mode)\n".to_owned(),
        _ => "makes changes (tuner.mode)\n".to_owned(),
    };
    for group in &report.groups {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}", of_group(group));
    }
    let engines = &report.engines;
    if !engines.doing.is_empty() {
        let _ = writeln!(text, "\nflags of engines: {}\n  {}", engines.doing, engines.why);
    }
    if let Some(proposal) = &engines.proposal {
        let _ = write!(text, "{}", of_proposal(proposal));
    }
    for change in &engines.changes {
        let _ = write!(text, "{}", of_change(change));
    }
    if events > 0 && !report.events.is_empty() {
        text += "\n";
        report.events.iter().take(events).for_each(|event| text += &of_event(event));
    }
    text.trim_end().to_owned()
}

fn of_group(group: &GroupReport) -> String {
    let mut text = format!("{}: {}\n", group.pools.join(", "), group.doing);
    let _ = writeln!(text, "  {} (target {:.1} %)", group.why, 100.0 * group.target);
    for limit in &group.limits {
        let _ = writeln!(text, "  {} = {} (configured: {})", limit.key, limit.in_force, limit.configured);
    }
    for found in &group.diagnoses {
        let on = if found.backends.is_empty() { String::new() } else { format!(" ({})", found.backends.join(", ")) };
        let advice = if found.advice.is_empty() { String::new() } else { format!(": {}", found.advice) };
        let _ = writeln!(text, "  {}{on}{advice}", found.evidence);
    }
    if let Some(proposal) = &group.proposal {
        text += &of_proposal(proposal);
    }
    for blocked in &group.blocked {
        let direction = if blocked.up { "raised" } else { "lowered" };
        let BlockedReport { key, why, left, .. } = blocked;
        let _ = writeln!(text, "  {key} is not {direction} for {left:.0} s: {why}");
    }
    text
}

fn of_proposal(proposal: &ProposalReport) -> String {
    let ProposalReport { id, key, from, to, why, approved } = proposal;
    let state = if *approved { ", approved, begins as soon as nothing else is tried" } else { "" };
    format!("  proposal {id}{state}: {key} = {to} (is {from}): {why}\n")
}

fn of_change(change: &Realised) -> String {
    let (from, to) = (change.flag.show(change.values.0), change.flag.show(change.values.1));
    let forecast = change.forecast.map_or_else(|| "none".to_owned(), |gain| format!("{gain:.3}"));
    format!(
        "  {} {} {from} -> {to}: {}, loss lower by {:.3} ({:.3} to {:.3}), forecast {forecast}\n",
        change.pool,
        change.flag.name(),
        change.verdict.replace('_', " "),
        change.realised,
        change.range.0,
        change.range.1
    )
}

fn of_event(TimedEvent { time, event }: &TimedEvent) -> String {
    let (from, to) = &event.values;
    format!("{time} {}: {} = {to} (was {from})\n  {}\n", event.kind.word(), event.key, event.why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_online::event::{Event, EventKind};
    use sluice_online::observe::diagnosis::{Diagnosis, Reading};
    use sluice_online::tuner::report::LimitReport;

    #[test]
    fn a_report_says_what_the_tuner_does_and_would_do() {
        let values = ("1".to_owned(), "2".to_owned());
        let event = Event {
            at: 5.0,
            kind: EventKind::Undone,
            key: "pool.all.slots".to_owned(),
            values,
            why: "loss 0.3 after 0.1".to_owned(),
        };
        let group = GroupReport {
            pools: vec!["short".to_owned(), "long".to_owned()],
            doing: "watching".to_owned(),
            why: "93.0 % of 300 requests met their objectives".to_owned(),
            attainment: Some(0.93),
            target: 0.99,
            limits: vec![LimitReport {
                key: "pool.short.slots".to_owned(),
                configured: "4".to_owned(),
                in_force: "32".to_owned(),
            }],
            proposal: Some(ProposalReport {
                id: "3".to_owned(),
                key: "pool.long.slots".to_owned(),
                from: "8".to_owned(),
                to: "16".to_owned(),
                why: "a queue".to_owned(),
                approved: false,
            }),
            blocked: vec![BlockedReport {
                key: "pool.short.slots".to_owned(),
                up: false,
                why: "raising it helped".to_owned(),
                left: 41.2,
            }],
            diagnoses: vec![Diagnosis {
                reading: Reading::Sequences,
                backends: vec!["long/a".to_owned()],
                evidence: "sequences waited".to_owned(),
                advice: "raise max-num-seqs above 2".to_owned(),
            }],
        };
        let report = TunerReport {
            engines: Default::default(),
            mode: "approve".to_owned(),
            frozen: None,
            groups: vec![group],
            events: vec![TimedEvent { time: "2026-11-23T10:00:00Z".to_owned(), event }],
        };
        let expected = [
            "makes changes that are approved (tuner.mode)",
            "",
            "short, long: watching",
            "  93.0 % of 300 requests met their objectives (target 99.0 %)",
            "  pool.short.slots = 32 (configured: 4)",
            "  sequences waited (long/a): raise max-num-seqs above 2",
            "  proposal 3: pool.long.slots = 16 (is 8): a queue",
            "  pool.short.slots is not lowered for 41 s: raising it helped",
            "",
            "2026-11-23T10:00:00Z undone: pool.all.slots = 2 (was 1)",
            "  loss 0.3 after 0.1",
        ];
        assert_eq!(text(&report, 10), expected.join("\n"));
        let mut approved = report.clone();
        approved.groups[0].proposal.iter_mut().for_each(|proposal| proposal.approved = true);
        assert!(text(&approved, 0).contains("  proposal 3, approved, begins as soon as nothing else is tried: "));
        let frozen = TunerReport { frozen: Some("by an operator".to_owned()), ..report };
        assert!(text(&frozen, 0).starts_with("frozen by an operator: makes no changes"));
        assert_eq!(
            text(&TunerReport { mode: "off".to_owned(), ..TunerReport::default() }, 3),
            "the tuner is off (tuner.mode)"
        );
    }
}
