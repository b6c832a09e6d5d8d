//! Lines of `sluice status` about API keys that have used at least a tenth of a token limit.
//!
//! Other keys have no line, because an operator looks for keys near a limit.

use sluice_admin::status::{KeyStatus, Status, Used};

/// Most keys with a line. `--json` shows all keys that the gateway reports.
const KEYS_SHOWN: usize = 20;

/// The lines, keys nearest to a limit first.
pub(super) fn lines(status: &Status) -> impl Iterator<Item = String> {
    status.keys.iter().filter_map(line).take(KEYS_SHOWN)
}

fn line(key: &KeyStatus) -> Option<String> {
    let limits = [(key.minute, "tokens per minute"), (key.day, "tokens per day")];
    let near = limits.into_iter().filter_map(|(used, words)| {
        let Used { used, limit: Some(limit) } = used? else { return None };
        let owes = if used > limit { ", so it waits until it has paid" } else { "" };
        (used > 0 && used >= limit / 10).then(|| format!("{} of {} {words}{owes}", short(used), short(limit)))
    });
    let near: Vec<String> = near.collect();
    (!near.is_empty()).then(|| format!("key {}: {}\n", key.name, near.join("; ")))
}

/// The value as text: in thousands (k) from ten thousand on, in millions (M) from ten million on.
pub(super) fn short(value: u64) -> String {
    match value {
        0..10_000 => value.to_string(),
        10_000..10_000_000 => format!("{:.0}k", value as f64 / 1e3),
        _ => format!("{:.0}M", value as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_near_a_limit_have_a_line() {
        let used = |used, limit| Some(Used { used, limit: Some(limit) });
        let key = |name: &str, minute, day| KeyStatus { name: name.to_owned(), minute, day };
        let keys = vec![
            key("team-a", used(18_000, 6_000), used(50_000, 1_000_000)),
            key("team-b", None, used(400_000, 1_000_000)),
            key("idle", used(0, 6_000), None),
        ];
        let status = Status { keys, ..Status::default() };
        assert_eq!(
            lines(&status).collect::<Vec<_>>(),
            [
                "key team-a: 18k of 6000 tokens per minute, so it waits until it has paid\n",
                "key team-b: 400k of 1000k tokens per day\n",
            ]
        );
    }
}
