//! The task of one request: sends it through the gateway and records the result.
//!
//! A task does not know the event loop, which takes the result ([`Ended`]) and continues.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use http::header::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::client::{LabClient, LastRecord, seconds};
use crate::cluster::{Cluster, ParsedRequest, route};
use crate::content::content;
use crate::engine::{Engine, EngineRequest};
use crate::upstream::{LabUpstream, WORD};
use sluice_bench::load::conversation::Conversation;
use sluice_bench::load::workload::LoadRequest;
use sluice_bench::{Api, Record, RunPlan};
use sluice_gateway::flow::{Flow, IncomingRequest};
use sluice_gateway::origin::Origin;

pub(crate) type LabFlow = Flow<LabUpstream, LastRecord>;

/// The header with the tenant, for `queue.fair = { header = "x-tenant" }`.
const TENANT: &str = "x-tenant";

pub(crate) struct Ended {
    pub(crate) traffic: usize,
    pub(crate) record: Record,
    pub(crate) conversation: Option<Box<Conversation>>,
    pub(crate) retry_after: Option<Duration>,
}

/// The request with the values that an engine would parse from the body.
pub(crate) fn parsed_request(
    plan: &RunPlan,
    request: &LoadRequest,
    record: &Record,
    conversation: Option<&Conversation>,
) -> ParsedRequest {
    let response = conversation.map(|conversation| (conversation.response_segment(), request.output_tokens));
    let names = &plan.workload.adapters.names;
    let model = request.adapter.and_then(|adapter| names.get(adapter as usize)).unwrap_or(&plan.workload.model);
    let request = EngineRequest {
        prompt_tokens: request.prompt_tokens.max(1),
        output_tokens: request.output_tokens.max(1),
        adapter: record.adapter.and_then(|adapter| u16::try_from(adapter).ok()),
        priority: 0,
        content: content(&request.shared, request.prompt_tokens, record.index, response),
    };
    ParsedRequest { request, model: model.as_str().into(), api: plan.workload.api }
}

pub(crate) struct Job {
    pub(crate) flow: Arc<LabFlow>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) ended: Arc<Mutex<Vec<Ended>>>,
    pub(crate) api: Api,
    pub(crate) tenant: Option<HeaderValue>,
    pub(crate) start: Instant,
    pub(crate) client_timeout: Option<Duration>,
    pub(crate) has_copies: bool,
}

impl Job {
    pub(crate) async fn serve(
        self,
        traffic: usize,
        request: LoadRequest,
        mut record: Record,
        mut conversation: Option<Box<Conversation>>,
    ) {
        let id: Arc<str> = record.index.to_string().into();
        let incoming = Box::new(IncomingRequest {
            route: route(self.api),
            method: Method::POST,
            path: self.api.path().to_owned(),
            headers: self.tenant.map(|tenant| (HeaderName::from_static(TENANT), tenant)).into_iter().collect(),
            priority: None,
            content_type: "application/json".to_owned(),
            body: request.body,
            arrived: Instant::now(),
            request_id: Arc::clone(&id),
            upstream_id: id,
            trace: None,
            routing: self.flow.routing_table(),
            client: None,
            origin: Origin::default(),
            key: None,
            no_continue: false,
            copy_for: None,
        });
        let mut client = LabClient::new(self.api, request.leave_after, self.client_timeout, request.output_tokens);
        self.flow.run(incoming, &mut client).await;
        // This is the record of this request, because `run` wrote it just before it returned, and
        // no other task has run since.
        let gateway = self.flow.recorder().take();
        let retry_after = client.retry_after();
        client.complete(&mut record, gateway.as_deref(), request.output_tokens);
        record.ended = seconds(self.start.elapsed());
        {
            let mut state = self.cluster.lock();
            state.requests.remove(&record.index);
            let streams: usize = state.engines.iter().map(Engine::streams).sum();
            debug_assert!(
                self.has_copies || streams <= state.requests.len(),
                "an engine generates for a client that is gone"
            );
        }
        if let Some(conversation) = &mut conversation {
            conversation.respond(WORD.repeat(request.output_tokens as usize), u64::from(request.output_tokens));
        }
        self.ended.lock().push(Ended { traffic, record, conversation, retry_after });
    }
}
