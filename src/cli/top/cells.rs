//! Cells of the tables: a title, the names of columns, a cell that is aligned to the right.
//!
//! Titles and names are bold or underlined, so that they look the same without colours.

use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row};

pub(super) fn bold(text: impl Into<String>) -> Line<'static> {
    Line::styled(text.into(), Style::new().add_modifier(Modifier::BOLD))
}

pub(super) fn right(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Line::raw(text.into()).right_aligned())
}

pub(super) fn header(names: &[&'static str]) -> Row<'static> {
    let cells = names.iter().enumerate().map(|(at, name)| if at == 0 { Cell::from(*name) } else { right(*name) });
    Row::new(cells).style(Style::new().add_modifier(Modifier::UNDERLINED))
}
