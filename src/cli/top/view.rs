//! Draws the view with ratatui: findings, pools, classes, backends, the reason for the selected
//! backend's state, a histogram or the slowest requests, the keys.
//!
//! Made for 80 columns and 24 rows. On smaller screens the histogram goes first, then rows of
//! pools; backends scroll. A state is a word and, unless `NO_COLOR` is set, a colour.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Bar, BarChart, BarGroup, Cell, Paragraph, Row, Table, TableState};

use super::cells::{bold, header, right};
use super::histogram::MEASURES;
use super::slowest;
use super::state::{State, prompt};
use crate::cli::status::{ms, span, used, why};
use crate::cli::terminal::wrapped;
use sluice_admin::status::{BackendStatus, PoolStatus};
use sluice_gateway::telemetry::Quantiles;

/// Most pools with a row; the number of pools is shown.
const POOLS_MAX: usize = 6;
const CLASSES_MAX: usize = 8;
pub(super) const FINDING_ROWS_MAX: usize = 4;
/// Rows of the histogram: title, bars, labels.
const HISTOGRAM_ROWS: u16 = 8;
/// Rows that the slowest requests leave to the other parts. They are few, because the operator
/// asked for the slowest requests.
const REST_ROWS: u16 = 12;
/// Rows of backends that the histogram leaves, the header included.
const BACKEND_ROWS: u16 = 5;
/// Rows of a usual screen. On a higher one the histogram grows, at most to twice the rows.
const USUAL_ROWS: u16 = 24;
/// Most columns that a wide screen gives to short names, so that the numbers stay next to the
/// names.
const NAME_COLUMNS: usize = 40;
/// Columns of a bar and the gap after it.
const BAR_COLUMNS: u16 = 7;

/// Draws the view. Without `colours`, text is only bold or reversed.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, colours: bool) {
    let area = frame.area();
    let pools = state.status.as_ref().map_or(0, |status| status.pools.len());
    let pool_rows = u16::try_from(pools.min(POOLS_MAX)).unwrap_or(0) + 1;
    let findings = findings(state, area);
    let finding_rows = u16::try_from(findings.len()).unwrap_or(0);
    let class_rows = u16::try_from(class_rows(state)).unwrap_or(0);
    let backend_rows = u16::try_from(state.backends().count()).unwrap_or(u16::MAX).saturating_add(1);
    let rest = finding_rows + pool_rows + class_rows + 5;
    // The rows of a large screen that no backend needs go to the histogram.
    let spare = area.height.saturating_sub(USUAL_ROWS.max(backend_rows.saturating_add(rest + HISTOGRAM_ROWS)));
    let needed = if state.shows_slowest { REST_ROWS } else { rest + backend_rows.min(BACKEND_ROWS) };
    let histogram = match area.height >= HISTOGRAM_ROWS + needed {
        true => HISTOGRAM_ROWS + spare.min(HISTOGRAM_ROWS),
        false => 0,
    };
    let [title, notice, first, top, classes, middle, reason, bars, _] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(finding_rows),
        Constraint::Length(pool_rows),
        Constraint::Length(class_rows),
        Constraint::Min(2),
        Constraint::Length(2),
        Constraint::Length(histogram),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(headline(state), title);
    frame.render_widget(notice_line(state, colours), notice);
    if state.status.is_some() {
        frame.render_widget(Paragraph::new(findings), first);
        draw_pools(frame, state, top);
        draw_classes(frame, state, classes);
        draw_backends(frame, state, colours, middle);
        draw_reason(frame, state, reason);
        match &state.requests {
            _ if histogram == 0 => {}
            Some(requests) if state.shows_slowest => slowest::draw(frame, requests, bars),
            _ => draw_histogram(frame, state, colours, bars),
        }
    }
}

pub(super) fn draw_keys(frame: &mut Frame<'_>) {
    let area = frame.area();
    let last = Rect { y: area.bottom().saturating_sub(1), height: area.height.min(1), ..area };
    let help = "q quit   up/down backend   left/right measure   s slowest requests   p pause";
    frame.render_widget(Line::styled(help, Style::new().add_modifier(Modifier::DIM)), last);
}

fn headline(state: &State) -> Line<'static> {
    let Some(status) = &state.status else { return bold("sluice top") };
    let about = &status.about;
    let file = about.config.as_deref().unwrap_or("started from flags");
    let (version, up) = (&about.version, span(about.uptime_seconds));
    bold(format!("sluice {version} up {up}, clients on {}, {file}", about.listen))
}

/// An unusual condition. A failure to connect comes first.
fn notice_line(state: &State, colours: bool) -> Line<'static> {
    let red = if colours { Style::new().fg(Color::Red) } else { Style::new() }.add_modifier(Modifier::BOLD);
    if let Some((why, attempts)) = &state.failure {
        return Line::styled(format!("not connected, trying again ({attempts}): {why}"), red);
    }
    let Some(status) = &state.status else { return Line::raw("connecting") };
    let reload = status.about.last_reload.as_ref().filter(|last| !last.ok);
    match (state.paused, status.about.shutting_down, reload) {
        (true, ..) => Line::styled("paused: p goes on", Style::new().add_modifier(Modifier::REVERSED)),
        (_, true, _) => Line::styled("shutting down: running requests finish, new ones are refused", red),
        _ if status.about.leaving => Line::styled("shutting down soon: /ready is 503, requests are still served", red),
        (.., Some(last)) => {
            let first = last.lines.first().map(String::as_str).unwrap_or_default();
            Line::styled(format!("the last reload ({}) failed: {first}", last.time), red)
        }
        _ => Line::default(),
    }
}

/// The rows of the table of classes, with the header; none without classes.
pub(super) fn class_rows(state: &State) -> usize {
    if state.classes.is_empty() { 0 } else { state.classes.len().min(CLASSES_MAX) + 1 }
}

/// The findings, on at most a sixth of the screen.
fn findings(state: &State, area: Rect) -> Vec<Line<'static>> {
    let all = state.status.iter().flat_map(|status| &status.findings);
    let most = FINDING_ROWS_MAX.min(usize::from(area.height / 6));
    let text: String = all.map(|finding| wrapped(&format!("! {}\n", finding.sentence), area.width.into())).collect();
    let mut lines: Vec<Line<'static>> = text.lines().take(most).map(bold).collect();
    if text.lines().count() > most
        && let Some(last) = lines.last_mut()
    {
        *last = bold("! more findings: sluice diagnose");
    }
    lines
}

fn draw_pools(frame: &mut Frame<'_>, state: &State, area: Rect) {
    let pools = state.status.iter().flat_map(|status| &status.pools);
    let all = pools.clone().count();
    let room = name_columns(area.width, 68, pools.clone().map(|pool| pool.name.chars().count()));
    let rows = pools.take(POOLS_MAX).map(|pool| {
        let minute = &pool.last_5_minutes;
        let of = |quantiles: Option<Quantiles>, which: fn(Quantiles) -> f64| time(quantiles.map(which));
        Row::new([
            Cell::from(without_middle(&pool.name, usize::from(room))),
            right(used(pool.queue)),
            right(format!("{:.1}", minute.requests_per_second)),
            of(minute.ttft_ms, |ttft| ttft.p50),
            of(minute.ttft_ms, |ttft| ttft.p99),
            of(minute.tpot_ms, |tpot| tpot.p99),
            right(minute.attainment.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))),
            right(minute.shed.to_string()),
            right(minute.failed.to_string()),
        ])
    });
    let first = if all > POOLS_MAX { "first, 5 min" } else { "pool, 5 min" };
    let names = [first, "queue", "req/s", "TTFT P50", "TTFT P99", "TPOT P99", "in slo", "shed", "failed"];
    frame.render_widget(Table::new(rows, pool_widths(room)).header(header(&names)), area);
}

fn pool_widths(room: u16) -> [Constraint; 9] {
    [room, 8, 7, 9, 9, 9, 7, 5, 6].map(Constraint::Length)
}

fn time(value: Option<f64>) -> Cell<'static> {
    right(value.map_or_else(|| "-".to_owned(), ms))
}

fn draw_classes(frame: &mut Frame<'_>, state: &State, area: Rect) {
    let pools = state.status.iter().flat_map(|status| &status.pools);
    let room = name_columns(area.width, 68, pools.map(|pool| pool.name.chars().count()));
    let rows = state.classes.iter().take(CLASSES_MAX).map(|row| {
        Row::new([
            Cell::from(without_middle(row.class.as_deref().unwrap_or_default(), usize::from(room))),
            right(format!("{:.0}", prompt(row))),
            right((row.completed + row.shed + row.failed + row.client_gone + row.refused).to_string()),
            time(row.ttft_ms.map(|tails| tails.p50)),
            time(row.ttft_ms.map(|tails| tails.p99)),
            time(row.tpot_ms.map(|tails| tails.p99)),
            right(row.attainment.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))),
            right(row.shed.to_string()),
            right(row.failed.to_string()),
        ])
    });
    let names = ["class, 5 min", "prompt", "ended", "TTFT P50", "TTFT P99", "TPOT P99", "in slo", "shed", "failed"];
    frame.render_widget(Table::new(rows, pool_widths(room)).header(header(&names)), area);
}

/// The columns that `rest`, the other columns, leave to names. On a wide screen, not more than the
/// names need.
fn name_columns(width: u16, rest: u16, names: impl Iterator<Item = usize>) -> u16 {
    let needed = names.max().unwrap_or(0).max(NAME_COLUMNS);
    width.saturating_sub(rest).max(10).min(u16::try_from(needed).unwrap_or(u16::MAX))
}

fn name(pool: &PoolStatus, backend: &BackendStatus) -> String {
    format!("{}/{}", pool.name, backend.name)
}

/// The name in at most `room` characters. Names mostly differ at the end, such as in a port, so a
/// long name keeps twice as much of the end as of the beginning.
fn without_middle(name: &str, room: usize) -> String {
    let length = name.chars().count();
    if length <= room {
        return name.to_owned();
    }
    let kept = room.saturating_sub(1);
    let (first, last) = (kept / 3, kept - kept / 3);
    name.chars().take(first).chain(['…']).chain(name.chars().skip(length - last)).collect()
}

fn draw_backends(frame: &mut Frame<'_>, state: &State, colours: bool, area: Rect) {
    let longest = state.backends().map(|(pool, backend)| name(pool, backend).chars().count());
    let room = name_columns(area.width, 58, longest);
    let rows = state.backends().map(|(pool, backend)| backend_row(pool, backend, colours, usize::from(room)));
    let names = ["backend", "state", "slots", "tokens", "prefill", "long", "ms/token"];
    let widths = [
        Constraint::Length(room),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(6),
        Constraint::Length(8),
    ];
    let table = Table::new(rows, widths)
        .header(header(&names))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut selection = TableState::new().with_selected(state.selected);
    frame.render_stateful_widget(table, area, &mut selection);
}

fn backend_row(pool: &PoolStatus, backend: &BackendStatus, colours: bool, room: usize) -> Row<'static> {
    let colour = match backend.state.as_str() {
        "ready" => Style::new().fg(Color::Green),
        "ejected" | "down" => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        "probation" | "draining" | "starting" => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    let style = if colours { colour } else { Style::new() };
    Row::new([
        Cell::from(without_middle(&name(pool, backend), room)),
        Cell::from(Line::styled(backend.shown_state().to_owned(), style).right_aligned()),
        right(used(backend.slots)),
        right(used(backend.tokens)),
        right(used(backend.prefill_tokens)),
        right(used(backend.long_prefills)),
        right(backend.tpot_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}"))),
    ])
}

/// Draws the chosen backend's address, and why it is not ready.
fn draw_reason(frame: &mut Frame<'_>, state: &State, area: Rect) {
    let Some((pool, backend)) = state.backends().nth(state.selected) else { return };
    let reason = why(backend).unwrap_or_else(|| backend.shown_state().to_owned());
    let text = format!("{}/{} at {}: {reason}", pool.name, backend.name, backend.url);
    frame.render_widget(Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }), area);
}

fn draw_histogram(frame: &mut Frame<'_>, state: &State, colours: bool, area: Rect) {
    let [title, chart] = Layout::vertical([Constraint::Length(1), Constraint::Min(3)]).areas(area);
    let name = MEASURES[state.measure].0;
    let Some((histogram, seconds)) = state.histogram() else { return };
    let over = seconds.map_or_else(|| "since the start".to_owned(), |seconds| format!("last {seconds} s"));
    let mut text = format!("{name}, all pools, {over}: {:.0}", histogram.count());
    for (label, share) in [("P50", 0.5), ("P90", 0.9), ("P99", 0.99)] {
        if let Some(seconds) = histogram.percentile(share) {
            text.push_str(&format!("  {label} {}", ms(seconds * 1e3)));
        }
    }
    frame.render_widget(bold(text), title);
    let bars: Vec<Bar<'_>> = histogram
        .bars(usize::from(area.width / BAR_COLUMNS))
        .into_iter()
        .map(|(bound, count)| Bar::with_label(Span::raw(bound_text(bound)), count))
        .collect();
    let style = if colours { Style::new().fg(Color::Cyan) } else { Style::new() };
    let chart_widget =
        BarChart::default().data(BarGroup::new(bars)).bar_width(BAR_COLUMNS - 1).bar_gap(1).bar_style(style);
    frame.render_widget(chart_widget.value_style(style.add_modifier(Modifier::REVERSED)), chart);
}

fn bound_text(seconds: f64) -> String {
    match seconds {
        _ if !seconds.is_finite() => "more".to_owned(),
        _ if seconds >= 1.0 => format!("{seconds}s"),
        _ => format!("{}ms", (seconds * 1e5).round() / 1e2),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::state::tests::sample;
    use super::super::state::{Order, State};
    use super::*;
    use sluice_online::findings::{Cause, Finding};

    fn screen(state: &State, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        let both = |frame: &mut Frame<'_>| {
            draw(frame, state, false);
            draw_keys(frame);
        };
        terminal.draw(both).unwrap();
        super::super::text(terminal.backend().buffer())
    }

    #[test]
    fn a_frame_of_80_columns_and_24_rows() {
        let mut state = State::default();
        state.add(sample(4, 100));
        state.add(sample(4, 180));
        state.apply(Order::Down);
        insta::assert_snapshot!(screen(&state, 80, 24));
    }

    #[test]
    fn on_a_large_screen_numbers_stay_beside_their_names_and_the_histogram_grows() {
        let mut state = State::default();
        state.add(sample(4, 100));
        state.add(sample(4, 180));
        let text = screen(&state, 200, 50);
        let row = text.lines().find(|line| line.starts_with("short/gpu0")).unwrap();
        assert!(row.trim_end().chars().count() <= 100, "{text}");
        let bars = |text: &str| text.lines().filter(|line| line.contains('█')).count();
        assert!(bars(&text) > bars(&screen(&state, 200, 24)), "{text}");
    }

    #[test]
    fn a_key_shows_the_slowest_requests_in_the_place_of_the_histogram() {
        let mut state = State::default();
        state.add(sample(4, 100));
        state.apply(Order::Slowest);
        let text = screen(&state, 80, 24);
        assert!(text.contains("slowest of the last 1 finished requests") && text.contains("req-1"), "{text}");
        state.apply(Order::Slowest);
        assert!(screen(&state, 80, 24).contains("TTFT, all pools, since the start"));
    }

    #[test]
    fn a_failure_to_connect_is_shown_with_the_last_numbers() {
        let mut state = State::default();
        state.fail("no response from the admin port".to_owned());
        let empty = screen(&state, 80, 24);
        assert!(empty.contains("not connected, trying again (1): no response from the admin port"), "{empty}");
        state.add(sample(2, 100));
        state.fail("no response from the admin port".to_owned());
        let last = screen(&state, 80, 24);
        assert!(last.contains("trying again (1)") && last.contains("short/gpu0"), "{last}");
    }

    #[test]
    fn findings_are_the_first_lines_and_leave_room_for_the_rest() {
        let finding = |subject: &str| Finding {
            is_change: false,
            cause: Cause::SlowEngine,
            pool: "short".to_owned(),
            subject: subject.to_owned(),
            sentence: format!("Engine {subject} of pool short is 9.8 times as slow as the others."),
            evidence: String::new(),
            advice: String::new(),
            since_seconds: 30.0,
        };
        let with = |findings: Vec<Finding>| {
            let mut sample = sample(2, 100);
            sample.status.findings = findings;
            let mut state = State::default();
            state.add(sample);
            screen(&state, 80, 24)
        };
        let one = with(vec![finding("gpu1")]);
        assert_eq!(
            one.lines().nth(2),
            Some("! Engine gpu1 of pool short is 9.8 times as slow as the others."),
            "{one}"
        );
        let many = with((0..9).map(|number| finding(&format!("gpu{number}"))).collect());
        assert_eq!(many.lines().nth(5), Some("! more findings: sluice diagnose"), "{many}");
        let rows: Vec<&str> = many.lines().filter(|line| line.starts_with("long")).collect();
        assert!(
            rows.len() == 3 && rows[1].contains("9000     103   21.4 ms    1.09 s"),
            "pool, class, backend: {many}"
        );
    }

    #[test]
    fn many_backends_scroll_to_the_chosen_one_and_small_screens_are_no_failure() {
        let mut state = State::default();
        state.add(sample(200, 100));
        (0..150).for_each(|_| state.apply(Order::Down));
        let text = screen(&state, 80, 24);
        assert!(text.contains("long/gpu150 at http://127.0.0.1:8150: ready"), "{text}");
        assert!(
            text.lines().filter(|line| line.starts_with("long/gpu150")).count() == 2,
            "a row and its reason: {text}"
        );
        for (columns, rows) in [(80, 10), (20, 5), (1, 1)] {
            screen(&state, columns, rows);
        }
    }

    #[test]
    fn long_names_that_differ_at_the_end_stay_distinct() {
        let mut sample = sample(2, 100);
        for (port, backend) in (18_000..).zip(sample.status.pools.iter_mut().flat_map(|pool| &mut pool.backends)) {
            backend.name = format!("127.0.0.1:{port}");
        }
        sample.status.pools.iter_mut().for_each(|pool| pool.name = "default".to_owned());
        let mut state = State::default();
        state.add(sample);
        let text = screen(&state, 80, 24);
        assert!(text.contains("default…27.0.0.1:18000 ") && text.contains("default…27.0.0.1:18001 "), "{text}");
        assert_eq!((without_middle("gpu0", 4), without_middle("gpu10", 4)), ("gpu0".to_owned(), "g…10".to_owned()));
    }

    #[test]
    fn bounds_fit_their_bars() {
        let bounds = [0.0005, 0.0025, 0.015, 0.8, 1.5, 120.0, f64::INFINITY].map(bound_text);
        assert_eq!(bounds, ["0.5ms", "2.5ms", "15ms", "800ms", "1.5s", "120s", "more"]);
    }
}
