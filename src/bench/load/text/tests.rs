//! Text of an exact number of tokens, with different tokenizers.

use super::*;

fn words() -> Arc<Tokenizer> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny/tokenizer.json");
    Arc::new(Tokenizer::from_file(file).unwrap())
}

fn bytes() -> Arc<Tokenizer> {
    let vocabulary: Vec<String> = ('a'..='z').map(String::from).chain(["\u{120}".to_owned()]).collect();
    let vocabulary: String = vocabulary.iter().enumerate().map(|(id, token)| format!("\"{token}\":{id},")).collect();
    let json = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "post_processor":null,"decoder":null,
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"vocab":{{{}}},"merges":[]}}}}"#,
        vocabulary.trim_end_matches(',')
    );
    Arc::new(json.parse().unwrap())
}

fn parts(counts: &[u32]) -> Vec<PromptPart> {
    (1..).zip(counts).map(|(seed, count)| PromptPart { rng: Rng::new(seed), count: *count }).collect()
}

fn prompt(text: &ExactText, counts: &[u32]) -> String {
    let mut prompt = String::new();
    text.push_prompt(&mut prompt, &mut parts(counts));
    prompt
}

#[test]
fn text_has_the_tokens_asked_for_with_any_tokenizer() {
    for tokenizer in [words(), bytes()] {
        let text = ExactText::new(&tokenizer);
        for count in [1, 2, 3, 17, 200, 1_000] {
            let prompt = prompt(&text, &[count]);
            assert_eq!(text.count(&prompt), count as usize, "{prompt}");
            assert!(!prompt.ends_with(' '));
        }
    }
}

#[test]
fn words_of_one_token_are_found_where_there_are_any() {
    assert!(ExactText::new(&words()).vocabulary.additive);
    assert!(!ExactText::new(&bytes()).vocabulary.additive, "else nothing tests the cut");
}

#[test]
fn a_shared_prefix_is_the_same_text_and_has_its_own_tokens() {
    for tokenizer in [words(), bytes()] {
        let text = ExactText::new(&tokenizer);
        let with = |own: u64| {
            let mut parts = [PromptPart { rng: Rng::new(7), count: 64 }, PromptPart { rng: Rng::new(own), count: 36 }];
            let mut prompt = String::new();
            text.push_prompt(&mut prompt, &mut parts);
            prompt
        };
        let (one, other) = (with(1), with(2));
        assert_eq!((text.count(&one), text.count(&other)), (100, 100));
        let common = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        assert!(text.count(&one[..common]) >= 64, "{one}\n{other}");
    }
}

#[test]
fn what_the_server_adds_is_taken_off_the_end_and_a_word_stays() {
    let text = ExactText::new(&words()).adding(12);
    assert_eq!(text.count(&prompt(&text, &[100])), 88);
    assert_eq!(text.count(&prompt(&text, &[64, 36])), 88);
    assert_eq!(text.count(&prompt(&text, &[64, 5])), 57);
    for few in [1, 11, 12, 13] {
        assert_eq!(text.count(&prompt(&text, &[few])), 1, "{few}");
    }
    assert_eq!(text.count(&prompt(&text, &[8, 8])), 4);
}
