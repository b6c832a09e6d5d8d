//! Warns at each start and reload about the gateway's certificates that expire soon.
//!
//! The dates themselves are in `sluice_tls_certificate_expiry_timestamp_seconds`. The gateway does
//! not renew certificates. Send SIGHUP after a renewal.

use std::time::{SystemTime, UNIX_EPOCH};

use sluice_config::Config;

/// Time before expiry from which the gateway warns. Certificates for 90 days are usually renewed 30
/// days before they expire, so the renewal must have failed.
const SOON_SECONDS: i64 = 14 * 24 * 3_600;

/// Warns about certificates that expire within [`SOON_SECONDS`], have expired, or are not valid
/// yet.
pub(super) fn warn(config: &Config) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    for file in config.own_certificates() {
        let (path, dates) = (file.path.display(), file.content.validity());
        if now > dates.until {
            tracing::warn!("the certificate {path} has expired: the other side will refuse it; renew it, then reload");
        } else if now < dates.from {
            tracing::warn!("the certificate {path} is not valid yet: the other side will refuse it; check the clocks");
        } else if dates.until - now < SOON_SECONDS {
            let days = (dates.until - now) / (24 * 3_600);
            tracing::warn!("the certificate {path} expires in {days} days; renew it, then reload");
        }
    }
}
