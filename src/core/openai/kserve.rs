//! The paths of KServe's protocol (v2), in which the path names the model.
//!
//! `/v2/models/NAME[/versions/NUMBER]/VERB` with the verbs `infer`, `generate` and
//! `generate_stream`. A name is up to [`MAX_NAME`] letters, digits and `. _ -`, and begins with a
//! letter or digit; a version is a number. So a path has only one spelling, which gateway and
//! engine read alike, because nothing needs decoding and no part is `..`.

/// The longest name of a model, bytes.
pub const MAX_NAME: usize = 128;
/// The most digits of a version.
const MAX_DIGITS: usize = 18;
const MODELS: &str = "/v2/models/";

/// Whether a path is below the models of KServe, served or not.
pub fn is_below_models(path: &str) -> bool {
    path.starts_with(MODELS)
}

/// The model and the verb of a path without query.
pub fn model_and_verb(path: &str) -> Option<(&str, &str)> {
    let (name, rest) = path.strip_prefix(MODELS)?.split_once('/')?;
    let verb = match rest.strip_prefix("versions/") {
        None => rest,
        Some(rest) => {
            let (version, verb) = rest.split_once('/')?;
            let is_number = (1..=MAX_DIGITS).contains(&version.len()) && version.bytes().all(|b| b.is_ascii_digit());
            Some(verb).filter(|_| is_number)?
        }
    };
    (is_name(name) && matches!(verb, "infer" | "generate" | "generate_stream")).then_some((name, verb))
}

/// The path, with the query if it has one, for another model; `None` if the path or the name is not
/// one of KServe.
pub fn with_model(path: &str, model: &str) -> Option<String> {
    let bare = path.split('?').next().unwrap_or(path);
    let (own, _) = model_and_verb(bare)?;
    is_name(model).then(|| [MODELS, model, &path[MODELS.len() + own.len()..]].concat())
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    name.len() <= MAX_NAME
        && name.bytes().all(plain)
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_names_model_version_and_verb() {
        let route = model_and_verb;
        assert_eq!(route("/v2/models/resnet.50_a-b/infer"), Some(("resnet.50_a-b", "infer")));
        assert_eq!(route("/v2/models/m/versions/3/generate"), Some(("m", "generate")));
        assert_eq!(route("/v2/models/m/generate_stream"), Some(("m", "generate_stream")));
        assert_eq!(
            with_model("/v2/models/a/versions/3/infer?x=/", "b1").as_deref(),
            Some("/v2/models/b1/versions/3/infer?x=/")
        );
        assert_eq!(with_model("/v2/models/a/infer", "b/../c"), None);
    }

    #[test]
    fn a_path_with_tricks_is_none() {
        let long = format!("/v2/models/{}/infer", "m".repeat(MAX_NAME + 1));
        for path in [
            "/v2/models/a%2Fb/infer",
            "/v2/models/../infer",
            "/v2/models/./infer",
            "/v2/models/.hidden/infer",
            "/v2/models/..%2f..%2frepository/infer",
            "/v2/models//infer",
            "/v2/models/a/b/infer",
            "/v2/models/a/versions//infer",
            "/v2/models/a/versions/1a/infer",
            "/v2/models/a/versions/1/versions/2/infer",
            "/v2/models/a/versions/1/infer/",
            "/v2/models/a;x=1/infer",
            "/v2/models/a/load",
            "/v2/repository/models/a/load",
            "/v2/models/a/INFER",
            "/v2/models/\u{e9}/infer",
            &long,
        ] {
            assert_eq!(model_and_verb(path), None, "{path}");
        }
    }
}
