//! Measured load tests as CSV: one line per run, with the load that was sent and the results.
//!
//! Columns may have any order. A line that begins with `#` is a comment. An empty field means the
//! default of the column or, in a measured column, "not measured". Lengths are tokens, times
//! milliseconds.
//!
//! [`columns`] lists them.

use std::collections::BTreeMap;

use crate::engine::MAX_DRAFTS;

/// Columns that hold results, in the order of [`Row::measured`].
pub const MEASURED: [&str; 4] = ["req_per_s", "ttft_p50", "tpot_mean", "e2el_mean"];

const COLUMNS: &[(&str, &str)] = &[
    ("name", "shown in the table (default: the line's number)"),
    ("prompt", "prompt tokens of every request"),
    ("output", "output tokens of every request"),
    ("streams", "closed loop: clients, each sends its next request when the last response is complete"),
    ("requests", "closed loop: requests in all (default: 4 x streams, at least 8)"),
    ("rate", "open loop, instead of streams: Poisson arrivals per second"),
    ("seconds", "open loop: for so long"),
    ("beside_prompt", "open loop: prompt tokens of other requests on the same server, which are not measured"),
    ("beside_output", "open loop: their output tokens"),
    ("beside_rate", "open loop: their arrivals per second (default: none)"),
    ("max_num_batched_tokens", "the server's flag (default: 8192)"),
    ("max_num_seqs", "the server's flag (default: 256)"),
    ("long_prefill_token_threshold", "the server's flag (default: 0)"),
    ("max_loras", "the server's flag (default: 0, LoRA is off)"),
    ("max_cpu_loras", "the server's flag (default: as max_loras)"),
    ("adapters", "distinct adapters that the requests name in turn (default: 0, the base model)"),
    ("base_share", "with adapters: the share of requests that name the base model, 0 (default) or 0.5"),
    ("drafts", "speculative decoding with n-grams: the most drafts of a sequence (default: 0, none)"),
    (
        "accepted",
        "with drafts: share of drafts accepted up to each position, as 0.5;0.25; of kinds of texts in turn: 0.5;0.25|1;1",
    ),
    ("proposed", "with drafts: share of decodes that got a draft (default: 1)"),
    ("draft_tokens", "with drafts: mean tokens of a draft (default: as drafts)"),
    ("greedy", "1: the requests have temperature 0; matters with drafts (default: 0)"),
    ("masked", "1: the requests have allowed_token_ids (default: 0)"),
    ("cpu", "time that the CPU took during the run, as a multiple of the host's constants (default: 1)"),
    ("req_per_s", "measured: requests over the time from the first request to the last token"),
    ("ttft_p50", "measured: median time to the first token, ms"),
    ("tpot_mean", "measured: mean over requests of (E2EL - TTFT) / (output - 1), ms"),
    ("e2el_mean", "measured: mean time to the last token, ms"),
];

const ALIASES: &[(&str, &str)] = &[
    ("kind", "name"),
    ("in", "prompt"),
    ("out", "output"),
    ("c", "streams"),
    ("n", "requests"),
    ("bt", "max_num_batched_tokens"),
    ("seqs", "max_num_seqs"),
    ("req_s", "req_per_s"),
];

/// The list of columns with their descriptions, for `--columns`.
pub fn columns() -> String {
    COLUMNS.iter().map(|(name, what)| format!("{name:29} {what}")).collect::<Vec<_>>().join("\n")
}

/// The column that a header names. Case, spaces, `/`, `-` and the unit `ms` at the end do not
/// matter.
fn column(header: &str) -> Option<&'static str> {
    let plain = header.to_ascii_lowercase().replace([' ', '/', '-'], "_");
    let plain = plain.trim_end_matches("_ms");
    let name = ALIASES.iter().find(|(alias, _)| *alias == plain).map_or(plain, |(_, name)| name);
    COLUMNS.iter().map(|(known, _)| *known).find(|known| *known == name)
}

/// Maximum rows of a file. Every trial of a fit plays all of them.
pub const MAX_ROWS: usize = 1000;
const MAX_REQUESTS: f64 = 100_000.0;

/// Flags of the server that a row was measured on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: u32,
    /// `--max-num-seqs`.
    pub max_num_seqs: u32,
    /// `--long-prefill-token-threshold`.
    pub long_prefill_token_threshold: u32,
    /// `--max-loras`; 0 without LoRA.
    pub max_loras: u32,
    /// `--max-cpu-loras`.
    pub max_cpu_loras: u32,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            long_prefill_token_threshold: 0,
            max_loras: 0,
            max_cpu_loras: 0,
        }
    }
}

/// The arrival pattern of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// A fixed number of clients. Each sends its next request when the last response is complete.
    Closed {
        /// Clients.
        streams: u32,
        /// Requests in all.
        requests: u32,
    },
    /// Poisson arrivals.
    Open {
        /// Requests per second.
        rate: f64,
        /// Duration of the run, seconds.
        seconds: f64,
        /// Other requests on the same server.
        beside: Option<BesideLoad>,
    },
}

/// Requests that share the server with the measured requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BesideLoad {
    /// Prompt tokens of each.
    pub prompt: u32,
    /// Output tokens of each.
    pub output: u32,
    /// Requests per second.
    pub rate: f64,
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Shown in the table.
    pub name: String,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens.
    pub output: u32,
    /// The arrival pattern.
    pub load: Load,
    /// The flags of the server.
    pub server: Server,
    /// Distinct adapters that requests name in turn.
    pub adapters: u32,
    /// With adapters: whether every other request names the base model.
    pub half_base: bool,
    /// The most drafts of a sequence; 0 without speculative decoding.
    pub drafts: u32,
    /// Share of drafts accepted up to each position, for each kind of text.
    pub accepted: Vec<Vec<f64>>,
    /// Share of decodes that got a draft.
    pub proposed: f64,
    /// Mean tokens of a draft.
    pub draft_tokens: Option<f64>,
    /// Whether the requests have temperature 0.
    pub is_greedy: bool,
    /// Whether the requests have `allowed_token_ids`.
    pub masked: bool,
    /// Time that the CPU took, as a multiple of the host's constants.
    pub cpu: f64,
    /// The columns of [`MEASURED`]: requests per second, then milliseconds; `None` if not measured.
    pub measured: [Option<f64>; 4],
}

impl Row {
    /// Whether the load is a single stream. The TTFT of a single stream is the sum of a few
    /// latencies, and the run may include the server's first requests.
    pub fn is_single_stream(&self) -> bool {
        matches!(self.load, Load::Closed { streams: 1, .. })
    }
}

/// Why a file of rows cannot be read.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error("the data has no {0}")]
    Nothing(&'static str),
    #[error("unknown column '{0}'; known: {known}", known = COLUMNS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))]
    UnknownColumn(String),
    #[error("line {line}: {column}: {problem}")]
    Field { line: usize, column: &'static str, problem: String },
    #[error("more than {MAX_ROWS} rows; fit to a part of them")]
    TooMany,
}

/// Reads a file of rows.
pub fn parse(text: &str) -> Result<Vec<Row>, RowError> {
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    let mut filled = lines.by_ref().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let (_, header) = filled.next().ok_or(RowError::Nothing("header line"))?;
    let mut columns = Vec::new();
    for name in header.split(',').map(str::trim) {
        columns.push(column(name).ok_or_else(|| RowError::UnknownColumn(name.to_owned()))?);
    }
    let mut rows = Vec::new();
    for (line, text) in filled {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        if fields.len() != columns.len() {
            let problem = format!("{} fields under {} columns", fields.len(), columns.len());
            return Err(RowError::Field { line, column: columns[0], problem });
        }
        let fields = columns.iter().copied().zip(fields).filter(|(_, field)| !field.is_empty()).collect();
        rows.push(Line { number: line, fields }.row()?);
        if rows.len() > MAX_ROWS {
            return Err(RowError::TooMany);
        }
    }
    if rows.is_empty() { Err(RowError::Nothing("rows")) } else { Ok(rows) }
}

struct Line<'a> {
    number: usize,
    fields: BTreeMap<&'static str, &'a str>,
}

impl Line<'_> {
    fn wrong<T>(&self, column: &'static str, problem: impl Into<String>) -> Result<T, RowError> {
        Err(RowError::Field { line: self.number, column, problem: problem.into() })
    }

    fn number(&self, column: &'static str, least: f64, most: f64) -> Result<Option<f64>, RowError> {
        let Some(text) = self.fields.get(column) else { return Ok(None) };
        match text.parse::<f64>() {
            Ok(value) if (least..=most).contains(&value) => Ok(Some(value)),
            _ => self.wrong(column, format!("'{text}' is not a number between {least} and {most}")),
        }
    }

    fn whole(&self, column: &'static str, least: u32, default: Option<u32>) -> Result<u32, RowError> {
        match (self.number(column, f64::from(least), f64::from(1u32 << 24))?, default) {
            (Some(value), _) if value.fract() == 0.0 => Ok(value as u32),
            (Some(value), _) => self.wrong(column, format!("{value} is not a whole number")),
            (None, Some(default)) => Ok(default),
            (None, None) => self.wrong(column, "is missing"),
        }
    }

    fn rates(&self, column: &'static str) -> Result<Vec<Vec<f64>>, RowError> {
        let Some(text) = self.fields.get(column) else { return Ok(Vec::new()) };
        let rate = |text: &str| text.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
        let rates: Option<Vec<Vec<f64>>> = text.split('|').map(|kind| kind.split(';').map(rate).collect()).collect();
        rates.map_or_else(|| self.wrong(column, format!("'{text}' is not a list of shares such as 0.5;0.25")), Ok)
    }

    fn row(&self) -> Result<Row, RowError> {
        let max_loras = self.whole("max_loras", 0, Some(0))?;
        let server = Server {
            max_num_batched_tokens: self.whole("max_num_batched_tokens", 1, Some(8192))?,
            max_num_seqs: self.whole("max_num_seqs", 1, Some(256))?,
            long_prefill_token_threshold: self.whole("long_prefill_token_threshold", 0, Some(0))?,
            max_loras,
            max_cpu_loras: self.whole("max_cpu_loras", max_loras, Some(max_loras))?,
        };
        let adapters = self.whole("adapters", 0, Some(0))?;
        if adapters > 0 && max_loras == 0 {
            return self.wrong("adapters", "needs max_loras of at least 1");
        }
        let base_share = self.number("base_share", 0.0, 0.5)?.unwrap_or(0.0);
        if base_share != 0.0 && base_share != 0.5 {
            return self.wrong("base_share", "is 0 or 0.5");
        }
        let mut measured = [None; 4];
        for (value, column) in measured.iter_mut().zip(MEASURED) {
            *value = self.number(column, 1e-6, 1e12)?;
        }
        let output = self.whole("output", 1, None)?;
        if output == 1 && measured[2].is_some() {
            return self.wrong(MEASURED[2], "needs an output of at least 2 tokens");
        }
        Ok(Row {
            name: self.fields.get("name").map_or_else(|| format!("line {}", self.number), |name| (*name).to_owned()),
            prompt: self.whole("prompt", 1, None)?,
            output,
            load: self.load()?,
            server,
            adapters,
            half_base: base_share > 0.0,
            drafts: self.whole("drafts", 0, Some(0))?.min(MAX_DRAFTS),
            accepted: self.rates("accepted")?,
            proposed: self.number("proposed", 0.0, 1.0)?.unwrap_or(1.0),
            draft_tokens: self.number("draft_tokens", 0.5, f64::from(MAX_DRAFTS))?,
            is_greedy: self.whole("greedy", 0, Some(0))? > 0,
            masked: self.whole("masked", 0, Some(0))? > 0,
            cpu: self.number("cpu", 0.1, 10.0)?.unwrap_or(1.0),
            measured,
        })
    }

    fn load(&self) -> Result<Load, RowError> {
        match (self.fields.contains_key("streams"), self.number("rate", 1e-6, 1e6)?) {
            (true, None) => {
                let streams = self.whole("streams", 1, None)?;
                let requests = self.whole("requests", 1, Some(streams.saturating_mul(4).max(8)))?;
                if f64::from(requests) > MAX_REQUESTS {
                    return self.wrong("requests", format!("more than {MAX_REQUESTS}"));
                }
                Ok(Load::Closed { streams, requests })
            }
            (false, Some(rate)) => {
                let Some(seconds) = self.number("seconds", 1e-3, 1e5)? else {
                    return self.wrong("seconds", "is missing beside a rate");
                };
                let beside = match self.number("beside_rate", 1e-6, 1e6)? {
                    Some(rate) => Some(BesideLoad {
                        prompt: self.whole("beside_prompt", 1, None)?,
                        output: self.whole("beside_output", 1, None)?,
                        rate,
                    }),
                    None => None,
                };
                if (rate + beside.map_or(0.0, |other| other.rate)) * seconds > MAX_REQUESTS {
                    return self.wrong("seconds", format!("comes to more than {MAX_REQUESTS} requests"));
                }
                Ok(Load::Open { rate, seconds, beside })
            }
            _ => self.wrong("streams", "give either streams or rate"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_its_load_and_its_measurements() {
        let rows = parse("# made up\nprompt,output,streams,req_per_s,tpot_mean\n\n512, 128 ,8,10.5,\n").unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].prompt, rows[0].output, rows[0].name.as_str()), (512, 128, "line 4"));
        assert_eq!(rows[0].load, Load::Closed { streams: 8, requests: 32 });
        assert_eq!(rows[0].measured, [Some(10.5), None, None, None]);
    }

    #[test]
    fn one_token_has_no_time_between_tokens() {
        let error = parse("prompt,output,streams,tpot_mean\n8,2,1,5\n8,1,1,5").unwrap_err().to_string();
        assert_eq!(error, "line 3: tpot_mean: needs an output of at least 2 tokens");
    }

    #[test]
    fn headers_may_be_abbreviated() {
        let rows = parse("Kind,in,out,C,n,bt,seqs,req/s,TTFT p50,TPOT mean (ms)").map_err(|error| error.to_string());
        assert!(rows.unwrap_err().contains("TPOT mean (ms)"));
        let row = &parse("Kind,in,out,C,n,bt,seqs,req/s,TTFT p50 ms\na,1,2,3,4,50,6,7,8").unwrap()[0];
        assert_eq!((row.name.as_str(), row.prompt, row.output), ("a", 1, 2));
        assert_eq!(row.load, Load::Closed { streams: 3, requests: 4 });
        assert_eq!((row.server.max_num_batched_tokens, row.server.max_num_seqs), (50, 6));
        assert_eq!(row.measured, [Some(7.0), Some(8.0), None, None]);
        assert!(columns().lines().count() == COLUMNS.len());
    }

    #[test]
    fn an_open_loop_may_have_other_requests_beside_it() {
        let text = "prompt,output,rate,seconds,beside_prompt,beside_output,beside_rate\n200,128,15,20,16000,64,1.5";
        let load = Load::Open {
            rate: 15.0,
            seconds: 20.0,
            beside: Some(BesideLoad { prompt: 16_000, output: 64, rate: 1.5 }),
        };
        assert_eq!(parse(text).unwrap()[0].load, load);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, part) in [
            ("", "no header"),
            ("prompt,output,streams", "no rows"),
            ("prompt,colour\n1,2", "unknown column 'colour'; known: name"),
            ("prompt,output,streams\n1,2", "line 2: prompt: 2 fields under 3 columns"),
            ("prompt,output,streams\n,2,1", "line 2: prompt: is missing"),
            ("prompt,output,streams\n1,2,x", "line 2: streams: 'x' is not a number"),
            ("prompt,output,streams\n1,2,1.5", "1.5 is not a whole number"),
            ("prompt,output\n1,2", "either streams or rate"),
            ("prompt,output,rate\n1,2,3", "seconds: is missing"),
            ("prompt,output,streams,adapters\n1,2,3,1", "needs max_loras"),
            ("prompt,output,streams,drafts,accepted\n1,2,3,2,0.5;x", "accepted: '0.5;x'"),
            ("prompt,output,streams,cpu\n1,2,3,0", "cpu: '0' is not a number between"),
            ("prompt,output,streams,tpot_mean\n1,2,3,-1", "tpot_mean: '-1'"),
            ("prompt,output,rate,seconds\n1,2,1000,1000", "more than 100000 requests"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
