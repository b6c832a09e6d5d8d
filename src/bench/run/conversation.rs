//! Sends the turns of one conversation, each after the response to the previous one.
//!
//! A conversation ends early when a turn fails or the client leaves. Bounds:
//! [`MAX_TURNS`](crate::load::session::MAX_TURNS) turns.

use tokio::time::Instant;

use crate::load::conversation::Conversation;
use crate::load::session::Sessions;
use crate::result::record::Record;
use crate::run::sender::RequestSender;

/// Runs a conversation whose first turn is due at `due`, or without it at once.
pub(super) async fn run_conversation(
    sender: &RequestSender,
    sessions: &Sessions,
    session: u64,
    mut due: Option<Instant>,
) -> Vec<Record> {
    let workload = &sender.plan.workload;
    let mut conversation = Conversation::new(workload, sessions, session);
    let mut records = Vec::new();
    while let Some(request) = conversation.next_turn(workload, sessions) {
        let asked = u64::from(request.output_tokens);
        let Some(sent) = sender.send(conversation.ordinal(), request, due).await else { break };
        let (completed, tokens) = (sent.record.is_completed(), sent.record.output_tokens.unwrap_or(asked));
        records.push(sent.record);
        if !completed {
            break;
        }
        conversation.respond(sent.text.unwrap_or_default(), tokens);
        due = Some(Instant::now() + conversation.think(workload, sessions));
    }
    records
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::client::load_client::LoadClient;
    use crate::load::arrival::{Arrival, Extent};
    use crate::load::length::Length;
    use crate::run::plan::RunPlan;
    use crate::run::progress::Progress;
    use crate::run::runner::run;
    use crate::testing::{MockEngine, MockResponse, completion_stream, small_workload};

    #[tokio::test]
    async fn a_turn_carries_the_conversation_so_far_and_waits_for_the_response_before_it() {
        let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await;
        let sessions = Sessions { turns: Length::Exactly(3), later: Some(Length::Exactly(1)), think: 0.0 };
        let arrival = Arrival::ClosedLoop { concurrency: 2 };
        let plan = RunPlan::new(small_workload().with_text_prompts(), arrival, Extent::Requests(4));
        let plan = RunPlan { sessions: Some(sessions), ..plan };
        let client = LoadClient::new(&[engine.url()], plan.workload.api, Duration::from_secs(20)).unwrap();
        let result = run(&plan, &Arc::new(client), &Arc::new(Progress::default())).await.unwrap();
        assert_eq!(result.requests.len(), 12);
        let turns: Vec<_> = result.requests.iter().map(|record| record.session.unwrap()).collect();
        assert_eq!(&turns[..4], [(0, 0), (0, 1), (0, 2), (1, 0)]);
        for pair in result.requests.windows(2).filter(|pair| pair[0].session.unwrap().0 == pair[1].session.unwrap().0) {
            assert!(pair[1].sent >= pair[0].ended, "a turn was sent before the response to the one before it");
        }
        let prompts = engine.bodies().into_iter().map(|body| body["prompt"].as_str().unwrap().to_owned());
        let longest = prompts.max_by_key(String::len).unwrap();
        // Three words, " a a", one word, " a a", one word.
        let words: Vec<&str> = longest.split(' ').collect();
        assert_eq!(words.len(), 9, "{longest}");
        assert_eq!((&words[3..5], &words[6..8]), (&["a", "a"][..], &["a", "a"][..]));
    }
}
