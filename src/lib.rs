//! sluice: a gateway in front of vLLM that keeps tail latency low.
//!
//! ```text
//!                          src/cli    the subcommands
//!                             |
//!                  +----------+-----------------+--------------------+
//!                  |                            |                    |
//!    src/serve  composition, reload, shutdown   |                    |
//!    src/admin  metrics, status, admin API   src/tune  search for    |
//!                  |                            |      settings      |
//!                  |                      src/lab  gateway, load and engines
//!        +---------+----------+           on virtual time            |
//!        |                    |          /      |             \      |
//!    src/fleet           src/online         src/bench            src/sim
//!    engine processes    online tuner       load generator       simulated vLLM
//!        |   \                |                 |                    |
//!        |    `---------> src/gateway           |                    |
//!        |                request path     src/cluster              |
//!        |                    |            shares of several         |
//!        |                    |            gateways                  |
//!        +--------------------+--------+--------+--------------------+
//!                                      |
//!                                  src/core   units, statistics, OpenAI and vLLM formats, meter
//!
//!   the request path, in src/gateway:
//!
//!   client -> proxy -> flow: estimate -> classify -> assign -> admit -> forward -> meter -> record -> telemetry
//!                             |           |           |          |        |
//!                         estimate/  RoutingTable  experiment/  pool/   proxy -> vLLM
//! ```
//!
//! A crate uses only crates below it, so the compiler enforces the layers and a change rebuilds only what is above it.
//! `bench` and `sim` check the gateway from outside, so they use `core` only. `lab` runs the gateway's request path, the load
//! generator and simulated engines in one process on virtual time; `tune` searches for settings with it, or with real engines of
//! `fleet`. `online` moves the gateway's own limits by what finished requests experienced; `serve` and `lab` run it. Within a crate (except `fleet` and `sim`) modules are declared lowest layer first, and a file uses only modules
//! that are declared above its own. `tests/tidy` checks what the compiler does not.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | downstream, upstream | towards the client, towards vLLM |
//! | backend | one vLLM server, by its address; *external* when another program runs it |
//! | engine | the vLLM process or script behind a backend; one that the gateway runs has an *engine task* |
//! | driver | how an engine is started and stopped: a process, an operator's commands, or not at all (external) |
//! | pool | backends that serve the same requests, with one bounded queue |
//! | estimate | predicted tokens of a request, and how they were obtained |
//! | class | kind of request after classification, by prompt length |
//! | routing table | snapshot of keys, models and pools that a request uses from start to end |
//! | admission | the decision to forward, queue or shed a request, together with the choice of a backend (placement) |
//! | slot, permit | room for one sequence on a backend; room for one long prompt in prefill |
//! | lease | the right to use a backend: slot, tokens and prefill tokens, returned by drop |
//! | owner | the key, the user within a key, or the header value whose share of a fair pool a request uses |
//! | work, level | seconds of an engine that an owner was charged; the sum of an owner's work divided by the owner's weight |
//! | virtual time (V) | the level at which a newcomer of a fair pool starts |
//! | overtake | to be granted room in which a request that entered earlier would have fit |
//! | wide request | one that needs more sequences or tokens than a backend has free; a backend is reserved for it |
//! | overtaking limit | how many requests may overtake a waiter, and for how long; then it goes before all that entered later |
//! | ledger, share | which gateway may use which part of each backend's limits, for several gateways; that part |
//! | beat, lease of a share | the number that a gateway raises when it renews its shares; how long a renewal is good for |
//! | grant | capacity already taken on a backend for one request; a lease wraps it and returns it |
//! | foreign use, share | what other gateways use of a backend, or may begin to use; what this one may use where another one divides the limits |
//! | claim, concede | to say what one uses and needs of a backend, after lowering one's share to it; to count that as foreign use and say how much of it fits |
//! | spill | send a request to another pool, because its own has no room |
//! | shed | refuse a request early, with a reason and `Retry-After` |
//! | eject, readmit | take a failing backend out of rotation, and put it back |
//! | mark | a value in the environment of an engine's processes that identifies them; it holds a secret of the state folder |
//! | priority | the number that orders requests, here and on engines that schedule by priority; lower is earlier |
//! | origin | the client to which the outcome of a request counts: its API key, or without keys the client's network |
//! | suspect, trial of a suspect | a body that was on an engine when it died; the next delivery of such a body |
//! | cordon | take a backend out of rotation while its engine changes |
//! | drain | send no new requests, let running ones finish |
//! | probe, scrape | check an engine's health; read its metrics page |
//! | variant, arm | a named vLLM configuration; a variant or model in an experiment, with a share of the traffic |
//! | unit, layer | what stays in one arm (a user, a session, a request); experiments that divide the units among themselves |
//! | confidence sequence | an interval that contains the truth at all times together with the stated confidence |
//! | scenario, its variants | input of `sluice lab`: configuration, engines and traffic; changes to them that are compared |
//! | setting, space | keys and values that differ from the defaults; the settings that a tuner may try |
//! | online tuner, controller | what moves the gateway's limits while requests run; its part for pools that serve the same models |
//! | window, loss | requests that arrived since a moment; by how much a request missed its objectives |
//! | trial | one setting, or one load of a search for a rate, and what came of it |
//! | outcome | how a request ended: completed, client_gone, shed, refused, upstream_error, timeout |
//! | record | what is kept of a request: exactly one each |
//! | trace, span | what tracing systems keep of a request over several programs; a part of that with a beginning and an end |
//! | preamble, first token | events of a stream before its first output: comments, roles, lifecycle events; the first event with output or a finish reason |
//! | TTFT, ITL, TPOT, E2EL | time to first token, between tokens, per output token, end to end; defined in [`meter`] |
//! | goodput, attainment | requests per second, and share of requests, that met all their objectives |
//!
//! # Invariants
//!
//! 1. Response bytes are never changed, except that usage events which the gateway requested are removed and event streams with
//!    gzip are decompressed. They are never delayed, except that the head and the preamble of a stream (roles, lifecycle events)
//!    leave together with its first token.
//! 2. Every queue, map, buffer, label set and retry has a bound with a name.
//! 3. No request is retried after the first token of a stream, or the first byte of another response, has reached the client.
//! 4. `config`, `estimate`, `pool`, `experiment` and `flow` use no metrics library, socket, child process or
//!    wall clock.
//! 5. Every request ends with exactly one record. Leases are returned by drop. No counter is repaired by a reset.
//! 6. There is no `dyn`, lock or allocation per chunk of a stream. The request path uses dense ids, not strings.

pub use sluice_bench as bench;
pub use sluice_core::{base, meter, openai, stats, vllm};
pub use sluice_fleet as fleet;
pub use sluice_gateway::{config, estimate, experiment, flow, owner, pool, proxy, telemetry};
pub use sluice_lab as lab;
pub use sluice_online as online;
pub use sluice_sim as sim;
pub use sluice_tune as tune;

pub mod admin;
pub mod serve;
pub mod cli;
