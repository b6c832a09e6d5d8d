//! The metrics page in the format OpenMetrics 1.0, which has a place for exemplars. Prometheus asks
//! for it by default.
//!
//! Families, labels and values are the same as in Prometheus' text format. Two things differ: a
//! counter is described without the suffix `_total`, and the page ends with `# EOF`, which shows
//! that it was not cut.

use std::fmt::{Display, Formatter, Result, Write};
use std::time::UNIX_EPOCH;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use super::exemplars::{Exemplar, Found, labels_key};

const TOTAL: &str = "_total";

pub(super) fn page(families: &[MetricFamily], found: &Found) -> String {
    let mut page = String::new();
    for family in families {
        let _ = write_family(&mut page, family, found);
    }
    page.push_str("# EOF\n");
    page
}

fn write_family(page: &mut String, family: &MetricFamily, found: &Found) -> Result {
    let name = family.name();
    let (described, kind) = match (family.get_field_type(), name.strip_suffix(TOTAL)) {
        (MetricType::COUNTER, Some(described)) => (described, "counter"),
        (MetricType::GAUGE, _) => (name, "gauge"),
        (MetricType::HISTOGRAM, _) => (name, "histogram"),
        _ => (name, "unknown"),
    };
    writeln!(page, "# HELP {described} {}", Escaped(family.help()))?;
    writeln!(page, "# TYPE {described} {kind}")?;
    for metric in family.get_metric() {
        match family.get_field_type() {
            MetricType::COUNTER => sample(page, name, metric, metric.get_counter().get_value())?,
            MetricType::HISTOGRAM => histogram(page, name, metric, found)?,
            _ => sample(page, name, metric, metric.get_gauge().get_value())?,
        }
    }
    Ok(())
}

fn histogram(page: &mut String, name: &str, metric: &Metric, found: &Found) -> Result {
    let histogram = metric.get_histogram();
    let own = found.get(name).and_then(|rows| rows.get(&labels_key(metric.get_label())));
    let exemplars = own.map_or(&[][..], Vec::as_slice);
    let bounds = histogram.get_bucket().iter().map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    let all = [(f64::INFINITY, histogram.get_sample_count())];
    for (number, (bound, count)) in bounds.filter(|(bound, _)| bound.is_finite()).chain(all).enumerate() {
        write!(page, "{name}_bucket{}", Labels(metric.get_label(), Some(bound)))?;
        write!(page, " {count}")?;
        if let Some(exemplar) = exemplars.get(number).copied().flatten() {
            write_exemplar(page, &exemplar)?;
        }
        page.push('\n');
    }
    writeln!(page, "{name}_sum{} {}", Labels(metric.get_label(), None), Number(histogram.get_sample_sum()))?;
    writeln!(page, "{name}_count{} {}", Labels(metric.get_label(), None), histogram.get_sample_count())
}

fn sample(page: &mut String, name: &str, metric: &Metric, value: f64) -> Result {
    writeln!(page, "{name}{} {}", Labels(metric.get_label(), None), Number(value))
}

fn write_exemplar(page: &mut String, Exemplar { value, trace, span, at }: &Exemplar) -> Result {
    let at = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    write!(page, " # {{trace_id=\"{trace:032x}\",span_id=\"{span:016x}\"}} {} {at:.3}", Number(*value))
}

/// Labels in braces, or nothing; and the bound of a bucket.
struct Labels<'a>(&'a [LabelPair], Option<f64>);

impl Display for Labels<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self(labels, bound) = self;
        let mut before = '{';
        for label in *labels {
            write!(f, "{before}{}=\"{}\"", label.name(), Escaped(label.value()))?;
            before = ',';
        }
        if let Some(bound) = bound {
            write!(f, "{before}le=\"{}\"", Number(*bound))?;
            before = ',';
        }
        if before == ',' { f.write_char('}') } else { Ok(()) }
    }
}

/// A number as both formats write it.
struct Number(f64);

impl Display for Number {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self.0 {
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            value => value.fmt(f),
        }
    }
}

struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}
