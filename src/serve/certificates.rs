//! Says at each start and reload which of the gateway's certificates end soon.
//!
//! The metric `sluice_tls_certificate_expiry_timestamp_seconds` says it all the time; this is for those who have no alert
//! on it. Renewal is left to what made the certificates, which then sends SIGHUP.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::Config;

/// A certificate that ends within this time is warned of: renewal (of 90 days, with 30 left) must have failed.
const SOON_SECONDS: i64 = 14 * 24 * 3_600;

/// Warns of every certificate that the gateway shows and that ends soon, has ended, or is not valid yet.
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
