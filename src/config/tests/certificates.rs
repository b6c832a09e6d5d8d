//! `[server.tls]` and `[pool.tls]`.
//!
//! The tests cover files that are missing, wrong or do not belong together, and which of several
//! tables applies. Certificates are issued into a temporary folder.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::{TWO_POOLS, surroundings};
use crate::tls::testing::{Authority, Issued};
use crate::{Config, Loaded, Problems, diff};

fn read(folder: &Path, text: &str) -> Result<Loaded, Problems> {
    Config::parse(text, "test.toml", &[], &surroundings(folder))
}

/// The errors, each as `path: message`.
fn errors(folder: &Path, text: &str) -> Vec<String> {
    let problems = read(folder, text).map(|_| ()).unwrap_err();
    problems.errors.iter().map(|problem| format!("{}: {}", problem.path(), problem.situation())).collect()
}

/// Asserts that there is one problem for each entry of `wanted`, which has the path and words of
/// the message.
#[track_caller]
fn are(found: &[String], wanted: &[(&str, &str)]) {
    assert_eq!(found.len(), wanted.len(), "{found:#?}");
    for (path, words) in wanted {
        let there = found.iter().any(|line| line.starts_with(&format!("{path}: ")) && line.contains(words));
        assert!(there, "{path}, {words}: {found:#?}");
    }
}

const SERVER: &str = "[server.tls]\ncertificate = \"server.pem\"\nkey = \"server.key\"\n";

fn folder() -> (tempfile::TempDir, Authority) {
    let (folder, ca) = (tempfile::tempdir().unwrap(), Authority::new());
    ca.issue(&["gate"]).write(folder.path(), "server");
    ca.issue(&["gateway"]).write(folder.path(), "own");
    std::fs::write(folder.path().join("ca.pem"), &ca.pem).unwrap();
    (folder, ca)
}

#[test]
fn every_problem_with_the_files_has_its_path() {
    let (folder, _) = folder();
    let folder = folder.path();
    let read = |lines: &str| errors(folder, &format!("[server.tls]\n{lines}{TWO_POOLS}"));
    are(&read(""), &[("server.tls.certificate", "missing"), ("server.tls.key", "missing")]);
    are(
        &read("certificate = \"no.pem\"\nkey = \"server.pem\"\nclient_ca = \"server.key\"\n"),
        &[
            ("server.tls.certificate", "no.pem: No such file"),
            ("server.tls.key", "no private key in PEM format"),
            ("server.tls.client_ca", "no certificate in PEM format"),
        ],
    );
    are(
        &read("certificate = \"server.pem\"\nkey = \"own.key\"\n"),
        &[("server.tls.key", "does not match the certificate")],
    );
    are(
        &read("certificate = \"server.pem\"\nkey = \"server.key\"\nverify_client = \"optional\"\n"),
        &[("server.tls.verify_client", "add client_ca")],
    );
    std::fs::write(folder.join("garbage.pem"), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        .unwrap();
    are(&read("certificate = \"garbage.pem\"\nkey = \"server.key\"\n"), &[("server.tls.certificate", "is not X.509")]);
}

#[test]
fn a_key_that_all_users_can_read_is_warned_of() {
    let (folder, _) = folder();
    let text = format!("{SERVER}{TWO_POOLS}");
    let warnings = || {
        let loaded = read(folder.path(), &text).unwrap();
        let about = loaded.warnings.iter().filter(|warning| warning.path().starts_with("server.tls"));
        about.map(|warning| format!("{}: {}", warning.path(), warning.situation())).collect::<Vec<_>>()
    };
    assert_eq!(warnings(), Vec::<String>::new());
    let key = folder.path().join("server.key");
    std::fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    assert_eq!(warnings(), Vec::<String>::new());
    std::fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    are(&warnings(), &[("server.tls.key", "(mode 644); chmod 640 it")]);
}

fn with_table(text: &str, table: &str) -> String {
    text.replacen("name = \"short\"\n", &format!("name = \"short\"\ntls = {{ {table} }}\n"), 1)
}

#[test]
fn a_backend_is_connected_to_as_its_own_table_says_or_that_of_its_pool() {
    let (folder, _) = folder();
    let folder = folder.path();
    Issued::self_signed(&["x"]).write(folder, "other");
    let pools = |lines: [&str; 3]| {
        format!(
            "[[pool]]\nname = \"p\"\n{}\n[[pool.backend]]\nname = \"a\"\nurl = \"https://gpu0:1\"\n{}\n\
             [[pool.backend]]\nname = \"b\"\nurl = \"https://gpu1:1\"\n{}\n\
             [[pool.backend]]\nname = \"c\"\nurl = \"http://gpu2:1\"\n",
            lines[0], lines[1], lines[2]
        )
    };
    let connections = |lines: [&str; 3]| {
        let config = read(folder, &pools(lines)).unwrap_or_else(|problems| panic!("{problems}")).config;
        assert_eq!(read(folder, &config.to_string()).unwrap().config, config, "what is printed reads back");
        let backends = config.pools[0].backends.iter();
        backends
            .map(|backend| backend.connection.as_ref().map(|tls| format!("{tls:?} {}", tls.digest())))
            .collect::<Vec<_>>()
    };
    let of_pool = connections(["tls = { ca = \"ca.pem\" }", "", ""]);
    assert!(of_pool[0].as_ref().unwrap().starts_with("ClientTls(gpu0) "), "{of_pool:?}");
    assert!(of_pool[1].as_ref().unwrap().starts_with("ClientTls(gpu1) "), "{of_pool:?}");
    assert_eq!(of_pool[2], None);
    let own = connections(["tls = { ca = \"ca.pem\" }", "", "tls = { ca = \"other.pem\", server_name = \"x\" }"]);
    assert_eq!(own[0], of_pool[0]);
    assert!(own[1].as_ref().unwrap().starts_with("ClientTls(x) "), "{own:?}");
    let shown = connections(["tls = { ca = \"ca.pem\", certificate = \"own.pem\", key = \"own.key\" }", "", ""]);
    assert_ne!(shown[0], of_pool[0]);
}

#[test]
fn tables_that_contradict_themselves_are_errors() {
    let (folder, _) = folder();
    let https = TWO_POOLS.replace("http://127.0.0.1:8000", "https://gpu0.internal");
    let of = |table: &str| errors(folder.path(), &with_table(&https, table));
    are(&of("certificate = \"own.pem\""), &[("pool[0].tls.certificate", "add key")]);
    are(&of("key = \"own.key\""), &[("pool[0].tls.key", "add certificate")]);
    are(&of("ca = \"ca.pem\", verify = \"none\""), &[("pool[0].tls.verify", "remove one of them")]);
    are(&of("ca = \"ca.pem\", server_name = \"a b\""), &[("pool[0].tls.server_name", "not a DNS name")]);
    are(&of("ca = \"own.key\""), &[("pool[0].tls.ca", "no certificate")]);
    are(&errors(folder.path(), &with_table(TWO_POOLS, "ca = \"ca.pem\"")), &[("pool[0].tls", "write https:// in url")]);
}

#[test]
fn a_certificate_that_was_renewed_in_place_is_a_change() {
    let (folder, ca) = folder();
    let text = format!("{SERVER}{TWO_POOLS}");
    let old = read(folder.path(), &text).unwrap().config;
    assert_eq!(diff::changes(&old, &read(folder.path(), &text).unwrap().config), vec![]);
    ca.issue(&["gate"]).write(folder.path(), "server");
    let new = read(folder.path(), &text).unwrap().config;
    let changes: Vec<String> = diff::changes(&old, &new).iter().map(ToString::to_string).collect();
    assert_eq!(changes, ["server.tls.certificate: changed", "server.tls.key: changed"]);
}
