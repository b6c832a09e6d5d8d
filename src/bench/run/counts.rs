//! Warns about misleading token counts: prompts of another length than requested, and responses
//! without usage.
//!
//! A server that counts the tokens of generated prompts differently gets another load. Bounds:
//! there is only one sentence about lengths, for the class with the largest difference.

use crate::load::body::PromptTokens;
use crate::result::record::{Record, RunResult};
use crate::run::plan::RunPlan;

/// Largest relative difference of prompt lengths without a warning.
const MAX_DIFFERENCE: f64 = 0.05;

pub(super) fn warnings(result: &RunResult, plan: &RunPlan) -> Vec<String> {
    prompts(result, plan).into_iter().chain(outputs(result)).collect()
}

fn completed(result: &RunResult) -> impl Iterator<Item = &Record> {
    result.requests.iter().filter(|record| record.is_completed())
}

fn prompts(result: &RunResult, plan: &RunPlan) -> Option<String> {
    let classes = &result.config.classes;
    let difference = |class: u32| {
        let of_class = completed(result).filter(|record| record.class == class);
        let [asked, counted, all] = of_class.fold([0.0; 3], |[asked, counted, all], record| {
            [asked + record.asked() as f64, counted + record.prompt_tokens as f64, all + 1.0]
        });
        let ratio = counted / asked - 1.0;
        (ratio.abs() >= MAX_DIFFERENCE).then_some((class, ratio, asked / all, counted / all))
    };
    let differing = (0..classes.len().max(1) as u32).filter_map(difference);
    let (class, ratio, asked, counted) = differing.max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?;
    let of = match classes.get(class as usize) {
        Some(class) if classes.len() > 1 => format!(" of class '{}'", class.name),
        _ => String::new(),
    };
    let advice = match &plan.workload.tokens {
        PromptTokens::Words => {
            "words are not one token each for this model, or its chat template adds tokens; give --tokenizer (the \
             model's tokenizer.json or its folder) for prompts of the length asked for"
        }
        PromptTokens::Exact(_) => {
            "--tokenizer is not that of the served model, or the template adds more tokens than were asked for"
        }
        PromptTokens::Ids(_) => "the server, or a program before it, changes or adds tokens",
    };
    Some(format!(
        "the load differs from the one asked for: the server counted {counted:.1} tokens in a prompt{of} on average, where \
         {asked:.1} were asked for ({:+.1} %): {advice}",
        ratio * 100.0
    ))
}

fn outputs(result: &RunResult) -> Option<String> {
    let all = completed(result).count();
    let counted = completed(result).filter(|record| record.output_counted).count();
    let unknown = completed(result).filter(|record| record.is_uncounted()).count();
    if unknown > 0 {
        return Some(format!(
            "the server sent no usage with {unknown} of {all} responses: their output tokens are unknown, and so are sums, \
             rates and TPOT, since a chunk may hold several tokens (an objective for TPOT counts as missed); give --tokenizer \
             to count their text"
        ));
    }
    (counted > 0).then(|| {
        format!(
            "the server sent no usage with {counted} of {all} responses: their output tokens were counted with the \
             tokenizer, and their prompt tokens are those asked for"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::arrival::{Arrival, Extent};
    use crate::result::record::{ClassConfig, Outcome};
    use crate::testing::small_workload;

    fn run(asked: [u64; 2], counted: [u64; 2], output: Option<u64>) -> RunResult {
        let record = |class: usize| Record {
            class: class as u32,
            outcome: Outcome::Completed,
            prompt_tokens: counted[class],
            asked_tokens: (asked[class] != counted[class]).then_some(asked[class]),
            output_tokens: output,
            ..Record::default()
        };
        let mut result = RunResult { requests: vec![record(0), record(1), record(1)], ..RunResult::default() };
        result.config.classes =
            ["short", "long"].map(|name| ClassConfig { name: name.to_owned(), ..ClassConfig::default() }).to_vec();
        result
    }

    fn said(result: &RunResult) -> Vec<String> {
        let plan = RunPlan::new(small_workload().with_text_prompts(), Arrival::AtOnce, Extent::Requests(3));
        warnings(result, &plan)
    }

    #[test]
    fn prompts_of_another_length_than_asked_are_named_with_their_class() {
        assert_eq!(said(&run([200, 1000], [209, 1049], Some(5))), [""; 0]);
        let found = said(&run([200, 9000], [363, 9163], Some(5)));
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("counted 363.0 tokens in a prompt of class 'short'"), "{found:?}");
        assert!(found[0].contains("200.0 were asked for (+81.5 %)") && found[0].contains("--tokenizer"), "{found:?}");
    }

    #[test]
    fn output_tokens_that_the_server_did_not_count_are_named() {
        let mut result = run([200, 200], [200, 200], None);
        assert!(said(&result)[0].contains("no usage with 3 of 3 responses: their output tokens are unknown"));
        result.requests.iter_mut().for_each(|record| (record.output_tokens, record.output_counted) = (Some(4), true));
        assert!(said(&result)[0].contains("no usage with 3 of 3 responses: their output tokens were counted"));
    }
}
