//! The files of the live page, which are in the binary.
//!
//! The page works without a network. The policy allows only these scripts and styles, none inline,
//! and requests only to this server. Paths are relative, so that a proxy may add a prefix.

use http::header::{CONTENT_SECURITY_POLICY, HeaderMap, HeaderName, HeaderValue, REFERRER_POLICY};

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Name, content type and text of a file.
pub(super) type File = (&'static str, &'static str, &'static str);

const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

pub(super) const PAGE: File = ("index.html", "text/html; charset=utf-8", include_str!("ui/index.html"));

const FILES: &[File] = &[
    ("page.css", CSS, include_str!("ui/page.css")),
    ("parts.css", CSS, include_str!("ui/parts.css")),
    ("icon.svg", "image/svg+xml", include_str!("ui/icon.svg")),
    ("theme.js", JS, include_str!("ui/theme.js")),
    ("app.js", JS, include_str!("ui/app.js")),
    ("dom.js", JS, include_str!("ui/dom.js")),
    ("units.js", JS, include_str!("ui/units.js")),
    ("charts.js", JS, include_str!("ui/charts.js")),
    ("stream.js", JS, include_str!("ui/stream.js")),
    ("actions.js", JS, include_str!("ui/actions.js")),
    ("links.js", JS, include_str!("ui/links.js")),
    ("span.js", JS, include_str!("ui/span.js")),
    ("compare.js", JS, include_str!("ui/compare.js")),
    ("backend.js", JS, include_str!("ui/backend.js")),
    ("findings.js", JS, include_str!("ui/findings.js")),
    ("overview.js", JS, include_str!("ui/overview.js")),
    ("latency.js", JS, include_str!("ui/latency.js")),
    ("engines.js", JS, include_str!("ui/engines.js")),
    ("keys.js", JS, include_str!("ui/keys.js")),
    ("experiments.js", JS, include_str!("ui/experiments.js")),
    ("tuner.js", JS, include_str!("ui/tuner.js")),
    ("requests.js", JS, include_str!("ui/requests.js")),
];

pub(super) fn file(name: &str) -> Option<&'static File> {
    FILES.iter().find(|(own, ..)| *own == name)
}

pub(super) fn restrict(headers: &mut HeaderMap) {
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin"));
    headers.insert(HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_only_its_own_files_and_has_nothing_inline() {
        for (name, _, text) in FILES.iter().chain([&PAGE]) {
            for needle in
                ["src=\"http", "href=\"http", "@import", "url(", "innerHTML", "eval(", "style=\"", "onclick=\""]
            {
                assert!(!text.contains(needle), "{name} has {needle}");
            }
        }
        let page = PAGE.2;
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=\"ui/").count() + 1);
        assert!(!page.contains("<style"));
        assert!(!POLICY.contains("unsafe"));
    }

    #[test]
    fn every_file_that_a_file_refers_to_exists() {
        let mut referred = 0;
        for (name, _, text) in FILES.iter().chain([&PAGE]) {
            let links = text.split(['"', '\'']).filter_map(|part| part.strip_prefix("ui/").or(part.strip_prefix("./")));
            for link in links.filter(|link| link.contains('.')) {
                assert!(file(link).is_some(), "{name} refers to {link}");
                referred += 1;
            }
        }
        assert!(referred >= FILES.len(), "each file is referred to: {referred}");
    }
}
