//! Lines and dots of a plot as SVG, with values that appear while the pointer rests on them.
//!
//! A page has no script, so each value is the `<title>` of a visible dot, or of an invisible dot on
//! a line. A line has at most [`TARGETS_MAX`] such dots, so that a page stays small.

use std::fmt::Write as _;

use super::scale::{Scale, short};

pub(super) const TARGETS_MAX: usize = 48;
pub(super) const DASHES: [&str; 5] = ["", "7 4", "2 3", "10 3 2 3", ""];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draw {
    Line,
    /// Lines, and a mark at each point.
    Marked,
    /// A horizontal line from each point to the place of the next.
    Steps,
    Dots,
}

#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) draw: Draw,
    /// Index of the colour; 4 is for failures.
    pub(super) color: usize,
    pub(super) points: Vec<(f64, f64)>,
}

impl Series {
    pub(super) fn draw(&self, out: &mut String, (x, y): (&Scale, &Scale), labels: (&str, &str)) {
        let finite = |(a, b): &&(f64, f64)| a.is_finite() && b.is_finite();
        let points: Vec<(f64, f64)> = self.points.iter().filter(finite).copied().collect();
        let color = self.color;
        if self.draw == Draw::Dots {
            for point in points {
                let (title, (at, to)) = (self.title(point, None), (x.at(point.0), y.at(point.1)));
                let _ = write!(
                    out,
                    "<circle class=\"d\" cx=\"{at:.1}\" cy=\"{to:.1}\" r=\"2\" fill=\"var(--s{color})\">{title}</circle>"
                );
            }
            return;
        }
        let mut path = String::new();
        for (index, (a, b)) in points.iter().enumerate() {
            let (x, y) = (x.at(*a), y.at(*b));
            let _ = match (index, self.draw) {
                (0, _) => write!(path, "M{x:.1} {y:.1}"),
                (_, Draw::Steps) => write!(path, "H{x:.1}V{y:.1}"),
                _ => write!(path, "L{x:.1} {y:.1}"),
            };
        }
        let dash = DASHES[color.min(4)];
        let _ = write!(out, "<path class=\"l\" d=\"{path}\" stroke=\"var(--s{color})\" stroke-dasharray=\"{dash}\"/>");
        if self.draw == Draw::Marked {
            points.iter().for_each(|point| self.mark(out, *point, (x.at(point.0), y.at(point.1)), labels));
            return;
        }
        for point in points.iter().step_by(points.len().div_ceil(TARGETS_MAX).max(1)) {
            let (title, (at, to)) = (self.title(*point, Some(labels)), (x.at(point.0), y.at(point.1)));
            let _ = write!(out, "<circle class=\"h\" cx=\"{at:.1}\" cy=\"{to:.1}\" r=\"7\">{title}</circle>");
        }
    }

    fn mark(&self, out: &mut String, point: (f64, f64), (x, y): (f64, f64), labels: (&str, &str)) {
        let (color, title) = (self.color, self.title(point, Some(labels)));
        let (shape, end) = match color % 3 {
            0 => (format!("<circle class=\"k\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\""), "</circle>"),
            1 => {
                let corner = format!("x=\"{:.1}\" y=\"{:.1}\"", x - 3.5, y - 3.5);
                (format!("<rect class=\"k\" {corner} width=\"7\" height=\"7\""), "</rect>")
            }
            _ => (format!("<path class=\"k\" d=\"M{x:.1} {:.1}l4 7h-8z\"", y - 4.5), "</path>"),
        };
        let _ = write!(out, "{shape} stroke=\"var(--s{color})\">{title}{end}");
    }

    /// The text of a dot has no labels of axes, because plots have many dots.
    fn title(&self, (x, y): (f64, f64), labels: Option<(&str, &str)>) -> String {
        let (name, x, y) = (escape(&self.name), short(x), short(y));
        match labels {
            Some((across, up)) => format!("<title>{name}: {} {x}, {} {y}</title>", escape(across), escape(up)),
            None => format!("<title>{name}: {y} at {x}</title>"),
        }
    }
}

/// Escapes a text for an element, or for an attribute in double quotes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
