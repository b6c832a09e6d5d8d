//! NVIDIA Triton with the HTTP protocol of KServe (v2).
//!
//! The path of a request names the model, and a stream of `generate_stream` has no end marker: the
//! end of the body ends it. The metrics have a port of their own (8002). A batch may run for
//! minutes while no counter changes, so only the `deadline` of a pool shows that Triton hangs. The
//! operator loads models; the gateway does not list them.

use std::time::Duration;

use serde::Deserialize;

use super::flag_table::{FlagForm, FlagTable};
use super::rules::{BATCH_SLOTS, EngineRules, Health, IdentityPage, MetricsPage, translated};
use crate::openai::Route;
use crate::vllm::failure::{FailureClass, LogRules};
use crate::vllm::logs::{LogForm, StartPhase};

pub(super) const RULES: EngineRules = EngineRules {
    health: "/v2/health/ready",
    health_takes: Duration::ZERO,
    answers_while_busy: true,
    judge: |status, _| Health::of_status(status),
    lists_models: false,
    owners: &[],
    identity: Some(IdentityPage { path: "/v2", is_own: is_triton }),
    describes_routes: false,
    version: None,
    metrics: Some(MetricsPage {
        port: Some(8002),
        read: |page| translated(page, "nv_", NAMES),
        shows_steps: false,
        counts_tokens: false,
    }),
    slots_page: None,
    slots: BATCH_SLOTS,
    serves: Route::is_kserve,
    limits_each_model: true,
    does_jobs: true,
    aborts: true,
    continues: false,
    flags: Some(&FLAGS),
    log: &LOG,
};

const NAMES: &[(&str, &str)] = &[
    ("inference_pending_request_count", "num_requests_waiting"),
    ("inference_exec_count", "iteration_tokens_total_count"),
    ("inference_request_success", "request_success_total"),
];

/// Whether the server's metadata has Triton's name. Other servers that speak KServe's protocol have
/// other names.
fn is_triton(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Server {
        name: String,
    }
    serde_json::from_slice(body).is_ok_and(|Server { name }| name == "triton")
}

const FLAGS: FlagTable = FlagTable {
    engine: "Triton",
    list: include_str!("triton_flags.txt"),
    form: FlagForm::Valued,
    program: Some("tritonserver"),
    package: None,
    address: ("http-address", "http-port"),
    tls: &[],
    model: &["model-repository"],
    sequences: None,
    devices: &[],
    tuned: &[],
};

const LOG: LogRules = LogRules {
    form: LogForm {
        // `I1130 09:19:48.595319 22657 metrics.cc:770] "Collecting CPU metrics"`
        message: |line| match level(line).and_then(|_| line.split_once("] ")) {
            Some((_, rest)) => rest.trim_end(),
            None => line.trim_end(),
        },
        is_remark: |line| level(line).is_some_and(|level| matches!(level, 'I' | 'W')),
        phases: &[
            ("Pinned memory pool is created", StartPhase::Configuring),
            ("CUDA memory pool disabled", StartPhase::Configuring),
            ("loading: ", StartPhase::LoadingWeights),
            ("| Option ", StartPhase::OpeningHttp),
            ("Started HTTPService at", StartPhase::Serving),
        ],
    },
    failures: &[
        ("unrecognized option", FailureClass::UnknownFlag),
        ("' already in use", FailureClass::PortInUse),
        ("failed to stat file", FailureClass::ModelNotFound),
        ("failed to poll from model repository", FailureClass::ModelNotFound),
        ("unable to allocate", FailureClass::OutOfMemory),
        ("failed to allocate", FailureClass::OutOfMemory),
        ("triton_python_backend_stub is not found", FailureClass::ProgramMissing),
        ("CUDA driver version is insufficient", FailureClass::DeviceError),
        ("no CUDA-capable device", FailureClass::DeviceError),
        ("failed to load '", FailureClass::BadArguments),
        ("failed to load all models", FailureClass::BadArguments),
        ("Invalid argument", FailureClass::BadArguments),
    ],
    healthy: &["Started HTTPService at"],
    shutdown: &["Waiting for in-flight requests to complete", "Interrupt signal (15) received"],
    crashes: &["Signal (6) received", "Signal (11) received"],
    advice: &[
        (FailureClass::OutOfMemory, LESS_MEMORY),
        (FailureClass::OutOfMemoryLoading, LESS_MEMORY),
        (FailureClass::OutOfMemoryServing, LESS_MEMORY),
        (FailureClass::UnknownFlag, "remove the flag; this tritonserver does not have it (see its --help)"),
        (FailureClass::ModelNotFound, "correct args.model-repository: a folder with one folder for each model"),
        (
            FailureClass::PortInUse,
            "each Triton of a host needs its own http-port, grpc-port and metrics-port (or allow-grpc = false)",
        ),
        (FailureClass::BadArguments, "look at the table of models in the engine's log, and correct what it names"),
    ],
};
const LESS_MEMORY: &str = "lower the number of instances or max_batch_size of the models, or load fewer models";

fn level(line: &str) -> Option<char> {
    let (head, _) = line.split_once(' ')?;
    let level = head.chars().next()?;
    (head.len() == 5 && head[1..].bytes().all(|byte| byte.is_ascii_digit())).then_some(level)
}
