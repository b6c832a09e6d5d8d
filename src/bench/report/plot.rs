//! A small renderer of line and dot plots as SVG.
//!
//! No plotting library has dark mode through CSS variables and two widths with text of the same
//! size. Series also differ in dashes and marks, so that a reader can distinguish them in grey.
//! Values that are not finite are left out.

use std::fmt::Write as _;

use super::scale::{Scale, short};
use super::series::DASHES;
pub(super) use super::series::{Draw, Series, escape};

#[derive(Clone, Debug, Default)]
pub(super) struct Axis {
    pub(super) label: String,
    pub(super) log: bool,
    /// Whether the range begins at 0; not on a logarithmic axis.
    pub(super) from_zero: bool,
    pub(super) until: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mark {
    pub(super) at: f64,
    pub(super) label: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    pub(super) marks: Vec<Mark>,
    pub(super) levels: Vec<Mark>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) width: f64,
    pub(super) height: f64,
}

pub(super) const WIDE: Size = Size { width: 580.0, height: 330.0 };
pub(super) const NARROW: Size = Size { width: 340.0, height: 290.0 };

pub(super) const VARIABLES: &str = ":root{--ink:#17202a;--soft:#5b6875;--line:#dfe4e9;--card:#fff;--s0:#0b7f7f;--s1:#c2570c;\
--s2:#6a4bc4;--s3:#4d6a8a;--s4:#c62828}\n@media (prefers-color-scheme:dark){:root{--ink:#e6ebef;--soft:#9aa8b5;--line:#2b363f;\
--card:#161d23;--s0:#3dbdb7;--s1:#f0a05a;--s2:#ab97f5;--s3:#9db7d3;--s4:#f0716b}}\n";
pub(super) const STYLE: &str = ".plot{font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}\
.plot text{fill:var(--soft)}.plot .t{fill:var(--ink);font-weight:600;font-size:14px}.plot .g{stroke:var(--line);stroke-width:1}\
.plot .a{stroke:var(--soft);stroke-width:1}.plot .m{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3}\
.plot .ml{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:5px;stroke-linejoin:round}.plot .l{fill:none;stroke-width:2;stroke-linejoin:round}.plot .d{fill-opacity:.5}\
.plot .k{fill:var(--card);stroke-width:2}.plot .h{fill:transparent}.plot .h:hover{fill:var(--ink);fill-opacity:.25}\n";

const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const LEGEND_ROW: f64 = 18.0;
const MARK_ROW: f64 = 15.0;
/// Space between the axes and the outermost dots.
const INSET: f64 = 5.0;
/// The largest ratio of two values on a logarithmic axis. Smaller values are at the beginning.
const LOG_SPAN: f64 = 1e4;
/// An axis is extended to an objective's line if the line is at most this many times beyond the
/// values.
const LINE_REACH: f64 = 4.0;
const CHARACTER: f64 = 6.8;

struct LegendEntry {
    series: usize,
    row: usize,
    at: f64,
}

#[derive(Clone, Copy)]
struct Field {
    top: f64,
    bottom: f64,
    right: f64,
}

impl Axis {
    fn text(&self, scale: &Scale) -> String {
        if scale.is_log() { format!("{}, logarithmic", self.label) } else { self.label.clone() }
    }
}

impl Mark {
    fn text(&self, scale: &Scale) -> String {
        if scale.reaches(self.at) { self.label.clone() } else { format!("{} (beyond the axis)", self.label) }
    }
}

impl Plot {
    pub(super) fn is_empty(&self) -> bool {
        self.points().next().is_none()
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        let all = self.series.iter().flat_map(|series| series.points.iter().copied());
        all.filter(|(x, y)| x.is_finite() && y.is_finite())
    }

    pub(super) fn svg(&self, size: Size) -> String {
        self.draw(size, "")
    }

    pub(super) fn file(&self, size: Size) -> String {
        self.draw(
            size,
            &format!("<style>{VARIABLES}{STYLE}</style><rect width=\"100%\" height=\"100%\" fill=\"var(--card)\"/>"),
        )
    }

    fn draw(&self, size: Size, before: &str) -> String {
        let mut out = String::new();
        let Size { width, height } = size;
        let title = escape(&self.title);
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-label=\"{title}\">{before}<text class=\"t\" x=\"4\" y=\"18\">{title}</text>"
        );
        let legend = self.legend(width);
        let top = 34.0 + LEGEND_ROW * legend.iter().map(|entry| entry.row + 1).max().unwrap_or(0) as f64;
        let above = top;
        let top = top + MARK_ROW * self.marks.len() as f64;
        let (bottom, right) = (height - 44.0, width - RIGHT);
        let inset = if self.series.iter().any(|series| series.draw == Draw::Dots) { INSET } else { 0.0 };
        let x = self.scale(&self.x, 0, LEFT + inset, right - inset);
        let y = self.scale(&self.y, 1, bottom - inset, top + inset);
        for LegendEntry { series, row, at } in legend {
            self.key(&mut out, series, at, 36.0 + LEGEND_ROW * row as f64);
        }
        let field = Field { top, bottom, right };
        self.grid(&mut out, &x, &y, field, if width < 400.0 { 4 } else { 7 });
        for series in &self.series {
            series.draw(&mut out, (&x, &y), (&self.x.label, &self.y.label));
        }
        self.mark(&mut out, &x, above, bottom, right);
        self.level(&mut out, &y, right);
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text><text x=\"14\" y=\"{}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 14 {})\">{}</text></svg>",
            (LEFT + right) / 2.0,
            height - 8.0,
            escape(&self.x.text(&x)),
            (top + bottom) / 2.0,
            (top + bottom) / 2.0,
            escape(&self.y.text(&y))
        );
        out
    }

    fn scale(&self, axis: &Axis, coordinate: usize, from: f64, to: f64) -> Scale {
        let values: Vec<f64> = self.points().map(|(x, y)| if coordinate == 0 { x } else { y }).collect();
        // A value of 0 is drawn at the beginning of a logarithmic axis.
        let log = axis.log && values.iter().any(|value| *value > 0.0);
        let shown = values.iter().copied().filter(|value| !log || *value > 0.0);
        let (mut low, mut high) =
            shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        if log {
            low = low.max(high / LOG_SPAN);
        }
        let lines = if coordinate == 0 { &self.marks } else { &self.levels };
        let reach = low / LINE_REACH..=high * LINE_REACH;
        for line in lines.iter().filter(|line| reach.contains(&line.at)) {
            (low, high) = (low.min(line.at), high.max(line.at));
        }
        if axis.from_zero && !log {
            low = low.min(0.0);
        }
        if coordinate == 1 {
            (low, high) = if log { (low / 1.12, high * 1.12) } else { (low, high + (high - low) * 0.06) };
        }
        Scale::new(low, axis.until.unwrap_or(high), log, from, to)
    }

    fn grid(&self, out: &mut String, x: &Scale, y: &Scale, field: Field, x_ticks: usize) {
        let Field { top, bottom, right } = field;
        for tick in y.ticks(5) {
            let at = y.at(tick);
            let _ = write!(
                out,
                "<line class=\"g\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"{}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                short(tick)
            );
        }
        for tick in x.ticks(x_ticks) {
            let at = x.at(tick);
            let _ = write!(
                out,
                "<line class=\"g\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/><text x=\"{at:.1}\" y=\"{}\" \
                 text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                short(tick)
            );
        }
        let _ = write!(out, "<line class=\"a\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>");
    }

    fn level(&self, out: &mut String, y: &Scale, right: f64) {
        for level in &self.levels {
            let at = y.at(level.at);
            let _ = write!(
                out,
                "<line class=\"m\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text class=\"ml\" x=\"{:.1}\" \
                 y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                right - 4.0,
                at - 4.0,
                escape(&level.text(y))
            );
        }
    }

    /// Draws the marks. Each label is on the side with more space.
    fn mark(&self, out: &mut String, x: &Scale, top: f64, bottom: f64, right: f64) {
        for (row, mark) in self.marks.iter().enumerate() {
            let at = x.at(mark.at);
            let (anchor, label) = if at > (LEFT + right) / 2.0 { ("end", at - 5.0) } else { ("start", at + 5.0) };
            let _ = write!(
                out,
                "<line class=\"m\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/><text class=\"ml\" x=\"{label:.1}\" \
                 y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                top + 11.0 + MARK_ROW * row as f64,
                escape(&mark.text(x))
            );
        }
    }

    fn legend(&self, width: f64) -> Vec<LegendEntry> {
        if self.series.len() < 2 {
            return Vec::new();
        }
        let (mut row, mut at, mut places) = (0, LEFT - 50.0, Vec::new());
        for (index, series) in self.series.iter().enumerate() {
            let needs = 34.0 + CHARACTER * series.name.chars().count() as f64;
            if at + needs > width && at > LEFT {
                (row, at) = (row + 1, LEFT - 50.0);
            }
            places.push(LegendEntry { series: index, row, at });
            at += needs;
        }
        places
    }

    fn key(&self, out: &mut String, index: usize, at: f64, y: f64) {
        let series = &self.series[index];
        let color = series.color;
        match series.draw {
            Draw::Dots => {
                let _ = write!(
                    out,
                    "<circle class=\"d\" cx=\"{}\" cy=\"{y}\" r=\"3\" fill=\"var(--s{color})\"/>",
                    at + 10.0
                );
            }
            _ => {
                let _ = write!(
                    out,
                    "<line class=\"l\" x1=\"{at}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"var(--s{color})\" \
                     stroke-dasharray=\"{}\"/>",
                    at + 20.0,
                    DASHES[color.min(4)]
                );
            }
        }
        let _ = write!(out, "<text x=\"{}\" y=\"{}\">{}</text>", at + 26.0, y + 4.0, escape(&series.name));
    }
}

#[cfg(test)]
mod tests {
    use super::super::series::TARGETS_MAX;
    use super::*;

    fn plot() -> Plot {
        let series = |name: &str, color, points| Series { name: name.to_owned(), draw: Draw::Marked, color, points };
        Plot {
            title: "Throughput <over> concurrency".to_owned(),
            x: Axis { label: "streams".to_owned(), ..Axis::default() },
            y: Axis { label: "requests per second".to_owned(), from_zero: true, ..Axis::default() },
            series: vec![
                series("measured", 0, vec![(1.0, 10.0), (50.0, 200.0), (100.0, f64::NAN)]),
                series("asked", 1, vec![(1.0, 10.0), (100.0, 400.0)]),
            ],
            marks: vec![Mark { at: 50.0, label: "knee at 50".to_owned() }],
            levels: vec![Mark { at: 300.0, label: "objective <300>".to_owned() }],
        }
    }

    #[test]
    fn a_plot_has_its_title_axes_legend_and_marks_and_nothing_unescaped() {
        for size in [WIDE, NARROW] {
            let svg = plot().svg(size);
            for text in [
                "Throughput &lt;over&gt; concurrency",
                ">streams<",
                ">requests per second<",
                ">measured<",
                ">knee at 50<",
                ">objective &lt;300&gt;<",
                "<title>measured: streams 50, requests per second 200</title>",
            ] {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert_eq!(svg.matches("<circle class=\"k\"").count(), 2, "what is not a number is left out");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>"));
        }
        assert!(plot().file(WIDE).contains("<style>"));
    }

    #[test]
    fn every_place_is_inside_the_picture() {
        let svg = plot().svg(NARROW);
        for at in svg.split("cx=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok()) {
            assert!((LEFT..=NARROW.width).contains(&at), "{at}");
        }
    }

    #[test]
    fn dots_do_not_touch_the_axes() {
        let dots =
            Series { name: "search".to_owned(), draw: Draw::Dots, color: 0, points: vec![(0.0, 0.0), (9.0, 2.0)] };
        let svg = Plot { series: vec![dots], ..Plot::default() }.svg(WIDE);
        assert!(svg.contains(&format!("cx=\"{:.1}\" cy=\"{:.1}\"", LEFT + INSET, WIDE.height - 44.0 - INSET)), "{svg}");
    }

    fn places(svg: &str, labels: &[&str]) -> Vec<f64> {
        let place = |label: &&str| {
            let before = &svg
                [..svg.find(&format!("text-anchor=\"middle\">{label}<")).unwrap_or_else(|| panic!("{label}: {svg}"))];
            before.rsplit("x=\"").next().unwrap().split('"').next().unwrap().parse().unwrap()
        };
        labels.iter().map(place).collect()
    }

    #[test]
    fn an_axis_is_called_logarithmic_if_and_only_if_it_is() {
        let with = |log: bool, values: &[f64]| {
            let points = values.iter().map(|value| (*value, 1.0)).collect();
            let series = Series { name: "gaps".to_owned(), draw: Draw::Line, color: 0, points };
            let x = Axis { label: "ITL (ms)".to_owned(), log, ..Axis::default() };
            Plot { x, series: vec![series], ..Plot::default() }.svg(WIDE)
        };
        // A gap is 0 if one event has two tokens.
        let log = with(true, &[0.0, 0.0, 0.5, 4.0, 200.0]);
        assert!(log.contains(">ITL (ms), logarithmic<"), "{log}");
        let at = places(&log, &["1", "10", "100"]);
        assert!((at[1] - at[0] - (at[2] - at[1])).abs() < 0.5, "equal ratios have equal distances: {at:?}");
        assert!(log.contains(&format!("d=\"M{LEFT:.1} ")), "0 is at the beginning of the axis: {log}");
        let linear = with(false, &[0.0, 50.0, 100.0]);
        assert!(linear.contains(">ITL (ms)<"), "{linear}");
        let at = places(&linear, &["20", "40", "60"]);
        assert!((at[1] - at[0] - (at[2] - at[1])).abs() < 0.5, "{at:?}");
        assert!(!with(true, &[0.0, 0.0]).contains("logarithmic"), "nothing above 0 can be shown on such an axis");
    }

    #[test]
    fn lines_have_values_that_appear_without_a_script_and_few_enough_of_them() {
        let points: Vec<(f64, f64)> = (1..=1_000).map(|n| (f64::from(n), f64::from(n) * 2.0)).collect();
        let series = Series { name: "<x>".to_owned(), draw: Draw::Line, color: 0, points };
        let [x, y] = ["a", "b"].map(|label| Axis { label: label.to_owned(), ..Axis::default() });
        let svg = Plot { series: vec![series], x, y, ..Plot::default() }.svg(WIDE);
        assert!(svg.contains("<title>&lt;x&gt;: a 1, b 2</title>"), "{svg}");
        let count = svg.matches("<title>").count();
        assert!((TARGETS_MAX / 2..=TARGETS_MAX).contains(&count), "{count}");
    }

    #[test]
    fn a_line_beyond_the_axis_says_so() {
        let mut plot = plot();
        plot.levels = vec![Mark { at: 1e6, label: "objective".to_owned() }];
        assert!(plot.svg(WIDE).contains(">objective (beyond the axis)<"));
        plot.levels[0].at = 1_000.0;
        assert!(plot.svg(WIDE).contains(">objective<"));
    }

    #[test]
    fn a_plot_of_nothing_is_still_a_picture() {
        let empty = Plot { title: "Nothing".to_owned(), ..Plot::default() };
        assert!(empty.is_empty() && !plot().is_empty());
        assert!(empty.svg(WIDE).ends_with("</svg>"));
    }
}
