//! The slowest of the last finished requests, with the parts of their time, in place of the
//! histogram.
//!
//! The list needs the admin token if there is one. Without it, or with an older gateway, the reason
//! is shown instead.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table};

use super::cells::{bold, header, right};
use crate::cli::status::ms;
use sluice_admin::snapshot::RequestLists;
use sluice_gateway::telemetry::RequestView;

/// Most columns of a request id. The ids that the gateway makes have 36.
const ID_COLUMNS: usize = 64;
const NAME_COLUMNS: usize = 24;

struct Column {
    name: &'static str,
    width: usize,
    text: fn(&RequestView) -> String,
}

/// Draws as many requests and columns as fit in `area`. Ids are whole, so that a request can be
/// looked up.
pub(super) fn draw(frame: &mut Frame<'_>, lists: &Result<RequestLists, String>, area: Rect) {
    let [title, table] = Layout::vertical([Constraint::Length(1), Constraint::Min(3)]).areas(area);
    let lists = match lists {
        Ok(lists) => lists,
        Err(why) => {
            return frame.render_widget(Line::raw(format!("the slowest requests are not known: {why}")), title);
        }
    };
    frame.render_widget(bold(format!("slowest of the last {} finished requests", lists.kept)), title);
    let columns = columns(&lists.slowest, usize::from(area.width));
    let row = |request: &RequestView| {
        Row::new(columns.iter().enumerate().map(|(at, column)| {
            let text = cut((column.text)(request), column.width);
            if at == 0 { Cell::from(text) } else { right(text) }
        }))
    };
    let rows = lists.slowest.iter().take(usize::from(table.height.saturating_sub(1))).map(row);
    let widths = columns.iter().map(|column| Constraint::Length(u16::try_from(column.width).unwrap_or(u16::MAX)));
    let names: Vec<&'static str> = columns.iter().map(|column| column.name).collect();
    frame.render_widget(Table::new(rows, widths).header(header(&names)), table);
}

/// The columns that fit, the most useful ones first.
fn columns(requests: &[RequestView], width: usize) -> Vec<Column> {
    let longest = |text: fn(&RequestView) -> String, name: &str, most: usize| {
        let texts = requests.iter().map(|request| text(request).chars().count());
        texts.chain([name.len()]).max().unwrap_or(0).min(most)
    };
    let time = |name, text: fn(&RequestView) -> String| Column { name, width: 7, text };
    let named = |name, most, text: fn(&RequestView) -> String| Column { name, width: longest(text, name, most), text };
    let all = [
        named("request", ID_COLUMNS, |one| one.request_id.to_string()),
        time("total", |one| short(Some(one.total_ms))),
        time("TTFT", |one| short(one.ttft_ms)),
        time("queue", |one| short(Some(one.queue_ms))),
        Column { name: "ended", width: 8, text: |one| time_of_day(&one.time) },
        named("outcome", NAME_COLUMNS, |one| one.outcome.replace('_', " ")),
        named("backend", NAME_COLUMNS, |one| one.backend.as_deref().unwrap_or("-").to_owned()),
        Column {
            name: "prompt",
            width: 7,
            text: |one| {
                one.prompt_tokens.or(one.estimate_tokens).map_or_else(|| "-".to_owned(), |tokens| tokens.to_string())
            },
        },
        time("gap", |one| short(one.longest_gap_ms)),
        named("key", NAME_COLUMNS, |one| one.key.as_deref().unwrap_or("-").to_owned()),
    ];
    let mut used = 0;
    let fits = |column: &Column| {
        let with_gap = used + usize::from(used > 0) + column.width;
        let fits = used == 0 || with_gap <= width;
        used = if fits { with_gap } else { used };
        fits
    };
    all.into_iter().filter(fits).collect()
}

fn cut(text: String, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
        false => text,
    }
}

/// `15:04:05` of `2026-11-28T15:04:05Z`, in UTC.
fn time_of_day(time: &str) -> String {
    time.split_once('T').map_or(time, |(_, time)| time).chars().take(8).collect()
}

/// A duration in seven columns.
fn short(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 1_000.0 => format!("{value:.0} ms"),
        Some(value) => ms(value),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn screen(lists: &Result<RequestLists, String>, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 5)).unwrap();
        terminal.draw(|frame| draw(frame, lists, frame.area())).unwrap();
        super::super::text(terminal.backend().buffer())
    }

    #[test]
    fn ids_are_whole_at_80_columns_and_a_wide_screen_has_every_column_with_its_whole_name() {
        let request = |number: u64| RequestView {
            time: "2026-11-28T15:04:05Z".to_owned(),
            request_id: format!("0192f0c1-2345-7abc-8def-0123456789a{number}").into(),
            backend: Some("gpu0".into()),
            key: Some("team-a".into()),
            estimate_tokens: Some(16_000),
            queue_ms: 1_234.5,
            ttft_ms: (number > 1).then_some(2_750.0),
            longest_gap_ms: Some(96.4),
            total_ms: 61_000.0,
            outcome: "completed".to_owned(),
            ..RequestView::default()
        };
        let lists = Ok(RequestLists { kept: 4_096, slowest: (1..9).map(request).collect(), ..RequestLists::default() });
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = screen(&lists, 80);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "slowest of the last 4096 finished requests");
        assert_eq!(words(lines[1]), "request total TTFT queue ended outcome");
        assert_eq!(words(lines[2]), "0192f0c1-2345-7abc-8def-0123456789a1 61.00 s - 1.23 s 15:04:05 completed");
        assert!(lines[3].contains("2.75 s") && lines.len() == 5, "as many as fit: {text}");
        let text = screen(&lists, 140);
        assert_eq!(
            words(text.lines().nth(1).unwrap()),
            "request total TTFT queue ended outcome backend prompt gap key"
        );
        assert!(text.contains("96 ms") && text.contains("team-a") && text.contains("16000"), "{text}");
    }

    #[test]
    fn without_the_token_the_reason_is_shown() {
        let text = screen(&Err("the admin port requires its token".to_owned()), 80);
        assert!(text.starts_with("the slowest requests are not known: the admin port requires its token"), "{text}");
    }
}
