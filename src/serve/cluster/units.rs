//! Converts between the pool's amounts and the ledger's amounts.
//!
//! The name `pool/backend` in the ledger stays when the engine moves to another address, as a
//! replaced pod does. A unit without a configured limit is not divided.

use sluice_cluster::{Amounts, Limit, LocalUse, Unit, Usage};

use sluice_gateway::pool::{BackendLimits, BackendUse, Share};

pub(super) fn name_of(pool: &str, backend: &str) -> String {
    format!("{pool}/{backend}")
}

pub(super) fn limit_of(limits: &BackendLimits) -> Limit {
    Limit::new([
        Some(limits.slots.into()),
        limits.tokens,
        limits.prefill_tokens,
        limits.long_prefix.map(|long| long.slots.into()),
    ])
}

pub(super) fn amounts_of(share: &Share) -> Amounts {
    Amounts::new([share.slots.into(), share.tokens, share.prefill_tokens, share.permits.into()])
}

pub(super) fn share_of(room: &Amounts, limits: &BackendLimits) -> Share {
    let limit = limit_of(limits);
    let amount = |unit| if limit.get(unit).is_some() { room.get(unit) } else { Share::NO_LIMIT };
    let whole = |unit| u32::try_from(amount(unit)).unwrap_or(u32::MAX).min(Share::ALL.slots);
    Share {
        slots: whole(Unit::Slots),
        tokens: amount(Unit::Tokens),
        prefill_tokens: amount(Unit::PrefillTokens),
        permits: whole(Unit::Permits),
    }
}

/// The use of each backend, by the name in the ledger. `is_blind`: ends of requests may have been
/// missed lately.
pub(super) fn local_use(uses: &[BackendUse], is_blind: bool) -> LocalUse {
    let mut local = LocalUse::new();
    // A removed backend of the same name had another engine, so the present backend replaces it.
    for used in uses.iter().filter(|used| used.removed).chain(uses.iter().filter(|used| !used.removed)) {
        let in_use = amounts_of(&used.used);
        let waiting = amounts_of(&used.waiting);
        let usage = Usage {
            limit: limit_of(&used.limits),
            used: in_use,
            wanted: Amounts::each(|unit| in_use.get(unit).saturating_add(waiting.get(unit))),
            need: amounts_of(&used.need),
            settled: if is_blind { 0 } else { used.settled.into() },
            page: None,
        };
        local.insert(name_of(&used.pool, &used.name), usage);
    }
    local
}
