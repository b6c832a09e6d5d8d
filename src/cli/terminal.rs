//! The terminal: the width, and a few lines that are redrawn in place.
//!
//! Results on stdout are fitted to the terminal. Without a terminal, lines of text may have any
//! width, so that a search finds a whole line. Tables of measurements then fit `COLUMNS`, or 80
//! columns. Progress is drawn on stderr: [`LiveLines`] moves the cursor up to the first line and
//! clears from there. Bounds: the lines of the screen, each cut at the screen's width.

use std::io::{ErrorKind, IsTerminal, Write};

use crossterm::cursor::MoveToPreviousLine;
use crossterm::terminal::{Clear, ClearType};
use crossterm::{queue, terminal};

/// Columns and rows of a terminal that does not report them.
const USUAL: (usize, usize) = (80, 24);

pub(super) fn stdout_width() -> Option<usize> {
    std::io::stdout().is_terminal().then(|| size().0)
}

/// Prints a text to stdout. A reader that leaves early (`| head`) is no failure.
pub(super) fn print_to_stdout(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Columns for a table that is divided if it is too wide: the columns of the terminal, otherwise
/// `COLUMNS`, otherwise 80.
pub(super) fn table_width() -> usize {
    stdout_width().unwrap_or_else(|| columns_of(std::env::var("COLUMNS").ok().as_deref()))
}

fn columns_of(asked: Option<&str>) -> usize {
    asked.and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0).unwrap_or(USUAL.0)
}

pub(super) fn size() -> (usize, usize) {
    let or = |size: u16, usual| if size == 0 { usual } else { usize::from(size) };
    let (columns, rows) = terminal::size().unwrap_or_default();
    (or(columns, USUAL.0), or(rows, USUAL.1))
}

/// Lines on a terminal that are drawn in place; cleared when dropped.
#[derive(Debug)]
pub(super) struct LiveLines<W: Write> {
    out: W,
    drawn: u16,
}

impl<W: Write> LiveLines<W> {
    pub(super) fn on(out: W) -> Self {
        Self { out, drawn: 0 }
    }

    /// Draws these lines in place of the previous ones, on a screen of `columns` and `rows`. A
    /// failed write loses only progress.
    pub(super) fn draw(&mut self, lines: &[String], (columns, rows): (usize, usize)) {
        self.clear();
        // One row is left for the cursor. One column is left, because some terminals begin a new
        // row at the last column.
        for line in lines.iter().take(rows.saturating_sub(1)) {
            let _ = writeln!(self.out, "{}", cut(line, columns.saturating_sub(1)));
            self.drawn += 1;
        }
        let _ = self.out.flush();
    }

    fn clear(&mut self) {
        if self.drawn > 0 {
            let _ = queue!(self.out, MoveToPreviousLine(self.drawn), Clear(ClearType::FromCursorDown));
            let _ = self.out.flush();
        }
        self.drawn = 0;
    }
}

impl<W: Write> Drop for LiveLines<W> {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The text for stdout, wrapped if stdout is a terminal. Colours would count as characters.
pub(super) fn fitted(text: &str) -> String {
    stdout_width().map_or_else(|| text.to_owned(), |width| wrapped(text, width))
}

/// The text with line feeds in place of blanks, so that no line is longer than `width` unless one
/// word is.
pub(super) fn wrapped(text: &str, width: usize) -> String {
    let wrap = |line: &str| {
        let (mut out, mut used) = (String::new(), 0);
        for word in line.split_inclusive(' ') {
            let long = word.trim_end().chars().count();
            if used > 0 && used + long > width {
                out.truncate(out.trim_end_matches(' ').len());
                out.push('\n');
                used = 0;
            }
            out.push_str(word);
            used += word.chars().count();
        }
        out
    };
    text.split('\n').map(wrap).collect::<Vec<_>>().join("\n")
}

pub(super) fn cut(text: &str, width: usize) -> &str {
    text.char_indices().nth(width).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divided_table_fits_80_columns_where_stdout_is_no_terminal() {
        assert_eq!(
            (columns_of(Some("125")), columns_of(Some("0")), columns_of(Some("wide")), columns_of(None)),
            (125, 80, 80, 80)
        );
    }

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrapped("one two three\nfour", 7), "one two\nthree\nfour");
        assert_eq!(wrapped("  a-word-that-is-long b", 9), "\na-word-that-is-long\nb");
        assert_eq!(wrapped("", 9), "");
    }

    #[test]
    fn lines_are_drawn_in_place_cut_at_the_screen_and_cleared() {
        let mut out = Vec::new();
        let mut live = LiveLines::on(&mut out);
        let lines: Vec<String> = (0..9).map(|n| format!("{n}■{}", "x".repeat(100))).collect();
        live.draw(&lines, (12, 5));
        live.draw(&lines[..1], (12, 5));
        drop(live);
        let text = String::from_utf8(out).unwrap();
        let (clear_4, clear_1) = ("\x1b[4F\x1b[J", "\x1b[1F\x1b[J");
        let line = |n: usize| format!("{n}■{}\n", "x".repeat(9));
        let four: String = (0..4).map(line).collect();
        assert_eq!(text, format!("{four}{clear_4}{}{clear_1}", line(0)));
    }
}
