# The common commands. `just` lists them; each is one line that works without just too.

_default:
    @just --list --unsorted

# Format, lints and project rules: what a commit must pass
check:
    cargo fmt --check && rustfmt --edition 2024 --check src/core/engines/*.rs && cargo clippy --locked --all-targets -- -D warnings && cargo test --locked --test tidy

# Unit and property tests of all crates
unit *ARGS:
    cargo nextest run --locked --lib {{ARGS}}

# Everything but real engines
test:
    cargo test --locked

# All that must hold before a change lands, real vLLM on CPU included
ci:
    .ci/run

# The demonstration on simulated engines
demo *ARGS:
    cargo run --release -- demo {{ARGS}}

# Licences, sources and advisories of dependencies
deny:
    cargo deny check

# CPU time of the gateway beside nginx and haproxy
overhead *ARGS:
    cargo build --release && benches/overhead/run {{ARGS}}

# Wheel and Debian package in target/package
package *WHAT:
    config/package/build {{WHAT}}
