//! Measures how many tokens the server adds to a text, with two short requests before the run.
//!
//! A template lengthens a chat prompt, and special tokens lengthen a completion prompt. The `usage`
//! of two requests of different lengths shows how many tokens are added, also by a gateway or by a
//! system prompt on the way, and whether the server counts as `--tokenizer` does. If the probe
//! fails, a note says so.

use std::time::Duration;

use tokio::time::Instant;

use super::plan::Setup;
use sluice_bench::{Class, Length, LoadClient, PromptTokens, RequestSource, Workload};

/// Tokens of the two texts. The second text is long enough to reveal a tokenizer that differs a
/// little.
const TOKENS: [u32; 2] = [16, 144];
/// The number of the probe. No request of a run has it, so no prefix cache has the text.
const PROBE: u64 = u64::MAX;
const LIMIT: Duration = Duration::from_secs(60);

/// Adds the measured tokens to the plan, if prompts are text with a tokenizer.
pub(super) async fn calibrate(setup: &mut Setup) {
    let workload = &setup.plan.workload;
    let PromptTokens::Exact(text) = &workload.tokens else { return };
    match added(workload, &setup.client).await {
        Ok(added) => setup.plan.workload.tokens = PromptTokens::Exact(text.adding(added)),
        Err(why) => {
            let note = format!("prompts may be longer than asked for by what the server adds to a text: {why}");
            setup.notes.push(note);
        }
    }
}

async fn added(workload: &Workload, client: &LoadClient) -> Result<u32, String> {
    let mut counted = [0; 2];
    for (tokens, counted) in TOKENS.into_iter().zip(&mut counted) {
        let class = Class::new("probe", Length::Exactly(tokens), Length::Exactly(1), 1.0);
        let PromptTokens::Exact(text) = &workload.tokens else { return Ok(0) };
        let probe = Workload {
            tokens: PromptTokens::Exact(text.adding(0)),
            source: RequestSource::Classes(vec![class]),
            adapters: sluice_bench::Adapters::default(),
            leaving: 0.0,
            ..workload.clone()
        };
        let sent = tokio::time::timeout(LIMIT, client.send(&probe.request(PROBE), Instant::now())).await;
        let timing = match sent {
            Ok(Ok(timing)) => timing,
            Ok(Err(failure)) => return Err(format!("a request of {tokens} tokens failed ({failure})")),
            Err(_) => return Err(format!("a request of {tokens} tokens took more than {} s", LIMIT.as_secs())),
        };
        *counted = timing.prompt_tokens.ok_or("its responses have no usage")?;
    }
    let [short, long] = counted;
    let more = i64::from(TOKENS[1] - TOKENS[0]);
    match u32::try_from(short.saturating_sub(u64::from(TOKENS[0]))) {
        Ok(added) if long as i64 - short as i64 == more && short >= u64::from(TOKENS[0]) => Ok(added),
        _ => Err(format!(
            "it counted {short} and {long} tokens where the tokenizer counts {} and {}; is --tokenizer that of the served \
             model?",
            TOKENS[0], TOKENS[1]
        )),
    }
}
