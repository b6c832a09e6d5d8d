//! Handshakes in memory.
//!
//! The tests check which certificates are accepted, and the error when a certificate is refused.

use rustls::ProtocolVersion;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::TlsAcceptor;

use super::testing::{Authority, Issued};
use super::*;

fn certificates(text: &str) -> Certificates {
    Certificates::parse(text.as_bytes()).unwrap()
}

fn key(text: &str) -> PrivateKey {
    PrivateKey::parse(text.as_bytes()).unwrap()
}

fn server(issued: &Issued, clients: Option<(&Authority, bool)>) -> ServerTls {
    let ca = clients.map(|(ca, required)| (certificates(&ca.pem), required));
    let clients = ca.as_ref().map(|(ca, required)| ClientCertificates { ca, required: *required });
    ServerTls::new(&certificates(&issued.certificate), &key(&issued.key), clients).unwrap()
}

fn client(trusted: &str, own: Option<&Issued>) -> ClientTls {
    let own = own.map(|issued| (certificates(&issued.certificate), key(&issued.key)));
    let own = own.as_ref().map(|(certificates, key)| (certificates, key));
    ClientSettings::new(Roots::File(&certificates(trusted)), own).unwrap().to("gpu0.internal").unwrap()
}

/// Connects, sends a word and reads it back. Returns the TLS version, or the client's error.
async fn handshake(server: &ServerTls, client: &ClientTls) -> Result<ProtocolVersion, String> {
    let (near, far) = duplex(64 << 10);
    let acceptor = TlsAcceptor::from(server.config());
    let echo = tokio::spawn(async move {
        let mut stream = acceptor.accept(far).await.ok()?;
        let mut word = [0; 4];
        stream.read_exact(&mut word).await.ok()?;
        stream.write_all(&word).await.ok()?;
        stream.shutdown().await.ok()
    });
    let exchange = async {
        let mut stream = client.connect(near).await?;
        stream.write_all(b"word").await?;
        let mut word = [0; 4];
        stream.read_exact(&mut word).await?;
        assert_eq!(&word, b"word");
        Ok::<_, std::io::Error>(stream.get_ref().1.protocol_version().unwrap())
    };
    let result = exchange.await.map_err(|error| error.to_string());
    let served = echo.await.unwrap();
    assert_eq!(served.is_some(), result.is_ok(), "{result:?}");
    result
}

#[tokio::test]
async fn an_engine_is_trusted_for_its_ca_and_its_name() {
    let (ca, other) = (Authority::new(), Authority::new());
    let right = server(&ca.issue(&["gpu0.internal"]), None);
    assert_eq!(handshake(&right, &client(&ca.pem, None)).await, Ok(ProtocolVersion::TLSv1_3));
    let why = handshake(&right, &client(&other.pem, None)).await.unwrap_err();
    assert!(why.contains("UnknownIssuer"), "{why}");
    let why = handshake(&server(&ca.issue(&["gpu1.internal"]), None), &client(&ca.pem, None)).await.unwrap_err();
    assert!(why.contains("not valid for name \"gpu0.internal\""), "{why}");
    let why =
        handshake(&server(&ca.issue_until(&["gpu0.internal"], 2021), None), &client(&ca.pem, None)).await.unwrap_err();
    assert!(why.contains("expired"), "{why}");
}

#[tokio::test]
async fn a_self_signed_certificate_is_trusted_if_it_is_in_the_ca_file() {
    let (own, other) = (Issued::self_signed(&["gpu0.internal"]), Issued::self_signed(&["gpu0.internal"]));
    assert!(handshake(&server(&own, None), &client(&own.certificate, None)).await.is_ok());
    assert!(handshake(&server(&own, None), &client(&other.certificate, None)).await.is_err());
    let named = Issued::self_signed(&["gpu1.internal"]);
    let why = handshake(&server(&named, None), &client(&named.certificate, None)).await.unwrap_err();
    assert!(why.contains("gpu1.internal"), "{why}");
    let ended = Issued::self_signed_until(&["gpu0.internal"], 2021);
    let why = handshake(&server(&ended, None), &client(&ended.certificate, None)).await.unwrap_err();
    assert!(why.contains("Expired"), "{why}");
}

#[tokio::test]
async fn without_verification_any_certificate_is_accepted() {
    let unverified = server(&Issued::self_signed(&["anything"]), None);
    let unverifying = ClientSettings::new(Roots::Unverified, None).unwrap().to("10.0.0.1").unwrap();
    assert!(handshake(&unverified, &unverifying).await.is_ok());
}

#[tokio::test]
async fn a_client_certificate_is_requested_and_verified() {
    let (ca, clients, other) = (Authority::new(), Authority::new(), Authority::new());
    let issued = ca.issue(&["gpu0.internal"]);
    let (shown, wrong) = (clients.issue(&["gateway"]), other.issue(&["gateway"]));
    let required = server(&issued, Some((&clients, true)));
    assert!(handshake(&required, &client(&ca.pem, Some(&shown))).await.is_ok());
    let why = handshake(&required, &client(&ca.pem, None)).await.unwrap_err();
    assert!(why.contains("CertificateRequired"), "{why}");
    assert!(handshake(&required, &client(&ca.pem, Some(&wrong))).await.is_err());
    let optional = server(&issued, Some((&clients, false)));
    assert!(handshake(&optional, &client(&ca.pem, None)).await.is_ok());
    assert!(handshake(&optional, &client(&ca.pem, Some(&wrong))).await.is_err());
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let ca = Authority::new();
    let (one, other) = (ca.issue(&["a"]), ca.issue(&["a"]));
    let made = ServerTls::new(&certificates(&one.certificate), &key(&other.key), None);
    assert_eq!(made.unwrap_err(), TlsError::KeyMismatch);
    let own = (&certificates(&one.certificate), &key(&other.key));
    let made = ClientSettings::new(Roots::Unverified, Some(own));
    assert_eq!(made.unwrap_err(), TlsError::KeyMismatch);
}

#[test]
fn connections_are_reused_only_with_the_same_settings() {
    let (ca, other) = (Authority::new(), Authority::new());
    let own = ca.issue(&["gateway"]);
    let digest = |trusted: &str, own| client(trusted, own).digest();
    assert_eq!(digest(&ca.pem, None), digest(&ca.pem, None));
    assert_ne!(digest(&ca.pem, None), digest(&other.pem, None));
    assert_ne!(digest(&ca.pem, None), digest(&ca.pem, Some(&own)));
    let settings = ClientSettings::new(Roots::Unverified, None).unwrap();
    assert_ne!(settings.to("a"), settings.to("b"));
    assert_eq!(settings.to("not a name"), None);
    assert!(ServerName::try_from("10.0.0.1").is_ok() && settings.to("::1").is_some());
}

#[test]
fn certificates_and_keys_are_found_among_other_blocks() {
    let ca = Authority::new();
    let issued = ca.issue_until(&["a"], 2031);
    // A combined file as for HAProxy, with comments.
    let together = format!("# note\n{}{}{}", issued.key, issued.certificate, ca.pem);
    let (found, alone) = (certificates(&together), certificates(&issued.certificate));
    assert_eq!((found.iter().count(), alone.iter().count()), (2, 1));
    assert_eq!(key(&together), key(&issued.key));
    assert_eq!(found.validity(), alone.validity());
    assert_eq!(alone.validity(), Validity { from: 1_577_836_800, until: 1_924_992_000 });
    assert_eq!(Certificates::parse(issued.key.as_bytes()).unwrap_err(), TlsError::NoCertificate);
    assert_eq!(PrivateKey::parse(ca.pem.as_bytes()).unwrap_err(), TlsError::NoKey);
    for garbage in
        ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "-----BEGIN CERTIFICATE-----\n"]
    {
        assert!(Certificates::parse(garbage.as_bytes()).is_err());
    }
    assert_eq!(format!("{:?} {:?}", key(&issued.key), found), "PrivateKey(********) Certificates(2)");
}
