//! The times that vLLM itself measured for a request (`--enable-per-request-metrics`): the member
//! `metrics` of a whole response, of the usage event of a stream, or of the response in the last
//! event of a stream of Responses.
//!
//! `queue_time_ms` is the time from the arrival at the engine until the scheduler takes the
//! request. `time_to_first_token_ms` is the time from then until the first token. The sum of both
//! is the engine's time to first token. Values above [`LONGEST_MS`] or below 0 do not count.

use std::time::Duration;

use super::scan::{JsonKind, ScanError, Scanner};

/// The longest time that is believed, milliseconds: a day.
const LONGEST_MS: f64 = 86_400_000.0;

/// The engine's times of a request with one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineTimes {
    /// In the engine's queue.
    pub queue: Duration,
    /// From the end of the queue time until the first token.
    pub prefill: Duration,
}

/// Reads the value of `metrics`; `None` unless both times are there.
pub(super) fn read(scanner: &mut Scanner<'_>) -> Result<Option<EngineTimes>, ScanError> {
    if scanner.kind()? != JsonKind::Object {
        return scanner.skip().map(|_| None);
    }
    let (mut queue, mut prefill) = (None, None);
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"queue_time_ms" => queue = time(scanner)?,
            b"time_to_first_token_ms" => prefill = time(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(queue.zip(prefill).map(|(queue, prefill)| EngineTimes { queue, prefill }))
}

fn time(scanner: &mut Scanner<'_>) -> Result<Option<Duration>, ScanError> {
    if scanner.kind()? != JsonKind::Number {
        return scanner.skip().map(|_| None);
    }
    let ms = std::str::from_utf8(scanner.number()?).ok().and_then(|text| text.parse::<f64>().ok());
    let ms = ms.filter(|ms| (0.0..=LONGEST_MS).contains(ms));
    Ok(ms.map(|ms| Duration::from_secs_f64(ms / 1e3)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::event::Dialect;
    use crate::openai::{chunk, response};

    const METRICS: &str = r#""metrics":{"time_to_first_token_ms":12.5,"generation_time_ms":22.7,"queue_time_ms":0.25,"mean_itl_ms":7.5,"tokens_per_second":112.0}"#;

    fn of(metrics: &str) -> [Option<EngineTimes>; 2] {
        let usage = r#""usage":{"prompt_tokens":4,"total_tokens":8,"completion_tokens":4}"#;
        let event = format!("data: {{\"id\":\"a\",\"choices\":[],{usage},\"system_fingerprint\":\"v\",{metrics}}}\n\n");
        let body = format!("{{\"id\":\"a\",\"choices\":[{{\"text\":\"metrics\"}}],{usage},{metrics}}}");
        [chunk::read(Dialect::Choices, event.as_bytes()).times, response::read(body.as_bytes()).times]
    }

    #[test]
    fn a_response_and_the_usage_event_have_both_parts() {
        let times = EngineTimes { queue: Duration::from_micros(250), prefill: Duration::from_micros(12_500) };
        assert_eq!(of(METRICS), [Some(times); 2]);
    }

    #[test]
    fn a_stream_of_responses_has_both_parts_in_its_last_event() {
        let usage = r#""usage":{"input_tokens":4,"output_tokens":4}"#;
        let data = format!("{{\"type\":\"response.completed\",\"response\":{{{usage},{METRICS}}}}}");
        let event = format!("event: response.completed\ndata: {data}\n\n");
        let times = EngineTimes { queue: Duration::from_micros(250), prefill: Duration::from_micros(12_500) };
        assert_eq!(chunk::read(Dialect::Responses, event.as_bytes()).times, Some(times));
        let created = event.replace("completed", "created");
        assert_eq!(chunk::read(Dialect::Responses, created.as_bytes()).times, None);
        let whole = format!("{{\"object\":\"response\",\"output\":[],{usage},{METRICS}}}");
        assert_eq!(response::read(whole.as_bytes()).times, Some(times));
    }

    #[test]
    fn a_missing_or_impossible_time_does_not_count() {
        for metrics in [
            r#""metrics":null"#,
            r#""metrics":[1]"#,
            r#""metrics":{"queue_time_ms":1.0}"#,
            r#""metrics":{"queue_time_ms":null,"time_to_first_token_ms":1.0}"#,
            r#""metrics":{"queue_time_ms":-1.0,"time_to_first_token_ms":1.0}"#,
            r#""metrics":{"queue_time_ms":1e300,"time_to_first_token_ms":1.0}"#,
            r#""other":{"queue_time_ms":1.0,"time_to_first_token_ms":1.0}"#,
        ] {
            assert_eq!(of(metrics), [None; 2], "{metrics}");
        }
    }
}
