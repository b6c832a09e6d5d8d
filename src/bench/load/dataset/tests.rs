//! Tests of reading datasets: the kept rows, and the errors.

use super::*;
use sluice_core::openai::Route;

fn read(text: &str, format: &DatasetFormat) -> Result<Items, DatasetError> {
    let options = ReadOptions { counter: &TokenCounter::Bytes, output: None, limit: 0, shuffle: None, model: "base" };
    parse(text, "file", format, &options)
}

fn lengths(items: &Items) -> Vec<(u32, u32)> {
    let prompt = |item: &Item| match &item.prompt {
        ItemPrompt::Text { tokens, .. } | ItemPrompt::Made { tokens, .. } => *tokens,
    };
    items.list.iter().map(|item| (prompt(item), item.output)).collect()
}

#[track_caller]
fn refused(text: &str, format: &DatasetFormat, says: &str) {
    let error = read(text, format).unwrap_err().to_string();
    assert!(error.contains(says), "{error}");
}

fn conversation(prompt: usize, response: usize) -> String {
    let turn = |length: usize| format!("{{\"from\":\"x\",\"value\":\"{}\"}}", "w".repeat(length));
    format!("{{\"id\":\"1\",\"conversations\":[{},{}]}}", turn(prompt), turn(response))
}

#[test]
fn sharegpt_keeps_the_conversations_that_vllm_keeps() {
    let conversations = [
        conversation(16, 20),
        conversation(12, 20),
        conversation(400, 12),
        conversation(4_096, 4_096),
        conversation(4_100, 40),
    ];
    let text = format!("[{},{{\"conversations\":[]}}]", conversations.join(","));
    let items = read(&text, &DatasetFormat::ShareGpt).unwrap();
    assert_eq!(lengths(&items), [(4, 5), (1_024, 1_024)]);
    assert!(items.notes[0].contains("2 of 6 conversations"), "{:?}", items.notes);
    assert!(items.notes[1].contains("--tokenizer"));
    let options = ReadOptions { counter: &TokenCounter::Bytes, output: Some(2), limit: 1, shuffle: Some(1), model: "" };
    let items = parse(&conversations.join("\n"), "file", &DatasetFormat::ShareGpt, &options).unwrap();
    assert_eq!((items.list.len(), items.list[0].output), (1, 2));
}

#[test]
fn a_tokenizer_counts_exactly() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");
    let counter = TokenCounter::exact(Path::new(path)).unwrap();
    assert!(counter.vocabulary().is_some_and(|size| size > 0));
    assert!(counter.count("one two three") >= 3);
    let error = TokenCounter::exact(Path::new("/nowhere")).unwrap_err().to_string();
    assert!(error.contains("/nowhere") && error.contains("tokenizer.json"), "{error}");
}

#[test]
fn burstgpt_has_a_class_for_each_model_and_leaves_failures_out() {
    let text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                5,\"a,b\",1,ChatGPT,472,18,490,Conversation log\n45,c,1,GPT-4,1087,230,1317,API log\n118,d,1,ChatGPT,417,0,417,API log\n";
    let items = read(text, &DatasetFormat::BurstGpt).unwrap();
    assert_eq!(lengths(&items), [(472, 18), (1_087, 230)]);
    assert_eq!(items.times().unwrap(), [0.0, 40.0]);
    assert_eq!(items.classes.iter().map(|class| class.name.as_str()).collect::<Vec<_>>(), ["ChatGPT", "GPT-4"]);
    assert!(items.notes[0].contains("1 rows without a response"));
    let old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,GPT-4,5,6,11,API log\n";
    assert_eq!(lengths(&read(old, &DatasetFormat::BurstGpt).unwrap()), [(5, 6)]);
}

#[test]
fn azure_times_are_wall_clock_and_may_pass_midnight() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:00.7500000,396,109\n";
    let items = read(text, &DatasetFormat::Azure).unwrap();
    assert_eq!(lengths(&items), [(374, 44), (396, 109)]);
    assert_eq!(items.times().unwrap(), [0.0, 1.25]);
    let later = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n";
    let times = read(later, &DatasetFormat::Azure).unwrap().times().unwrap();
    assert!((times[1] - 0.007405).abs() < 1e-6, "{times:?}");
}

#[test]
fn mooncake_has_milliseconds_and_blocks_and_is_sorted() {
    let text = "{\"timestamp\": 27000, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0, 1]}\n\
                {\"timestamp\": 24000, \"input_length\": 700, \"output_length\": 1, \"hash_ids\": [\"x\"]}\n";
    let items = read(text, &DatasetFormat::Timed(TraceKeys::mooncake())).unwrap();
    assert_eq!(lengths(&items), [(700, 1), (6_758, 500)]);
    assert_eq!(items.times().unwrap(), [0.0, 3.0]);
    assert!(matches!(&items.list[1].prompt, ItemPrompt::Made { blocks, block: 512, .. } if blocks[..] == [0, 1]));
}

#[test]
fn an_access_log_is_replayed() {
    let line = |time: &str, rest: &str| {
        format!(
            "{{\"time\":\"2026-01-02T03:04:{time}Z\",\"request_id\":\"r\",\"stream\":true,\"total_ms\":500.0,{rest}}}\n"
        )
    };
    let text = [
        line("10.500", r#""route":"chat_completions","model":"base","home":"short","prompt_tokens":100,"completion_tokens":20,"outcome":"completed""#),
        line("09.500", r#""route":"completions","model":"lora","pool":"long","prompt_tokens":7000,"completion_tokens":40,"outcome":"completed""#),
        line("11.500", r#""route":"chat_completions","model":"base","home":"short","estimate_tokens":55,"outcome":"shed""#),
        line("11.600", r#""route":"embeddings","model":"base","prompt_tokens":5,"outcome":"completed""#),
        line("11.700", r#""route":"completions","model":"base","outcome":"refused""#),
    ]
    .concat();
    let items = read(&text, &DatasetFormat::AccessLog).unwrap();
    assert_eq!(lengths(&items), [(7_000, 40), (100, 20), (55, 40)]);
    assert_eq!(items.times().unwrap(), [0.0, 1.0, 2.0]);
    assert_eq!(items.adapters, ["lora"]);
    assert_eq!(items.list.iter().map(|item| item.adapter).collect::<Vec<_>>(), [Some(0), None, None]);
    assert_eq!(items.notes.len(), 3, "{:?}", items.notes);
    let classed = text.replace("\"home\":", "\"class\":\"chat\",\"home\":");
    let items = read(&classed, &DatasetFormat::AccessLog).unwrap();
    let names: Vec<&str> = items.list.iter().map(|item| &*items.classes[item.class as usize].name).collect();
    assert_eq!(names, ["long", "chat", "chat"], "the recorded class, and before there were classes the pool");
}

#[test]
fn requests_are_replayed_exactly_if_the_gateway_says_that_their_route_generates() {
    for route in Route::ALL {
        let line = |route: Route| {
            format!(
                "{{\"time\":\"2026-01-02T03:04:05Z\",\"total_ms\":1.0,\"route\":\"{route}\",\"prompt_tokens\":5,\
                 \"completion_tokens\":2}}\n"
            )
        };
        let items = read(&(line(Route::Completions) + &line(route)), &DatasetFormat::AccessLog).unwrap();
        assert_eq!(items.list.len(), if route.generates() { 2 } else { 1 }, "{route}");
    }
}

#[test]
fn records_share_prefixes_as_the_requests_did() {
    let line = |second: u32, tokens: u32, hashes: &str| {
        format!(
            "{{\"time\":\"2026-01-02T03:04:{second:02}Z\",\"total_ms\":1.0,\"route\":\"completions\",\"home\":\"p\",\
             \"prompt_tokens\":{tokens},\"completion_tokens\":2,\"prompt_bytes\":{},\"prefix\":[{hashes}]}}\n",
            4 * tokens
        )
    };
    let text =
        line(1, 400, r#""0a","0b","0c""#) + &line(2, 300, r#""0a","0b""#) + &line(3, 130, r#""0a""#) + &line(4, 9, "");
    let items = read(&text, &DatasetFormat::AccessLog).unwrap();
    let names = |at: usize| match &items.list[at].prompt {
        ItemPrompt::Made { blocks, block: 128, .. } => blocks.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!([0, 1, 2, 3].map(|at| names(at).len()), [3, 2, 1, 0]);
    assert!(names(0).starts_with(&names(1)) && names(1).starts_with(&names(2)));
    let other = read(&line(1, 400, r#""0a","1b""#), &DatasetFormat::AccessLog).unwrap();
    let ItemPrompt::Made { blocks, .. } = &other.list[0].prompt else { panic!() };
    assert!(blocks[0] == names(0)[0] && blocks[1] != names(0)[1]);
}

#[test]
fn copies_and_a_line_that_was_cut_off_are_left_out_and_other_versions_refused() {
    let line = |second: u32, rest: &str| {
        format!(
            "{{\"version\":1,\"time\":\"2026-01-02T03:04:{second:02}Z\",\"total_ms\":1.0,\"route\":\"completions\",\
             \"prompt_tokens\":9,\"completion_tokens\":2{rest}}}\n"
        )
    };
    let text = line(10, "") + &line(11, r#","copy":"completed""#) + &line(12, "");
    let items = read(&(text.clone() + &line(13, "")[..40]), &DatasetFormat::AccessLog).unwrap();
    assert_eq!(items.times().unwrap(), [0.0, 2.0]);
    let notes = ["1 line was cut off at the end of the file and is left out", "1 copies for shadow arms are left out"];
    assert_eq!(items.notes, notes);
    let mixed = text + &line(13, "").replace("\"version\":1", "\"version\":2");
    refused(&mixed, &DatasetFormat::AccessLog, "line 4: a record of version 2, and this sluice reads 1");
    refused(
        "{\"a\":1}\n",
        &DatasetFormat::AccessLog,
        "no column 'time' (it has a, line 1); give the gateway's records",
    );
    refused("{\"time\":", &DatasetFormat::AccessLog, "line 1: not JSON");
}

#[test]
fn errors_name_the_place_and_what_to_do() {
    refused(
        "Timestamp,Model,Response tokens\n",
        &DatasetFormat::BurstGpt,
        "no column 'Request tokens' (it has Timestamp, Model, Response tokens)",
    );
    refused(
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
        &DatasetFormat::Azure,
        "line 2: 'yesterday' is not a time",
    );
    refused(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,2\n",
        &DatasetFormat::Azure,
        "'x' in column 'ContextTokens' is not a number",
    );
    refused("", &DatasetFormat::Azure, "holds no request to send: it is empty");
    refused("TIMESTAMP,ContextTokens,GeneratedTokens\n", &DatasetFormat::Azure, "holds no request to send");
    refused("", &DatasetFormat::AccessLog, "holds no request to send");
    refused(
        "{\"timestamp\": 1}\n",
        &DatasetFormat::Timed(TraceKeys::default()),
        "no column 'input_length' (it has timestamp, line 1)",
    );
    refused("{}\n", &DatasetFormat::Custom, "no column 'prompt'");
    refused("{\"prompt\":\"x\",\"output_tokens\":3}\nnonsense\n", &DatasetFormat::Custom, "line 2: not JSON");
    refused("{\"prompt\":\"x\"}\n", &DatasetFormat::Custom, "--custom-output-len");
    refused("{\"a\":1}\n", &DatasetFormat::ShareGpt, "no column 'conversations' (it has a)");
    refused(&format!("[{}]", conversation(4, 4)), &DatasetFormat::ShareGpt, "0 of 1 conversations are used");
    refused("{\"time\":\"x\"}\n", &DatasetFormat::AccessLog, "`time` 'x' is not a time");
    let error = load(
        Path::new("/nowhere.csv"),
        &DatasetFormat::Azure,
        &ReadOptions { counter: &TokenCounter::Bytes, output: None, limit: 0, shuffle: None, model: "" },
    );
    assert!(error.unwrap_err().to_string().contains("cannot read the dataset /nowhere.csv"));
}

#[test]
fn a_file_is_limited_to_the_requested_number_and_repeats_when_it_is_short() {
    let text = "{\"prompt\":\"a\",\"output_tokens\":1}\n{\"prompt\":\"b\",\"output_tokens\":2}\n{\"prompt\":\"c\",\"output_tokens\":3}\n";
    let items = |limit, shuffle| {
        let options = ReadOptions { counter: &TokenCounter::Bytes, output: None, limit, shuffle, model: "" };
        parse(text, "file", &DatasetFormat::Custom, &options).unwrap()
    };
    assert_eq!(lengths(&items(2, None)), [(1, 1), (1, 2)]);
    assert_eq!(items(0, None).at(4).output, 2);
    let orders: std::collections::BTreeSet<Vec<u32>> =
        (0..40).map(|seed| items(0, Some(seed)).list.iter().map(|item| item.output).collect()).collect();
    assert_eq!(orders.len(), 6, "every order comes up");
}
