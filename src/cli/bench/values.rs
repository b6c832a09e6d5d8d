//! Parsers for the values of flags that are more than a number.
//!
//! Every error quotes the value and shows a correct one; clap puts the flag's name before it.
//! `plan` and `requests` check how flags fit together.

use std::str::FromStr;

use sluice_bench::{Class, Length, Prefix, PrefixKind, Slo};

/// A number above 0, or `inf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate(pub(super) f64);

impl Rate {
    pub(super) fn finite(self) -> Option<f64> {
        self.0.is_finite().then_some(self.0)
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value: f64 = text.parse().map_err(|_| format!("'{text}' is not a number; write 12.5 or inf"))?;
        if value > 0.0 { Ok(Self(value)) } else { Err(format!("{text} is not above 0; write 12.5 or inf")) }
    }
}

/// Rates, each with its length in seconds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Steps(pub(super) Vec<(f64, f64)>);

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let step = |step: &str| {
            let (rate, time) = step.split_once('x')?;
            let positive = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
            Some((positive(rate)?, positive(time)?))
        };
        let bad = |part: &str| format!("'{part}' is not RATExSECONDS; write steps like 5x30,20x10,5x30");
        text.split(',').map(|part| step(part).ok_or_else(|| bad(part))).collect::<Result<_, _>>().map(Self)
    }
}

/// `--random-range-ratio`: one ratio for both lengths, or one for each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RangeRatio {
    pub(super) input: f64,
    pub(super) output: f64,
}

impl FromStr for RangeRatio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("'{text}' is not a ratio; write 0.2, or {{\"input\": 0.2, \"output\": 0.1}}, from 0 to below 1");
        let ratio = match text.trim_start().starts_with('{') {
            true => {
                let json: serde_json::Value = serde_json::from_str(text).map_err(|_| bad())?;
                let number = |key: &str| json.get(key).and_then(serde_json::Value::as_f64).ok_or_else(bad);
                Self { input: number("input")?, output: number("output")? }
            }
            false => {
                let both = text.parse().map_err(|_| bad())?;
                Self { input: both, output: both }
            }
        };
        let sound = [ratio.input, ratio.output].into_iter().all(|ratio| (0.0..1.0).contains(&ratio));
        if sound { Ok(ratio) } else { Err(bad()) }
    }
}

/// One objective of `--goodput`; the other bounds are absent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Goodput(Slo);

impl FromStr for Goodput {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, millis) = text.split_once(':').ok_or_else(|| format!("'{text}' is not KEY:MS; write ttft:300"))?;
        let mut slo = Slo::default();
        bound(&mut slo, key, millis)?;
        Ok(Self(slo))
    }
}

impl Goodput {
    /// All objectives in one. If a key is given twice, the last objective counts.
    pub(super) fn all(goodput: &[Self]) -> Slo {
        goodput.iter().fold(Slo::default(), |all, Self(one)| Slo {
            ttft: one.ttft.or(all.ttft),
            tpot: one.tpot.or(all.tpot),
            e2el: one.e2el.or(all.e2el),
        })
    }
}

fn bound(slo: &mut Slo, key: &str, millis: &str) -> Result<(), String> {
    let bound = match key {
        "ttft" => &mut slo.ttft,
        "tpot" => &mut slo.tpot,
        "e2el" => &mut slo.e2el,
        _ => return Err(format!("'{key}' is not an objective; use ttft, tpot or e2el")),
    };
    *bound = millis.parse().ok().filter(|millis: &f64| millis.is_finite() && *millis >= 0.0);
    bound.map(drop).ok_or_else(|| format!("'{millis}' is not a number of milliseconds; write ttft:300"))
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClassSpec(pub(super) Class);

impl FromStr for ClassSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const KEYS: &str = "weight, in, out, prefix, prefixes, ttft, tpot, e2el";
        let (name, rest) = text.split_once(':').ok_or("write it like short:weight=15,in=200,out=128")?;
        let mut class = Class {
            name: name.to_owned(),
            prompt: Length::Exactly(1024),
            output: Length::Exactly(128),
            weight: 1.0,
            prefix: Prefix::default(),
            slo: Slo::default(),
        };
        if name.is_empty() {
            return Err("a class needs a name: short:weight=15,in=200,out=128".into());
        }
        for part in rest.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("'{part}' is not KEY=VALUE"))?;
            let length = || value.parse::<Length>().map_err(|error| error.to_string());
            let number = || value.parse::<f64>().map_err(|_| format!("'{value}' of {key} is not a number"));
            match key {
                "weight" => class.weight = number()?,
                "in" => class.prompt = length()?,
                "out" => class.output = length()?,
                "prefix" => class.prefix.kind = PrefixKind::Share(share(value)?),
                "prefixes" => {
                    class.prefix.groups = value.parse().map_err(|_| format!("'{value}' of {key} is not a count"))?
                }
                "ttft" | "tpot" | "e2el" => bound(&mut class.slo, key, value)?,
                _ => return Err(format!("a class has no key '{key}'; its keys are {KEYS}")),
            }
        }
        Ok(Self(class))
    }
}

pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not KEY=VALUE"))?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is not a number from 0 to 1"))
}

pub(super) fn custom_length(text: &str) -> Result<i64, String> {
    match text.parse() {
        Ok(length @ (-1 | 1..=0xffff_ffff)) => Ok(length),
        _ => Err("give a number of tokens, or -1 for those of each line".to_owned()),
    }
}

pub(super) fn percentile(text: &str) -> Result<f64, String> {
    let p = text.parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p));
    p.ok_or_else(|| format!("'{text}' is not a percentile, a number from 0 to 100"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_understood() {
        assert_eq!("inf".parse::<Rate>().unwrap().finite(), None);
        assert_eq!("5x30,0.5x10".parse::<Steps>().unwrap(), Steps(vec![(5.0, 30.0), (0.5, 10.0)]));
        assert_eq!("0.25".parse::<RangeRatio>().unwrap(), RangeRatio { input: 0.25, output: 0.25 });
        let each = r#"{"input": 0.1, "output": 0.5}"#.parse::<RangeRatio>().unwrap();
        assert_eq!(each, RangeRatio { input: 0.1, output: 0.5 });
        let slo = Goodput::all(&["ttft:300".parse().unwrap(), "e2el:2000.5".parse().unwrap()]);
        assert_eq!(slo, Slo { ttft: Some(300.0), tpot: None, e2el: Some(2000.5) });
        let class =
            "short:weight=15,in=100-300,out=lognormal:80:0.5,prefix=0.5,prefixes=4,tpot=50".parse::<ClassSpec>();
        let class = class.unwrap().0;
        assert_eq!(
            (class.name.as_str(), class.weight, class.prompt),
            ("short", 15.0, Length::Between { min: 100, max: 300 })
        );
        assert_eq!(class.prefix, Prefix { kind: PrefixKind::Share(0.5), groups: 4, warm: 1.0 });
        assert_eq!(class.slo.tpot, Some(50.0));
    }

    #[test]
    fn what_is_not_understood_is_quoted_with_what_to_write() {
        let errors = [
            "0".parse::<Rate>().unwrap_err(),
            "soon".parse::<Rate>().unwrap_err(),
            "5x".parse::<Steps>().unwrap_err(),
            "1.0".parse::<RangeRatio>().unwrap_err(),
            "itl:5".parse::<Goodput>().unwrap_err(),
            "ttft=5".parse::<Goodput>().unwrap_err(),
            "ttft:x".parse::<Goodput>().unwrap_err(),
            "short".parse::<ClassSpec>().unwrap_err(),
            "short:length=3".parse::<ClassSpec>().unwrap_err(),
            "short:in=0".parse::<ClassSpec>().unwrap_err(),
            pair("x").unwrap_err(),
            share("2").unwrap_err(),
            percentile("101").unwrap_err(),
        ];
        insta::assert_snapshot!(errors.join("\n"));
    }
}
