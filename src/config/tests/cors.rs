//! `server.cors`: accepted spellings of origins, and refused ones.
//!
//! A refused spelling must give a message with the spelling that browsers send. Settings for
//! credentials must be unknown, because the gateway has none.

use super::problems::one_in;
use super::{TWO_POOLS, read, read_with};
use crate::Cors;

#[test]
fn origins_are_written_as_browsers_send_them() {
    let wrong = |text: &str, part: &str| one_in(TWO_POOLS, &[&format!("server.cors={text}")], "server.cors[0]", part);
    wrong(r#"["https://chat.example.com/"]"#, "write \"https://chat.example.com\"");
    wrong(r#"["https://chat.example.com/app"]"#, "write \"https://chat.example.com\"");
    wrong(r#"["chat.example.com"]"#, "write \"https://chat.example.com\"");
    wrong(r#"["localhost:3000"]"#, "write \"http://localhost:3000\"");
    wrong(r#"["https://Chat.Example.com:443"]"#, "write \"https://chat.example.com\"");
    wrong(r#"["https://*.example.com"]"#, "list each origin");
    wrong(r#"["https://bücher.example"]"#, "punycode");
    wrong(r#"["null"]"#, "pages of any site can send it");
    wrong(r#"[5]"#, "expected a text");
    one_in(TWO_POOLS, &["server.cors=https://a.example/"], "server.cors", "write \"https://a.example\"");
    one_in(TWO_POOLS, &[r#"server.cors=["*", "https://a.example"]"#], "server.cors", "leave out the others");
    one_in(TWO_POOLS, &[r#"server.cors=["https://a.example", "https://a.example"]"#], "server.cors[1]", "used twice");
    one_in(TWO_POOLS, &["server.cors=true"], "server.cors", "expected \"*\" or a list of origins");
    // Browsers refuse credentials with "*", so there is no such setting.
    let credentials = r#"server.cors={ origins = "*", credentials = true }"#;
    one_in(TWO_POOLS, &[credentials], "server.cors", "expected \"*\" or a list of origins");
    one_in(TWO_POOLS, &["server.cors_credentials=true"], "server.cors_credentials", "unknown key");
}

#[test]
fn origins_are_one_or_a_list() {
    let cors = |set: &str| read_with(TWO_POOLS, &[set]).unwrap().config.server.cors;
    assert_eq!(read(TWO_POOLS).unwrap().config.server.cors, None);
    assert_eq!(cors("server.cors=*"), Some(Cors::Any));
    assert_eq!(cors(r#"server.cors=["*"]"#), Some(Cors::Any));
    assert_eq!(cors("server.cors=[]"), Some(Cors::Only(Vec::new())));
    assert_eq!(cors("server.cors=https://b.example"), Some(Cors::Only(vec!["https://b.example".to_owned()])));
    let two = r#"server.cors=["https://b.example", "http://localhost:3000"]"#;
    assert_eq!(cors(two), Some(Cors::Only(vec!["http://localhost:3000".to_owned(), "https://b.example".to_owned()])));
}
