//! `sluice bench --find-rate`: the highest rate at which the objectives hold, on real servers.
//!
//! What is here ties the search to the load generator.
//! The search itself is `bench::search`.

#[cfg(test)]
mod tests;
