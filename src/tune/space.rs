//! The settings that a tuning may try: dimensions with values, and conditions.
//!
//! The values of a dimension are in an order in which neighbours are alike. The value `default`
//! leaves the key alone, and so does a dimension whose condition `when` does not hold. A setting is
//! in the space if it breaks no constraint. A constraint on a key that is left alone does not
//! apply.
//!
//! Bounds: [`MAX_SETTINGS`], [`MAX_VALUES`].

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::constraint::Condition;
use crate::error::TuneError;
use crate::file::{DimensionTable, Number, TuneTable};
use crate::setting::{RestartCost, Setting, identity};
use sluice_config::ArgValue;
use sluice_core::base::Rng;

/// The most settings of a space.
pub const MAX_SETTINGS: usize = 20_000;
/// The most values of a dimension.
pub const MAX_VALUES: usize = 1_000;
/// The value that leaves a key alone.
const DEFAULT: &str = "default";
/// Distance between two unordered values; an ordered dimension has length 1.
const UNORDERED: f64 = 0.7;
/// The costs of a change, the highest first.
const COSTS: [RestartCost; 3] = [RestartCost::Compile, RestartCost::Restart, RestartCost::None];

/// A key and the values that it may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimension {
    /// The key.
    pub key: String,
    /// The values; `None` leaves the key alone.
    pub values: Vec<Option<ArgValue>>,
    /// The cost of a change.
    pub cost: RestartCost,
    when: Option<Condition>,
}

/// Dimensions and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// The dimensions, in the order of the file.
    pub dimensions: Vec<Dimension>,
    constraints: Vec<Condition>,
    /// Settings besides the grid, to which constraints do not apply.
    singles: Vec<Setting>,
}

impl Dimension {
    fn new(table: &DimensionTable, keys: &[&str]) -> Result<Self, TuneError> {
        let bad = |why: &str| TuneError::Dimension { key: table.key.clone(), why: why.to_owned() };
        let range = table.from.zip(table.to);
        let values = match (&table.values[..], range) {
            ([], None) => return Err(bad("needs values, or from and to")),
            ([], Some((from, to))) => range_of(from, to, table).map_err(|why| bad(&why))?,
            (values, None) => values.to_vec(),
            _ => return Err(bad("has values and a range; give one of them")),
        };
        if values.len() > MAX_VALUES {
            return Err(bad(&format!("has more than {MAX_VALUES} values")));
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = values.iter().find(|value| !names.insert(value.to_string())) {
            return Err(bad(&format!("has the value {twice} twice")));
        }
        let is_default = |value: &ArgValue| matches!(value, ArgValue::Text(text) if text == DEFAULT);
        let values = values.into_iter().map(|value| (!is_default(&value)).then_some(value)).collect();
        let when = table.when.as_ref().map(|text| Condition::parse(text, keys)).transpose()?;
        Ok(Self { key: table.key.clone(), values, cost: RestartCost::of(&table.key), when })
    }

    /// Whether all values are numbers, or the default.
    fn is_ordered(&self) -> bool {
        self.values.iter().flatten().all(|value| value.number().is_some())
    }
}

/// The values from `from` to `to`, inclusive if the step or factor reaches it.
fn range_of(from: Number, to: Number, table: &DimensionTable) -> Result<Vec<ArgValue>, String> {
    let (low, high) = (from.value(), to.value());
    if !(low.is_finite() && high.is_finite() && low <= high) {
        return Err("needs from <= to".to_owned());
    }
    let next: Box<dyn Fn(f64) -> f64> = match (table.step, table.factor) {
        (Some(step), None) if step.value() > 0.0 => Box::new(move |at| at + step.value()),
        (None, Some(factor)) if factor > 1.0 && low > 0.0 => Box::new(move |at| at * factor),
        (None, None) => return Err("needs a step, or a factor, for its range".to_owned()),
        _ => return Err("needs a step above 0, or a factor above 1 and a range above 0".to_owned()),
    };
    let whole = from.is_whole() && to.is_whole() && table.step.is_none_or(Number::is_whole);
    let (mut values, mut at) = (Vec::new(), low);
    // The comparison has a tolerance, because steps add up rounding errors.
    while at <= high * (1.0 + 1e-9) + 1e-12 && values.len() <= MAX_VALUES {
        let tidy = (at * 1e9).round() / 1e9;
        values.push(if whole { ArgValue::Int(at.round() as i64) } else { ArgValue::Float(tidy) });
        at = next(at);
    }
    Ok(values)
}

impl Space {
    /// The space of a table.
    pub fn new(table: &TuneTable) -> Result<Self, TuneError> {
        let TuneTable { dimension: tables, constraints, setting, .. } = table;
        let keys: Vec<&str> = tables.iter().map(|table| table.key.as_str()).collect();
        if let Some(table) = tables.iter().enumerate().find(|(at, table)| keys[..*at].contains(&table.key.as_str())) {
            return Err(TuneError::Dimension { key: table.1.key.clone(), why: "is given twice".to_owned() });
        }
        let dimensions = tables.iter().map(|table| Dimension::new(table, &keys)).collect::<Result<_, _>>()?;
        let constraints = constraints.iter().map(|text| Condition::parse(text, &keys)).collect::<Result<_, _>>()?;
        Ok(Self { dimensions, constraints, singles: setting.clone() })
    }

    /// All settings: the defaults, then in the order of the dimensions, the last one varying
    /// fastest.
    pub fn settings(&self) -> Result<Vec<Setting>, TuneError> {
        let mut settings = vec![Setting::new()];
        for dimension in &self.dimensions {
            let mut grown = Vec::with_capacity(settings.len());
            for setting in &settings {
                grown.extend(dimension.extended(setting));
                if grown.len() > MAX_SETTINGS {
                    return Err(TuneError::TooLarge(MAX_SETTINGS));
                }
            }
            settings = grown;
        }
        let total = settings.len();
        let mut broken = vec![0usize; self.constraints.len()];
        settings.retain(|setting| match self.broken(setting) {
            Some(constraint) => {
                broken[constraint] += 1;
                false
            }
            None => true,
        });
        settings.extend(self.singles.iter().cloned());
        let mut seen = HashSet::from([identity(&Setting::new())]);
        settings.retain(|setting| seen.insert(identity(setting)));
        if settings.is_empty() {
            return Err(TuneError::EmptySpace(self.why_empty(total, &broken)));
        }
        settings.insert(0, Setting::new());
        Ok(settings)
    }

    fn why_empty(&self, total: usize, broken: &[usize]) -> String {
        let most = broken.iter().zip(&self.constraints).max_by_key(|(count, _)| **count);
        match most {
            None => "it has no dimension with a value besides the default; give [[tune.dimension]]".to_owned(),
            Some((0, _)) => "its only setting is the default; give more values".to_owned(),
            Some((count, condition)) => {
                format!("all of its {total} settings break a constraint, {count} of them '{}'", condition.text())
            }
        }
    }

    fn broken(&self, setting: &Setting) -> Option<usize> {
        self.constraints.iter().position(|constraint| constraint.holds(setting) == Some(false))
    }

    /// All keys that a setting may have.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let singles = self.singles.iter().flat_map(|setting| setting.keys());
        self.dimensions.iter().map(|dimension| &dimension.key).chain(singles).map(String::as_str)
    }

    /// Numbers of `settings` in a random order in which expensive keys change as seldom as
    /// possible.
    pub fn order(&self, settings: &[Setting], seed: u64) -> Vec<usize> {
        let rank = |setting: &Setting, cost: RestartCost| {
            let text = self.costly(setting, cost);
            Rng::new(seed ^ twox_hash::XxHash3_64::oneshot(text.as_bytes())).next_u64()
        };
        let mut order: Vec<usize> = (0..settings.len()).collect();
        order.sort_by_cached_key(|at| COSTS.map(|cost| rank(&settings[*at], cost)));
        order
    }

    /// [`order`](Self::order) with the best of `scores` as early as possible; equal ones keep their
    /// places.
    pub fn best_first(&self, settings: &[Setting], order: &[usize], scores: &[f64]) -> Vec<usize> {
        // Best score and first place of each group of settings with the same costly values.
        let mut groups: BTreeMap<(RestartCost, String), (f64, usize)> = BTreeMap::new();
        for (place, at) in order.iter().enumerate() {
            for cost in COSTS {
                let group = (cost, self.costly(&settings[*at], cost));
                let (best, _) = groups.entry(group).or_insert((f64::NEG_INFINITY, place));
                *best = best.max(scores[*at]);
            }
        }
        let key = |at: &usize| COSTS.map(|cost| groups[&(cost, self.costly(&settings[*at], cost))]);
        let by_level = |one: &[(f64, usize); 3], other: &[(f64, usize); 3]| {
            let levels = one.iter().zip(other).map(|(one, other)| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
            levels.fold(Ordering::Equal, Ordering::then)
        };
        let mut keyed: Vec<([(f64, usize); 3], usize)> = order.iter().map(|at| (key(at), *at)).collect();
        keyed.sort_by(|one, other| by_level(&one.0, &other.0));
        keyed.into_iter().map(|(_, at)| at).collect()
    }

    fn costly(&self, setting: &Setting, cost: RestartCost) -> String {
        let costly = self.dimensions.iter().filter(|dimension| dimension.cost >= cost);
        costly.map(|dimension| setting.get(&dimension.key).map_or("-".to_owned(), ToString::to_string) + " ").collect()
    }

    /// Coordinates of a setting: 0 to 1 for an ordered dimension; otherwise one coordinate for each
    /// value. A key that is left alone lies where `default` is listed, otherwise in the middle.
    pub fn coordinates(&self, setting: &Setting) -> Vec<f64> {
        let mut coordinates = Vec::new();
        for dimension in &self.dimensions {
            let value = setting.get(&dimension.key);
            let place = dimension.values.iter().position(|listed| listed.as_ref() == value);
            let last = (dimension.values.len().max(2) - 1) as f64;
            if dimension.is_ordered() {
                coordinates.push(place.map_or(0.5, |place| place as f64 / last));
            } else {
                let of = |at| if place == Some(at) { UNORDERED / std::f64::consts::SQRT_2 } else { 0.0 };
                coordinates.extend((0..dimension.values.len()).map(of));
            }
        }
        coordinates
    }
}

impl Dimension {
    /// The setting with each value of the dimension, or unchanged where the dimension does not
    /// apply.
    fn extended<'a>(&'a self, setting: &'a Setting) -> impl Iterator<Item = Setting> + 'a {
        let applies = self.when.as_ref().is_none_or(|when| when.holds(setting) == Some(true));
        let values: &[Option<ArgValue>] = if applies { &self.values } else { &[None] };
        values.iter().map(move |value| {
            let mut setting = setting.clone();
            if let Some(value) = value {
                setting.insert(self.key.clone(), value.clone());
            }
            setting
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::{name, value};
    use proptest::prelude::*;

    fn space(text: &str) -> Result<Space, TuneError> {
        Space::new(&toml::from_str(text).unwrap())
    }

    fn names(text: &str) -> Vec<String> {
        space(text).unwrap().settings().unwrap().iter().map(name).collect()
    }

    #[test]
    fn lists_ranges_factors_and_defaults_are_the_values() {
        let values = |text: &str| {
            let space = space(&format!("[[dimension]]\nkey = \"vllm.x\"\n{text}")).unwrap();
            let values = space.dimensions[0].values.iter();
            values.map(|value| value.as_ref().map_or("-".to_owned(), ToString::to_string)).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(values("values = [\"default\", 3, \"auto\"]"), "- 3 auto");
        assert_eq!(values("from = 512\nto = 4096\nfactor = 2"), "512 1024 2048 4096");
        assert_eq!(values("from = 0.8\nto = 0.9\nstep = 0.05"), "0.8 0.85 0.9");
        assert_eq!(values("from = 1\nto = 6\nstep = 2"), "1 3 5");
    }

    #[test]
    fn conditions_leave_keys_alone_and_constraints_leave_settings_out() {
        let text = "constraints = [\"vllm.b <= vllm.a\"]\n\
            [[dimension]]\nkey = \"vllm.a\"\nvalues = [1, 2]\n\
            [[dimension]]\nkey = \"vllm.b\"\nvalues = [1, 2]\n\
            [[dimension]]\nkey = \"vllm.c\"\nvalues = [7, 8]\nwhen = \"vllm.a = 2\"\n\
            [[setting]]\n\"vllm.d\" = true\n";
        let expected = ["defaults", "a=1 b=1", "a=2 b=1 c=7", "a=2 b=1 c=8", "a=2 b=2 c=7", "a=2 b=2 c=8", "d=true"];
        assert_eq!(names(text), expected);
    }

    #[test]
    fn settings_of_two_pools_that_end_alike_are_two() {
        let text = "[[dimension]]\nkey = \"pool.short.slots\"\nvalues = [\"default\", 16]\n\
            [[dimension]]\nkey = \"pool.long.slots\"\nvalues = [\"default\", 16]\n\
            [[setting]]\n\"pool.long.slots\" = 16\n[[setting]]\n\"pool.chat.slots\" = 16\n";
        let (short, long) = ("pool.short.slots=16", "pool.long.slots=16");
        let expected = ["defaults", long, short, &format!("{long} {short}"), "pool.chat.slots=16"];
        assert_eq!(names(text), expected);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_key() {
        for (text, reason) in [
            ("", "needs values"),
            ("values = [1, 1]", "the value 1 twice"),
            ("from = 2\nto = 1\nstep = 1", "from <= to"),
            ("from = 1\nto = 2", "needs a step"),
            ("from = 0\nto = 2\nfactor = 2", "a range above 0"),
            ("values = [1]\nfrom = 1\nto = 2", "give one of them"),
            ("from = 1\nto = 2000\nstep = 1", "more than 1000"),
        ] {
            let error = space(&format!("[[dimension]]\nkey = \"vllm.x\"\n{text}")).unwrap_err().to_string();
            assert!(error.contains("'vllm.x'") && error.contains(reason), "{error}");
        }
        let many = "[[dimension]]\nkey = \"vllm.K\"\nfrom = 1\nto = 200\nstep = 1\n";
        let many: String = ["a", "b", "c"].map(|key| many.replace('K', key)).concat();
        assert!(space(&many).unwrap().settings().unwrap_err().to_string().contains("more than 20000"));
    }

    #[test]
    fn an_order_changes_expensive_keys_as_seldom_as_possible() {
        let text = "[[dimension]]\nkey = \"pool.all.slots\"\nvalues = [1, 2, 3]\n\
            [[dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [1, 2, 3, 4]\n\
            [[dimension]]\nkey = \"vllm.watermark\"\nvalues = [0.1, 0.2]\n";
        let space = space(text).unwrap();
        let settings = space.settings().unwrap();
        for seed in 0..20 {
            let order = space.order(&settings[1..], seed);
            let changes = |key: &str| {
                let values: Vec<_> = order.iter().map(|at| &settings[1..][*at][key]).collect();
                values.windows(2).filter(|pair| pair[0] != pair[1]).count()
            };
            assert_eq!(changes("vllm.max-num-seqs"), 3);
            assert!(changes("vllm.watermark") <= 7);
        }
        assert_ne!(space.order(&settings, 1), space.order(&settings, 2));
    }

    #[test]
    fn neighbours_are_near_and_other_names_are_not() {
        let text = "[[dimension]]\nkey = \"vllm.a\"\nvalues = [1, 2, 3]\n\
            [[dimension]]\nkey = \"pool.all.policy\"\nvalues = [\"x\", \"y\"]\n";
        let space = space(text).unwrap();
        let at = |a: &str, policy: &str| {
            let pairs = [("vllm.a".to_owned(), value(a)), ("pool.all.policy".to_owned(), value(policy))];
            space.coordinates(&pairs.into())
        };
        let distance =
            |one: Vec<f64>, other: Vec<f64>| one.iter().zip(&other).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        assert!((distance(at("1", "x"), at("2", "x")) - 0.5).abs() < 1e-9);
        assert!((distance(at("1", "x"), at("1", "y")) - UNORDERED).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn every_setting_is_allowed_and_none_is_given_twice(
            sizes in proptest::collection::vec(1usize..5, 1..4),
            bound in 1usize..5,
        ) {
            let dimension = |(at, size): (usize, &usize)| format!(
                "[[dimension]]\nkey = \"vllm.k{at}\"\nfrom = 1\nto = {size}\nstep = 1\n"
            );
            let dimensions: String = sizes.iter().enumerate().map(dimension).collect();
            let space = space(&format!("constraints = [\"vllm.k0 <= {bound}\"]\n{dimensions}")).unwrap();
            let settings = space.settings().unwrap();
            let expected: usize = sizes[0].min(bound) * sizes[1..].iter().product::<usize>();
            prop_assert_eq!(settings.len(), expected + 1);
            prop_assert!(settings.iter().all(|setting| space.broken(setting).is_none()));
            let names: BTreeSet<String> = settings.iter().map(name).collect();
            prop_assert_eq!(names.len(), settings.len());
        }
    }
}
