//! A page of tables and plots that the caller fills, for results other than runs.
//!
//! Plots without a finite point are left out.

use super::page::Page;
pub use super::page::Tile;
use super::plot::{Axis, Draw, Plot, Series};

/// A part of a page.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// The title.
    pub title: String,
    /// A sentence below the title.
    pub note: String,
    /// Numbers above the table.
    pub tiles: Vec<Tile>,
    /// A table, the first row as head.
    pub rows: Vec<Vec<String>>,
    /// Plots.
    pub dots: Vec<Dots>,
}

/// A plot of dots, or of lines between them.
#[derive(Clone, Debug, Default)]
pub struct Dots {
    /// The title.
    pub title: String,
    /// The label of the horizontal axis.
    pub x: String,
    /// The label of the vertical axis.
    pub y: String,
    /// Name and points of each series.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
    /// Whether lines connect the points of a series.
    pub connected: bool,
    /// Whether the vertical axis is logarithmic if values differ by a factor over 30.
    pub may_be_log: bool,
}

const WIDE: f64 = 30.0;

/// The HTML page of a result that `command` made: the `notes`, then the sections.
pub fn page(command: &str, title: &str, notes: &[String], sections: &[Section]) -> String {
    let mut page = Page::of(command, title);
    page.warnings(notes);
    for section in sections {
        let plots: Vec<Plot> = section.dots.iter().map(plot).filter(|plot| !plot.is_empty()).collect();
        if section.tiles.is_empty() && section.rows.is_empty() && plots.is_empty() {
            continue;
        }
        page.section(section.title.clone(), &section.note);
        if !section.tiles.is_empty() {
            page.tiles(&section.tiles);
        }
        if !section.rows.is_empty() {
            page.table(&section.rows);
        }
        if !plots.is_empty() {
            page.plots(&plots);
        }
    }
    page.end()
}

fn plot(dots: &Dots) -> Plot {
    let series = dots.series.iter().enumerate().filter(|(_, (_, points))| !points.is_empty());
    let series = series.map(|(color, (name, points))| {
        let (name, points) = (name.clone(), points.clone());
        let draw = if dots.connected { Draw::Marked } else { Draw::Dots };
        Series { name, draw, color, points }
    });
    let values = || dots.series.iter().flat_map(|(_, points)| points.iter().map(|(_, y)| *y));
    let least = values().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
    let log = dots.may_be_log && values().any(|value| value > WIDE * least);
    let axis = |label: &String| Axis { label: label.clone(), ..Axis::default() };
    let (x, y) = (axis(&dots.x), Axis { log, ..axis(&dots.y) });
    Plot { title: dots.title.clone(), x, y, series: series.collect(), ..Plot::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_have_tables_and_dots_and_empty_ones_are_left_out() {
        let dots = Dots {
            title: "response".to_owned(),
            series: vec![("a".to_owned(), vec![(1.0, 2.0), (2.0, 3.0)])],
            ..Dots::default()
        };
        let full = Section {
            title: "<full>".to_owned(),
            tiles: vec![("17 %".to_owned(), "of it", "a share".to_owned())],
            rows: vec![vec!["head".to_owned()]],
            dots: vec![dots],
            ..Section::default()
        };
        let empty = Section { title: "empty".to_owned(), dots: vec![Dots::default()], ..Section::default() };
        let page = page("sluice command", "title", &["a note".to_owned()], &[full, empty]);
        assert!(page.contains("&lt;full&gt;") && page.contains("response") && page.contains("<th>head</th>"));
        assert!(page.contains("<b>17 %</b><span>of it</span><i>a share</i>"));
        assert!(!page.contains("empty"));
        assert!(page.contains("<small>sluice command</small>title") && page.contains("<li>a note</li>"));
    }

    #[test]
    fn an_axis_is_logarithmic_where_it_may_be_and_values_differ_widely() {
        let is_log = |may_be_log, values: [f64; 3]| {
            let points = values.into_iter().map(|y| (0.0, y)).collect();
            plot(&Dots { series: vec![("a".to_owned(), points)], may_be_log, ..Dots::default() }).y.log
        };
        assert!(is_log(true, [0.0, 60.0, 40_000.0]));
        assert!(!is_log(true, [0.0, 60.0, 600.0]) && !is_log(true, [0.0; 3]) && !is_log(false, [0.0, 60.0, 40_000.0]));
    }
}
