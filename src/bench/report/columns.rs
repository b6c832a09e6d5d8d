//! A table of text that fits the terminal without breaking a cell.
//!
//! The first column names the row and is aligned to the left, the others to the right. If the table
//! is wider than the terminal, first the gaps shrink, then the table is divided into blocks of
//! whole columns, one below the other, each with the names of the rows. Widths are counted in
//! characters.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};

/// A table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Columns {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    Three,
    Two,
    One,
}

impl Gap {
    const ALL: [Self; 3] = [Self::Three, Self::Two, Self::One];

    /// Blanks to the left and right of a cell, besides one between cells.
    fn padding(self) -> (u16, u16) {
        match self {
            Self::Three => (1, 1),
            Self::Two => (0, 1),
            Self::One => (0, 0),
        }
    }
}

impl Columns {
    /// A table with this header and no rows.
    pub fn new<T: Into<String>>(header: impl IntoIterator<Item = T>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row with a cell for each column.
    pub fn add<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The table in at most `width` characters, if two columns fit.
    pub fn text(&self, width: Option<usize>) -> String {
        let fits = |gap: &Gap| width.is_none_or(|width| self.blocks(Some(width), *gap).len() == 1);
        let gap = Gap::ALL.into_iter().find(fits).unwrap_or(Gap::Two);
        let blocks: Vec<String> = self.blocks(width, gap).iter().map(|columns| self.block(columns, gap)).collect();
        blocks.join("\n")
    }

    fn blocks(&self, width: Option<usize>, gap: Gap) -> Vec<Vec<usize>> {
        let wide = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).chain(self.header.get(column));
            let (left, right) = gap.padding();
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0) + usize::from(left + right) + 1
        };
        let (mut blocks, mut block) = (Vec::new(), vec![0]);
        let mut used = wide(0);
        for column in 1..self.header.len() {
            if width.is_some_and(|width| block.len() > 1 && used + wide(column) - 1 > width) {
                blocks.push(std::mem::replace(&mut block, vec![0]));
                used = wide(0);
            }
            used += wide(column);
            block.push(column);
        }
        blocks.push(block);
        blocks
    }

    fn block(&self, columns: &[usize], gap: Gap) -> String {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        let of = |row: &[String]| -> Vec<String> { columns.iter().filter_map(|at| row.get(*at)).cloned().collect() };
        table.set_header(of(&self.header));
        for row in &self.rows {
            table.add_row(of(row));
        }
        for (at, column) in table.column_iter_mut().enumerate() {
            column.set_padding(gap.padding());
            column.set_cell_alignment(if at == 0 { CellAlignment::Left } else { CellAlignment::Right });
        }
        table.to_string()
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Columns {
        let mut columns = Columns::new(["class", "sent", "requests per second", "TTFT p99", "E2EL p99"]);
        columns.add(["short", "1234567", "17.25", "14137.3", "20000.0"]);
        columns.add(["a much longer name", "1", "0.50", "-", "-"]);
        columns
    }

    #[test]
    fn a_table_that_is_too_wide_is_divided_into_blocks_with_the_names_in_each() {
        for width in [45, 50, 60] {
            let text = columns().text(Some(width));
            let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= width, "{longest} of {width}:\n{text}");
            assert!(text.matches("a much longer name").count() > 1, "{text}");
            for cell in ["requests per second", "1234567", "14137.3", "20000.0"] {
                assert_eq!(text.matches(cell).count(), 1, "{cell} is whole:\n{text}");
            }
        }
    }

    #[test]
    fn a_table_that_fits_is_one_block() {
        let whole = columns().text(None);
        let width = whole.lines().next().unwrap().chars().count();
        assert_eq!(columns().text(Some(width)), whole);
        for (less, gap) in [(1, "two blanks"), (6, "one blank")] {
            let text = columns().text(Some(width - less));
            assert!(text.lines().all(|line| line.chars().count() <= width - less), "{gap}: {text}");
            assert_eq!(text.matches("a much longer name").count(), 1, "{gap}: {text}");
        }
        assert_eq!(whole.matches("a much longer name").count(), 1);
    }
}
