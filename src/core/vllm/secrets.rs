//! Which flags, variables and words of a command hold secrets.
//!
//! vLLM's flags that hold secrets are in a list. For other names (flags of a newer version, keys of
//! a JSON value, variables) the end of the name decides, as in `kv-transfer-config.password` and
//! `WANDB_API_KEY`.

use super::flags::table::{Arity, lookup};

/// Flags of vLLM whose values are secrets; vLLM does not log them either.
const FLAGS: &[&str] = &["api-key", "hf-token", "watermark-config"];

/// Ends of names that are not in [`FLAGS`] and hold secrets.
const ENDINGS: &[&str] = &[
    "access-key",
    "access-token",
    "api-key",
    "apikey",
    "auth-token",
    "bearer-token",
    "credential",
    "hf-token",
    "passphrase",
    "passwd",
    "password",
    "private-key",
    "secret",
    "secret-key",
    "session-token",
];

/// Further ends, only for names of variables, because flags and JSON keys with these ends may be
/// harmless: `eos_token`.
const VARIABLE_ENDINGS: &[&str] = &["authorization", "credentials", "key", "pass", "token"];

/// Whether `name` ends with one of these endings as a separate word.
fn ends_with(name: &str, endings: &[&str]) -> bool {
    let is_word = |rest: &str| rest.is_empty() || rest.ends_with('-');
    endings.iter().any(|ending| name.strip_suffix(ending).is_some_and(is_word))
}

fn plain(name: &str) -> String {
    name.trim_start_matches('-').to_ascii_lowercase().replace('_', "-")
}

/// Whether the value of a flag is a secret. The name may have leading dashes, use `_` for `-`, be
/// abbreviated, or name one key of a JSON value after a dot.
pub fn is_secret_flag(name: &str) -> bool {
    let name = plain(name);
    if let Some((_, key)) = name.rsplit_once('.') {
        return is_secret_key(key);
    }
    match lookup(&format!("--{name}")) {
        Some(flag) => FLAGS.contains(&flag.name),
        None => ends_with(&name, ENDINGS),
    }
}

/// Whether the value of a key in a JSON value is a secret.
pub fn is_secret_key(key: &str) -> bool {
    let key = plain(key);
    key == "token" || ends_with(&key, ENDINGS)
}

/// Whether the value of an environment variable is a secret.
pub fn is_secret_variable(name: &str) -> bool {
    let name = plain(name);
    ends_with(&name, ENDINGS) || ends_with(&name, VARIABLE_ENDINGS)
}

/// The words of a command with `mask` in place of secrets, and the secrets.
///
/// Recognises `--api-key X`, `--api-key=X`, `NAME=X`, and the same forms inside a word that a shell
/// interprets. The rest of such a word is masked too, because only the shell knows where the secret
/// ends.
pub fn mask_command(words: &[String], mask: &str) -> (Vec<String>, Vec<String>) {
    let (mut shown, mut secrets) = (Vec::new(), Vec::new());
    // Number of following words that are values of a secret flag.
    let mut values = 0;
    for word in words {
        if values > 0 && !(word.starts_with('-') && word.len() > 1) {
            values -= 1;
            shown.push(mask.to_owned());
            secrets.push(word.clone());
            continue;
        }
        values = 0;
        if let Some(begin) = secret_in(word) {
            shown.push(format!("{}{mask}", &word[..begin]));
            // In a shell's command line the secret ends at a blank or a quote.
            let quotes = |letter: char| letter.is_whitespace() || "\"'".contains(letter);
            let scheme =
                |piece: &&str| !piece.is_empty() && !["bearer", "basic"].contains(&&*piece.to_ascii_lowercase());
            secrets.extend(word[begin..].split(quotes).find(scheme).map(str::to_owned));
            continue;
        }
        if word.starts_with("--") && is_secret_flag(word) {
            let many = lookup(word).is_some_and(|flag| flag.arity == Arity::Many);
            values = if many { usize::MAX } else { 1 };
        }
        shown.push(word.clone());
    }
    (shown, secrets)
}

/// Byte offset of the first secret in a word: after `NAME=`, `NAME:` or, in a shell's command line,
/// `--flag`.
fn secret_in(word: &str) -> Option<usize> {
    let in_name = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    for (at, separator) in word.char_indices().filter(|(_, letter)| !in_name(*letter)) {
        let begin = word[..at].char_indices().rev().take_while(|(_, letter)| in_name(*letter)).last();
        let Some((begin, _)) = begin else { continue };
        let name = &word[begin..at];
        let is_flag = name.starts_with("--") && is_secret_flag(name);
        let found = match separator {
            '=' => is_flag || (!name.starts_with("--") && is_secret_variable(name)),
            ':' => !name.starts_with("--") && is_secret_variable(name),
            _ => is_flag && separator.is_whitespace(),
        };
        let end = at + separator.len_utf8();
        if found && end < word.len() {
            return Some(end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_with_secrets_are_distinguished_from_flags_about_tokens() {
        for name in
            ["api-key", "--api_key", "hf_token", "api-k", "ssl-keyfile-password", "kv-transfer-config.auth_token"]
        {
            assert!(is_secret_flag(name), "{name}");
        }
        for name in [
            "max-num-batched-tokens",
            "tokenizer",
            "ssl-keyfile",
            "allow-credentials",
            "spec-tokens",
            "hf-overrides.eos_token",
        ] {
            assert!(!is_secret_flag(name), "{name}");
        }
        assert!(is_secret_variable("AWS_SESSION_TOKEN") && is_secret_variable("VLLM_API_KEY"));
        assert!(!is_secret_variable("VLLM_CACHE_ROOT") && !is_secret_variable("MONKEY"));
    }

    #[test]
    fn a_command_is_shown_without_its_secrets_however_they_are_written() {
        let masked = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let (shown, secrets) = mask_command(&words, "*");
            assert!(shown.iter().all(|word| !word.contains("S3")), "{shown:?}");
            assert!(shown == words || secrets.iter().any(|secret| secret.starts_with("S3")), "{secrets:?}");
            shown.join(" ")
        };
        assert_eq!(
            masked(&["vllm", "serve", "m", "--api-key", "S3a", "S3b", "--port", "1"]),
            "vllm serve m --api-key * * --port 1"
        );
        assert_eq!(masked(&["vllm", "--hf-token", "S3", "m"]), "vllm --hf-token * m");
        assert_eq!(masked(&["vllm", "--api_key=S3", "--seed", "1"]), "vllm --api_key=* --seed 1");
        assert_eq!(
            masked(&["docker", "run", "-e", "HF_TOKEN=S3", "--env=X_PASSWORD=S3"]),
            "docker run -e HF_TOKEN=* --env=X_PASSWORD=*"
        );
        assert_eq!(
            masked(&["sh", "-c", "exec vllm serve m --api-key 'S3 S3' --port 1"]),
            "sh -c exec vllm serve m --api-key *"
        );
        assert_eq!(masked(&["sh", "-c", "HF_TOKEN=S3 vllm serve m"]), "sh -c HF_TOKEN=*");
        assert_eq!(masked(&["curl", "-H", "Authorization: Bearer S3"]), "curl -H Authorization:*");
        let ordinary = ["ssh", "10.0.0.7", "vllm-up {args}", "--max-num-batched-tokens=4", "--tokenizer", "t", "A=b"];
        assert_eq!(masked(&ordinary), ordinary.join(" "));
    }
}
