//! The slowest of the last finished requests, and where their time went: in the place of the histogram.
//!
//! The list needs the admin token where there is one; without it, or from an older gateway, the reason is shown in its place.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table};

use super::cells::{bold, header, right};
use crate::admin::snapshot::RequestLists;
use crate::cli::status::ms;
use crate::telemetry::RequestView;

/// Columns of a request id; longer ones are cut.
const ID_COLUMNS: usize = 20;

/// Draws the list in `area`, as many requests as fit.
pub(super) fn draw(frame: &mut Frame<'_>, lists: &Result<RequestLists, String>, area: Rect) {
    let [title, table] = Layout::vertical([Constraint::Length(1), Constraint::Min(3)]).areas(area);
    match lists {
        Ok(lists) => {
            frame.render_widget(bold(format!("slowest of the last {} finished requests", lists.kept)), title);
            let rows = lists.slowest.iter().take(usize::from(table.height.saturating_sub(1))).map(row);
            frame.render_widget(Table::new(rows, WIDTHS).header(header(&NAMES)), table);
        }
        Err(why) => frame.render_widget(Line::raw(format!("the slowest requests are not known: {why}")), title),
    }
}

const NAMES: [&str; 8] = ["request", "backend", "prompt", "queue", "TTFT", "longest gap", "total", "outcome"];
const WIDTHS: [Constraint; 8] = [
    Constraint::Length(ID_COLUMNS as u16),
    Constraint::Min(6),
    Constraint::Length(6),
    Constraint::Length(7),
    Constraint::Length(7),
    Constraint::Length(11),
    Constraint::Length(7),
    Constraint::Length(9),
];

fn row(request: &RequestView) -> Row<'static> {
    let time = |value: Option<f64>| right(value.map_or_else(|| "-".to_owned(), short));
    let tokens = request.prompt_tokens.or(request.estimate_tokens);
    Row::new([
        Cell::from(request.request_id.chars().take(ID_COLUMNS).collect::<String>()),
        right(request.backend.as_deref().unwrap_or("-")),
        right(tokens.map_or_else(|| "-".to_owned(), |tokens| tokens.to_string())),
        time(Some(request.queue_ms)),
        time(request.ttft_ms),
        time(request.longest_gap_ms),
        time(Some(request.total_ms)),
        right(request.outcome.clone()),
    ])
}

/// A duration in seven columns.
fn short(value: f64) -> String {
    if value < 1_000.0 { format!("{value:.0} ms") } else { ms(value) }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn screen(lists: &Result<RequestLists, String>) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 5)).unwrap();
        terminal.draw(|frame| draw(frame, lists, frame.area())).unwrap();
        super::super::text(terminal.backend().buffer())
    }

    #[test]
    fn the_slowest_requests_fit_80_columns_with_the_parts_of_their_time() {
        let request = |number: u64| RequestView {
            request_id: format!("chatcmpl-{number}-0123456789abcdef").into(),
            backend: Some("gpu0".into()),
            estimate_tokens: Some(16_000),
            queue_ms: 1_234.5,
            ttft_ms: (number > 1).then_some(2_750.0),
            longest_gap_ms: Some(96.4),
            total_ms: 61_000.0,
            outcome: "completed".to_owned(),
            ..RequestView::default()
        };
        let lists = RequestLists { kept: 4_096, slowest: (1..9).map(request).collect(), ..RequestLists::default() };
        let text = screen(&Ok(lists));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "slowest of the last 4096 finished requests");
        assert_eq!(
            lines[2].split_whitespace().collect::<Vec<_>>().join(" "),
            "chatcmpl-1-012345678 gpu0 16000 1.23 s - 96 ms 61.00 s completed"
        );
        assert!(lines[3].contains("2.75 s") && lines.len() == 5, "as many as fit: {text}");
    }

    #[test]
    fn without_the_token_the_reason_is_shown() {
        let text = screen(&Err("the admin port requires its token".to_owned()));
        assert!(text.starts_with("the slowest requests are not known: the admin port requires its token"), "{text}");
    }
}
