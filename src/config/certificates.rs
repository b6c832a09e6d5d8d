//! `[server.tls]` and `[pool.tls]`: certificates and private keys of the gateway, and the CAs that
//! it trusts.
//!
//! The files are read with the configuration, and the settings for rustls are built here. So a key
//! that does not match the certificate is reported like any other problem, and a reload with such a
//! key changes nothing. Configurations are compared by the content of the files, so a certificate
//! that was renewed in place counts as a change.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::file::Entry;
use super::key::{KeySpec, Shape};
use super::limits;
use super::problem::Situation;
use super::report::{Names, Place, Report};
use super::setting::{Scalar, Setting, Shown, join};
use super::table::table;
use super::value::words;
use crate::tls::{Certificates, ClientCertificates, ClientSettings, ClientTls, PrivateKey, Roots, TlsError};

/// Mode bits with which all users of the machine may read or write a file.
const FOR_ALL_USERS: u32 = 0o006;

table! {
    /// TLS to clients, as in the file.
    pub(super) struct ServerTlsTable {
        /// PEM file of the certificate, followed by the chain.
        certificate: PemFile<Certificates> =
            required("write the PEM file of the certificate and its chain").example("tls/server.pem");
        /// PEM file of the private key of the certificate. Users other than the owner and the group
        /// should not be able to read it.
        key: PemFile<PrivateKey> = required("write the PEM file of the private key").example("tls/server.key");
        /// PEM file of the CAs that sign the certificates of clients.
        client_ca: Option<PemFile<Certificates>> =
            optional("clients need no certificate").example("tls/clients.pem");
        /// Whether a client without a certificate is refused, if client_ca is set. An invalid
        /// certificate is always refused.
        verify_client: VerifyClient = default("required");
    }
}

table! {
    /// TLS to engines, as in the file.
    pub(super) struct UpstreamTlsTable {
        /// PEM file with the CAs that sign the certificates of engines, or with the certificates
        /// themselves.
        ca: Option<PemFile<Certificates>> = optional("the CAs that this machine trusts").example("tls/engines.pem");
        /// The name or IP address that the certificate of an engine must have.
        server_name: Option<ServerName> = optional("the host of the url").example("gpu0.internal");
        /// Whether certificates of engines are verified. With none, any server that answers at the
        /// url gets prompts and keys.
        verify: VerifyEngine = default("required");
        /// PEM file of the client certificate for engines that require one, followed by the chain.
        certificate: Option<PemFile<Certificates>> = optional("none is sent").example("tls/gateway.pem");
        /// PEM file of the private key of that certificate.
        key: Option<PemFile<PrivateKey>> = optional("none").example("tls/gateway.key");
    }
}

words! {
    /// The treatment of a client without a certificate.
    pub enum VerifyClient {
        /// It is refused.
        Required = "required",
        /// It is served.
        Optional = "optional",
    }
}

words! {
    /// The treatment of an engine whose certificate is not signed by a trusted CA, or is for
    /// another name.
    pub enum VerifyEngine {
        /// It gets no request.
        Required = "required",
        /// It gets requests.
        None = "none",
    }
}

/// A name or address in a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerName(String);

impl Scalar for ServerName {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let name = String::parse(written, report)?;
        if rustls::pki_types::ServerName::try_from(name.as_str()).is_ok() {
            Ok(Self(name))
        } else {
            Err(Situation::TlsName { found: name })
        }
    }

    fn text(&self, _: &Names) -> String {
        self.0.clone()
    }
}

/// TLS to clients.
#[derive(Clone, Debug)]
pub struct ServerTls {
    table: ServerTlsTable,
    settings: crate::tls::ServerTls,
}

impl ServerTls {
    /// The settings for handshakes.
    pub fn settings(&self) -> &crate::tls::ServerTls {
        &self.settings
    }

    /// The file of the certificate.
    pub fn certificate(&self) -> &PemFile<Certificates> {
        &self.table.certificate
    }
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.table == other.table
    }
}

impl Setting for ServerTls {
    const SHAPE: Shape = ServerTlsTable::SHAPE;

    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let table = ServerTlsTable::read(written, place, key, report)?;
        if !report.is_sound(&place.path) {
            return None;
        }
        if table.client_ca.is_none() && report.is_written(&join(&place.path, "verify_client")) {
            report.add_at(&join(&place.path, "verify_client"), Situation::VerifyWithoutCa);
        }
        let required = table.verify_client == VerifyClient::Required;
        let clients = table.client_ca.as_ref().map(|file| ClientCertificates { ca: &file.content, required });
        let made = crate::tls::ServerTls::new(&table.certificate.content, &table.key.content, clients);
        let settings = made.map_err(|error| report.add_at(&join(&place.path, "key"), tls(&error))).ok()?;
        Some(Self { table, settings })
    }

    fn show(&self, names: &Names) -> Shown {
        self.table.show(names)
    }
}

/// TLS to engines.
#[derive(Clone, Debug)]
pub struct UpstreamTls {
    table: UpstreamTlsTable,
    settings: ClientSettings,
}

impl UpstreamTls {
    /// The TLS settings for the engine on `host` if there is no `tls` table. They trust the CAs of
    /// this machine.
    pub(super) fn system(host: &str) -> Result<Option<ClientTls>, TlsError> {
        Ok(ClientSettings::new(Roots::System, None)?.to(host))
    }

    /// The TLS settings for the engine on `host`. `None`: `host` cannot be a name in a certificate.
    pub(super) fn to(&self, host: &str) -> Option<ClientTls> {
        self.settings.to(self.table.server_name.as_ref().map_or(host, |name| &name.0))
    }

    /// The file of the gateway's certificate for engines, if any.
    pub fn certificate(&self) -> Option<&PemFile<Certificates>> {
        self.table.certificate.as_ref()
    }
}

impl PartialEq for UpstreamTls {
    fn eq(&self, other: &Self) -> bool {
        self.table == other.table
    }
}

impl Setting for UpstreamTls {
    const SHAPE: Shape = UpstreamTlsTable::SHAPE;

    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let table = UpstreamTlsTable::read(written, place, key, report)?;
        if !report.is_sound(&place.path) {
            return None;
        }
        let at = |key: &str| join(&place.path, key);
        let own = match (&table.certificate, &table.key) {
            (Some(certificate), Some(key)) => Some((&certificate.content, &key.content)),
            (None, None) => None,
            (Some(_), None) => return report.refuse(&at("certificate"), Situation::CertificateWithoutKey),
            (None, Some(_)) => return report.refuse(&at("key"), Situation::KeyWithoutCertificate),
        };
        let trusted = match (&table.ca, table.verify) {
            (Some(_), VerifyEngine::None) => return report.refuse(&at("verify"), Situation::CaWithoutVerify),
            (None, VerifyEngine::None) => {
                report.add_at(&at("verify"), Situation::NotVerified);
                Roots::Unverified
            }
            (Some(file), VerifyEngine::Required) => Roots::File(&file.content),
            (None, VerifyEngine::Required) => Roots::System,
        };
        let made = ClientSettings::new(trusted, own);
        let settings = made.map_err(|error| {
            let key = if own.is_some() { "key" } else { "ca" };
            report.add_at(&at(key), tls(&error));
        });
        Some(Self { table, settings: settings.ok()? })
    }

    fn show(&self, names: &Names) -> Shown {
        self.table.show(names)
    }
}

fn tls(error: &TlsError) -> Situation {
    Situation::Tls { reason: error.to_string() }
}

/// A PEM file and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PemFile<T> {
    /// The path.
    pub path: PathBuf,
    /// The content when the configuration was read.
    pub content: T,
}

pub(super) trait Pem: Sized {
    /// Whether the gateway warns if all users may read or write the file.
    const SECRET: bool;

    fn from_pem(text: &[u8]) -> Result<Self, TlsError>;

    /// The content as bytes, for comparison.
    fn bytes(&self) -> Vec<u8>;
}

impl Pem for Certificates {
    const SECRET: bool = false;

    fn from_pem(text: &[u8]) -> Result<Self, TlsError> {
        Self::parse(text)
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes()
    }
}

impl Pem for PrivateKey {
    const SECRET: bool = true;

    fn from_pem(text: &[u8]) -> Result<Self, TlsError> {
        Self::parse(text)
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes().to_vec()
    }
}

impl<T: Pem> Setting for PemFile<T> {
    fn read(written: &Entry, place: &Place, _: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let path = PathBuf::parse(written, report).map_err(|situation| report.add(place, situation)).ok()?;
        let shown = path.display().to_string();
        let refused = |reason: String| Situation::PemFile { path: shown.clone(), reason };
        let read = read_file(&path).map_err(|error| report.add(place, refused(error.to_string())));
        let (text, mode) = read.ok()?;
        let parsed = T::from_pem(&text).map_err(|error| report.add(place, refused(error.to_string())));
        let content = parsed.ok()?;
        if T::SECRET && mode & FOR_ALL_USERS != 0 {
            report.add(place, Situation::KeyForAllUsers { path: shown, mode: format!("{:03o}", mode & 0o777) });
        }
        Some(Self { path, content })
    }

    fn show(&self, names: &Names) -> Shown {
        Shown::Secret { shown: self.path.toml(names), compared: self.content.bytes() }
    }
}

/// The content of a file, at most [`limits::MAX_FILE_BYTES`], and its mode.
fn read_file(path: &Path) -> std::io::Result<(Vec<u8>, u32)> {
    let file = std::fs::File::open(path)?;
    let mode = file.metadata()?.permissions().mode();
    let mut text = Vec::new();
    file.take(limits::MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok((text, mode))
}
