//! sluice: a gateway in front of vLLM that keeps tail latency low.
//!
//! ```text
//!   crate        contents                                          uses, apart from core
//!   -----------  ------------------------------------------------  ----------------------------
//!   src/cli      the subcommands, in this crate                    all but cluster
//!   src/serve    a running gateway: services, reload, upgrade      admin lab online fleet gateway
//!                                                                  config cluster
//!   src/admin    the admin port: routes, client, live page         online fleet gateway config
//!   src/tune     search for settings                               lab sim bench fleet config
//!   src/lab      gateway, load and engines on virtual time         online sim bench gateway config
//!   src/online   the online tuner, the scaler                      gateway config
//!   src/sim      a process that behaves like vLLM
//!   src/bench    the load generator
//!   src/fleet    engine processes                                  gateway config
//!   src/gateway  the request path                                  config
//!   src/config   the configuration, TLS settings
//!   src/cluster  shares of several gateways
//!   src/core     units, statistics, OpenAI and vLLM formats, meter
//!
//!   the request path, in src/gateway:
//!
//!   client -> proxy -> flow:
//!     estimate -> classify -> assign -> admit -> forward -> meter -> record -> telemetry
//!
//!     estimate: estimate/   classify: RoutingTable   assign: experiment/
//!     admit: pool/          forward: proxy -> vLLM
//! ```
//!
//! A crate uses only crates below it in this list, so the compiler enforces the layers, and a
//! change rebuilds only the crates that use the changed crate. `bench` and `sim` check the gateway
//! from outside, so they use only `core`. `lab` runs the request path, the load generator and
//! simulated engines in one process on virtual time; `tune` searches for settings with `lab`, or
//! with real engines of `fleet`. `online` moves the gateway's limits by the results of finished
//! requests; `serve` and `lab` run it. Within a crate (except `fleet` and `sim`) modules are
//! declared lowest layer first, and a file uses only modules that are declared above the file's
//! module. `tests/tidy` checks the rest.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | downstream, upstream | towards the client, towards vLLM |
//! | backend | one vLLM server, by address; *external* if another program runs it |
//! | engine | the vLLM process or script behind a backend; the gateway's *engine task* runs it |
//! | driver | the way to start and stop an engine: process, operator's commands, none (external) |
//! | pool | backends that serve the same requests, with one bounded queue |
//! | estimate | predicted tokens of a request, and how they were obtained |
//! | class | kind of request after classification, by prompt length |
//! | routing table | snapshot of keys, models and pools that a request uses from start to end |
//! | admission | the decision to forward, queue or shed a request, with the choice of a backend |
//! | slot, permit | room for one sequence on a backend; room for one long prompt in prefill |
//! | lease | the right to use slots, tokens and prefill tokens of a backend, returned by drop |
//! | grant | capacity taken on a backend for one request; a lease wraps it and returns it |
//! | owner | key, user within a key, or header value whose share of a fair pool a request uses |
//! | work, level | engine seconds charged to an owner; the sum of an owner's work over the weight |
//! | virtual time (V) | the level at which a newcomer of a fair pool starts |
//! | overtake | to get room in which a request that entered earlier would have fit |
//! | overtaking limit | requests and time after which a waiter goes before all later requests |
//! | wide request | needs more room than any backend has free; one backend is reserved for it |
//! | ledger, share | division of each backend's limits among gateways; one gateway's part of them |
//! | beat, lease of a share | number that a gateway raises to renew shares; validity of a renewal |
//! | foreign use | the part of a backend that other gateways use or may begin to use |
//! | claim | a gateway's statement of use and need on a backend, to which it lowered the share |
//! | concede | another gateway's answer: the part of a claim that fits, counted as foreign use |
//! | spill | send a request to another pool, because the first one has no room |
//! | shed | refuse a request early, with a reason and `Retry-After` |
//! | eject, readmit | take a failing backend out of rotation, and put it back |
//! | mark | environment variable that identifies an engine's processes by the state folder's key |
//! | priority | orders requests, also on engines that schedule by priority; lower is earlier |
//! | origin | the client that an outcome counts for: the API key, or without keys the network |
//! | suspect, trial of a suspect | a body on an engine at its death; next delivery of the body |
//! | cordon | take a backend out of rotation while the engine changes |
//! | drain | send no new requests, let running ones finish |
//! | probe, scrape | check an engine's health; read the engine's metrics page |
//! | variant, arm | a named vLLM configuration; a variant or model with a share of an experiment |
//! | unit, layer | stays in one arm (user, session, request); experiments that divide the units |
//! | confidence sequence | interval that holds at all times together with the given confidence |
//! | scenario | input of `sluice lab`: configuration, engines and traffic; *variants* change it |
//! | setting, space | keys and values that differ from the defaults; settings a tuner may try |
//! | online tuner | moves the limits of a running gateway |
//! | controller | the part of the online tuner for pools that serve the same models |
//! | window, loss | requests since a moment; distance by which a request missed objectives |
//! | trial | one setting, or one load of a search for a rate, and the result |
//! | outcome | end of a request: completed, client_gone, shed, refused, upstream_error, timeout |
//! | record | the data kept of a request; exactly one for each request |
//! | trace, span | data of a request across programs; one part of it with a beginning and an end |
//! | preamble | events of a stream before the first token: comments, roles, lifecycle events |
//! | first token | the first event of a stream with output or a finish reason |
//! | TTFT, ITL, TPOT, E2EL | time to first token, between tokens, per token, in all |
//! | goodput, attainment | requests per second, and share of requests, that met all objectives |
//!
//! # Invariants
//!
//! 1. Response bytes are never changed, except that usage events which the gateway requested are
//!    removed, event streams with gzip are decompressed, and the events of an engine that continues
//!    another engine's answer get that answer's identity. They are never delayed, except that the
//!    head and the preamble of a stream leave together with the first token, and the bytes of an
//!    unfinished event with its end.
//! 2. Every queue, map, buffer, label set and retry has a bound with a name.
//! 3. No request is retried after the first token of a stream, or the first byte of another
//!    response, has reached the client. A stream may be continued: no text is sent twice.
//! 4. `config`, `estimate`, `pool`, `experiment` and `flow` use no metrics library, socket, child
//!    process or wall clock.
//! 5. Every request ends with exactly one record. Leases are returned by drop. No counter is
//!    repaired by a reset.
//! 6. There is no `dyn`, lock or allocation per chunk of a stream. The request path uses dense ids,
//!    not strings.

pub mod cli;
