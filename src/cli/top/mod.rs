//! `sluice top`: a live view of a running gateway in the terminal.
//!
//! Reads the admin port once a second. While the gateway does not respond, the view says so and
//! retries. `--once` prints one frame to stdout, for scripts. The terminal is restored at the end,
//! after Ctrl-C or a signal, and if the program panics.
//!
//! Exit codes: 0 ended by the operator, or the frame is printed; 1 no valid response with `--once`,
//! or the terminal failed; 2 wrong usage. Bounds: one request at a time, [`KEYS_MAX`] waiting keys.
//!
//! | file | content |
//! |---|---|
//! | `cells` | cells of the tables |
//! | `histogram` | histograms of the metrics page |
//! | `slowest` | the slowest requests |
//! | `state` | the last samples, and the operator's choices |
//! | `view` | the drawing |

mod cells;
mod histogram;
mod slowest;
mod state;
mod view;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::{DefaultTerminal, Terminal};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};

use super::admin_command::{AdminPort, exit_code, with_client};
use super::terminal::{print_to_stdout, stdout_width};
use sluice_admin::{AdminClient, AdminClientError, Status};
use state::{Order, Sample, State};

const INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the thread that reads keys checks whether the view has ended.
const KEY_INTERVAL: Duration = Duration::from_millis(100);
const KEYS_MAX: usize = 32;
/// Columns of a frame that is printed without a terminal.
const COLUMNS: usize = 80;
/// Rows of a printed frame besides backends, findings and classes; most rows with them.
const FRAME_ROWS: usize = 20;
const FRAME_ROWS_MAX: usize = 500;

/// Show a live view of a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    #[command(flatten)]
    port: AdminPort,
    /// Print one frame and exit
    #[arg(long)]
    once: bool,
}

/// Runs the command.
pub fn run(args: &TopArgs) -> ExitCode {
    if !args.once && !std::io::stdout().is_terminal() {
        eprintln!("stdout is not a terminal; print one frame with --once, or use sluice status --json");
        return ExitCode::from(2);
    }
    with_client(&args.port, async |client| if args.once { once(client).await } else { live(client).await })
}

async fn sample(client: &AdminClient) -> Result<Sample, AdminClientError> {
    let status: Status = client.get("/admin/status").await?;
    let page = client.text("/metrics").await?;
    // Only the next two paths need the admin token.
    let recent = client.get("/admin/history").await.unwrap_or_default();
    let requests = client.get("/admin/requests").await.map_err(|error| error.to_string());
    Ok(Sample::of(status, &page, recent, requests))
}

/// Prints one frame, with a row for every backend, but without the line of keys.
async fn once(client: &AdminClient) -> ExitCode {
    match sample(client).await {
        Ok(sample) => exit_code(print_to_stdout(&frame(sample, stdout_width().unwrap_or(COLUMNS)))),
        Err(error) => exit_code(Err(error)),
    }
}

fn frame(sample: Sample, columns: usize) -> String {
    let mut state = State::default();
    state.add(sample);
    let rows = FRAME_ROWS + state.backends().count() + view::FINDING_ROWS_MAX + view::class_rows(&state);
    let rows = rows.min(FRAME_ROWS_MAX);
    let size = [columns, rows].map(|size| u16::try_from(size).unwrap_or(u16::MAX));
    let mut terminal = match Terminal::new(TestBackend::new(size[0], size[1])) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    match terminal.draw(|frame| view::draw(frame, &state, false)) {
        Ok(frame) => {
            text(frame.buffer).lines().filter(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect()
        }
        Err(never) => match never {},
    }
}

fn text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for row in 0..buffer.area.height {
        let line: String =
            (0..buffer.area.width).filter_map(|column| Some(buffer.cell((column, row))?.symbol())).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The terminal in raw mode on its second screen; restored when dropped, and by ratatui's panic
/// hook.
struct Screen(DefaultTerminal);

impl Screen {
    fn draw(&mut self, state: &State) -> std::io::Result<()> {
        let colours = std::env::var_os("NO_COLOR").is_none();
        let drawn = self.0.draw(|frame| {
            view::draw(frame, state, colours);
            view::draw_keys(frame);
        });
        drawn.map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn live(client: &AdminClient) -> ExitCode {
    let shown = match ratatui::try_init() {
        Ok(terminal) => show(client, Screen(terminal)).await,
        Err(error) => Err(error),
    };
    exit_code(shown.map_err(|error| format!("the terminal failed: {error}; try sluice top --once")))
}

fn order(key: KeyEvent) -> Option<Wanted> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Char('c') if control => Wanted::Quit,
        KeyCode::Char('q') => Wanted::Quit,
        KeyCode::Esc => Wanted::Back,
        KeyCode::Char('p' | ' ') => Wanted::Order(Order::Pause),
        KeyCode::Char('s') => Wanted::Order(Order::Slowest),
        KeyCode::Up | KeyCode::Char('k') => Wanted::Order(Order::Up),
        KeyCode::Down | KeyCode::Char('j') => Wanted::Order(Order::Down),
        KeyCode::Left | KeyCode::Char('h') => Wanted::Order(Order::Left),
        KeyCode::Right | KeyCode::Char('l') => Wanted::Order(Order::Right),
        _ => return None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Quit,
    /// Goes from the slowest requests to the histogram, and from the histogram ends the view.
    Back,
    Order(Order),
    /// The terminal has a new size.
    Redraw,
}

/// Reads keys on a separate thread, because reading blocks. The thread ends after the view.
fn keys() -> mpsc::Receiver<Wanted> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    std::thread::spawn(move || {
        while !sender.is_closed() {
            let wanted = match event::poll(KEY_INTERVAL) {
                Ok(true) => match event::read() {
                    Ok(Event::Key(key)) => order(key),
                    Ok(Event::Resize(..)) => Some(Wanted::Redraw),
                    Ok(_) => None,
                    Err(_) => return,
                },
                Ok(false) => None,
                Err(_) => return,
            };
            if wanted.is_some_and(|wanted| sender.blocking_send(wanted).is_err()) {
                return;
            }
        }
    });
    receiver
}

/// Shows the gateway until the operator quits, a signal arrives, or the terminal ends.
async fn show(client: &AdminClient, mut screen: Screen) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut keys = keys();
    let mut state = State::default();
    let mut ticks = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reading = Some(Box::pin(sample(client)));
    loop {
        screen.draw(&state)?;
        tokio::select! {
            wanted = keys.recv() => match wanted {
                Some(Wanted::Order(order)) => state.apply(order),
                Some(Wanted::Redraw) => {}
                Some(Wanted::Back) if state.shows_slowest => state.apply(Order::Slowest),
                Some(Wanted::Back | Wanted::Quit) | None => return Ok(()),
            },
            read = async { reading.as_mut().expect("guarded by the condition").await }, if reading.is_some() => {
                reading = None;
                match read {
                    Ok(sample) => state.add(sample),
                    Err(error) => state.fail(error.to_string()),
                }
            }
            _ = ticks.tick(), if reading.is_none() => reading = Some(Box::pin(sample(client))),
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_last_line() {
        let key = |code, modifiers| order(KeyEvent::new(code, modifiers));
        let none = KeyModifiers::NONE;
        assert_eq!(key(KeyCode::Char('q'), none), Some(Wanted::Quit));
        assert_eq!(key(KeyCode::Esc, none), Some(Wanted::Back));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Wanted::Quit));
        assert_eq!(key(KeyCode::Char('c'), none), None);
        assert_eq!(key(KeyCode::Char('p'), none), Some(Wanted::Order(Order::Pause)));
        assert_eq!(key(KeyCode::Char('s'), none), Some(Wanted::Order(Order::Slowest)));
        assert_eq!(key(KeyCode::Up, none), Some(Wanted::Order(Order::Up)));
        assert_eq!(key(KeyCode::Right, none), Some(Wanted::Order(Order::Right)));
        let release = KeyEvent::new_with_kind(KeyCode::Char('q'), none, KeyEventKind::Release);
        assert_eq!(order(release), None);
    }

    #[test]
    fn one_frame_has_every_backend() {
        let text = frame(state::tests::sample(120, 100), 80);
        for index in 0..120 {
            assert!(text.contains(&format!("/gpu{index} ")), "{index}: {text}");
        }
        assert!(text.contains("TTFT, all pools, since the start: 100"), "{text}");
        assert!(text.lines().all(|line| (1..=80).contains(&line.chars().count())), "{text}");
        assert!(!text.contains("q quit"), "{text}");
    }

    #[tokio::test]
    async fn a_gateway_that_does_not_respond_makes_one_frame_fail() {
        let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let client = AdminClient::new(&unused, None).unwrap();
        assert_eq!(once(&client).await, ExitCode::FAILURE);
    }
}
