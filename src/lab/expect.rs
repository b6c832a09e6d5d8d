//! Checks a study against the `[[expect]]` ranges of the scenario file.
//!
//! A range applies to the mean over all seeds, or to the ratio to another variant. Choose a range
//! so wide that results of another seed stay inside, and so narrow that a change of behaviour leads
//! out of it.

use crate::error::LabError;
use crate::file::Expectation;
use crate::measure::Measure;
use crate::study::Study;
use crate::table::number;

/// The measures that these expectations need.
pub fn measures(expectations: &[Expectation]) -> Result<Vec<Measure>, LabError> {
    expectations.iter().map(|expected| Ok(expected.measure.parse()?)).collect()
}

/// One message for each unmet expectation.
///
/// # Errors
/// An expectation names an unknown variant or measure.
pub fn unmet(study: &Study, expectations: &[Expectation]) -> Result<Vec<String>, LabError> {
    let mut unmet = Vec::new();
    for expected in expectations {
        let of_name = |name: &String| {
            study.variant(name).ok_or_else(|| {
                LabError::Sweep(format!("an expectation names the variant '{name}', which does not exist"))
            })
        };
        let variant = expected.variant.as_ref().map_or(Ok(0), of_name)?;
        let measure: Measure = expected.measure.parse()?;
        let absent = || LabError::Sweep(format!("{measure} was not measured"));
        let at = study.measures.iter().position(|other| *other == measure).ok_or_else(absent)?;
        let (value, relative) = match &expected.relative_to {
            Some(base) => (1.0 + study.change(of_name(base)?, variant, at).value, format!(" times that of {base}")),
            None => (study.estimate(variant, at).value, String::new()),
        };
        let (low, high) = (expected.min.unwrap_or(f64::NEG_INFINITY), expected.max.unwrap_or(f64::INFINITY));
        if !(low..=high).contains(&value) {
            let name = &study.variants[variant].name;
            let range = match (expected.min, expected.max) {
                (Some(low), Some(high)) => format!("between {} and {}", number(low), number(high)),
                (Some(low), None) => format!("at least {}", number(low)),
                (None, high) => format!("at most {}", number(high.unwrap_or(f64::INFINITY))),
            };
            unmet.push(format!("{name}: {measure} is {}{relative}, expected {range}", number(value)));
        }
    }
    Ok(unmet)
}
