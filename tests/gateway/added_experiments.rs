//! Experiments that are created, replaced and removed through the admin API while requests run.
//!
//! An added experiment survives a restart. It is kept, but not active, while it does not fit the
//! file. An order that is invalid or cannot be saved changes nothing.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::client::{CHAT, Response, TestClient, change, get, post};
use crate::commands::run;
use crate::engine::Engine;
use crate::test_gateway::{TestGateway, eventually, one_pool};

/// A gateway with a file, which has models `m` and `lora` on two backends, and an experiment for
/// requests of model `lora`.
struct Gateway {
    gateway: TestGateway,
    file: PathBuf,
    text: String,
}

async fn start(engines: &[Engine; 2], folder: &Path) -> Gateway {
    let pool = one_pool(&engines.each_ref().map(Engine::url))
        .replace("[[pool]]", "[[model]]\nname = \"lora\"\n[[pool]]")
        .replace("models = [\"m\"]", "models = [\"m\", \"lora\"]");
    let text = format!(
        "{pool}[[experiment]]\nname = \"of-file\"\nmodels = [\"lora\"]\n[[experiment.arm]]\nname = \"base\"\nweight = 50\n\
         [[experiment.arm]]\nname = \"new\"\nweight = 50\nmodel = \"m\"\n[fleet]\nstate = \"{}\"\n",
        folder.join("state").display()
    );
    let file = folder.join("sluice.toml");
    std::fs::write(&file, &text).unwrap();
    Gateway { gateway: TestGateway::from_file(&file).await, file, text }
}

fn code(response: &Response) -> String {
    response.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
}

fn experiment() -> Value {
    json!({
        "models": ["m"], "sticky": "header", "salt": null, "arm": [
            { "name": "first", "weight": 50, "pool": "only", "backends": ["b0"] },
            { "name": "second", "weight": 50, "pool": "only", "backends": ["b1"], "model": "lora" },
        ],
    })
}

impl Gateway {
    async fn send(&self, method: &str, path: &str, body: &str) -> Response {
        let request = post(path, "x-sluice-admin: 1\r\n", body.as_bytes());
        let request = String::from_utf8(request).unwrap().replacen("POST", method, 1);
        TestClient::to(self.gateway.admin()).await.request(request).await
    }

    async fn put(&self, name: &str, body: &Value) -> Response {
        self.send("PUT", &format!("/admin/experiments/{name}"), &body.to_string()).await
    }

    async fn remove(&self, name: &str) -> Response {
        self.send("DELETE", &format!("/admin/experiments/{name}"), "").await
    }

    async fn arms(&self) -> Vec<Option<String>> {
        let mut arms = Vec::new();
        for user in 0..20 {
            let request = post("/v1/chat/completions", &format!("x-user-id: user-{user}\r\n"), CHAT.as_bytes());
            let response = self.gateway.request(request).await;
            assert_eq!(response.status(), 200, "{}", response.text());
            arms.push(response.head.header("x-sluice-arm").map(str::to_owned));
        }
        arms
    }

    async fn names(&self) -> Vec<String> {
        let all = TestClient::to(self.gateway.admin()).await.request(get("/admin/experiments")).await.json();
        all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_experiment_is_created_replaced_and_removed_and_survives_a_restart() {
    let engines = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(&engines, folder.path()).await;
    assert!(gateway.arms().await.iter().all(Option::is_none));
    let created = gateway.put("x", &experiment()).await;
    assert_eq!((created.status(), created.json()["phase"].as_str()), (200, Some("running")), "{}", created.text());
    let arms = gateway.arms().await;
    assert!(arms.iter().all(Option::is_some) && arms.contains(&Some("x/first".to_owned())));
    assert!(arms.contains(&Some("x/second".to_owned())), "{arms:?}");
    assert_eq!(gateway.send("POST", "/admin/experiments/x/stop", "").await.json()["phase"], "stopped");
    assert_eq!(gateway.send("POST", "/admin/experiments/x/start", "").await.json()["phase"], "running");
    let reload = TestClient::to(gateway.gateway.admin()).await.request(change("/admin/reload")).await;
    assert_eq!(reload.status(), 200, "{}", reload.text());
    assert_eq!(gateway.arms().await, arms, "a reload keeps it");
    let measured = async || {
        let report = TestClient::to(gateway.gateway.admin()).await.request(get("/admin/experiments/x")).await.json();
        report["arms"].as_array().unwrap().iter().map(|arm| arm["requests"].as_u64().unwrap()).sum::<u64>() == 40
    };
    eventually("the requests are measured", measured).await;

    let Gateway { gateway: running, file, text } = gateway;
    assert!(running.stop().await);
    let gateway = Gateway { gateway: TestGateway::from_file(&file).await, file, text };
    assert_eq!(gateway.arms().await, arms, "it survives a restart");
    let report = TestClient::to(gateway.gateway.admin()).await.request(get("/admin/experiments/x")).await.json();
    assert!(report["since"].is_string() && report["arms"][0]["requests"].as_u64().unwrap() > 0, "{report}");

    let file = folder.path().join("experiment.json");
    let admin = format!("--admin=http://{}", gateway.gateway.admin());
    let run = async |arguments: &[&str]| {
        let (code, out, err) = run(&[&["experiment"], arguments, &[&admin]].concat()).await;
        (code, out + &err)
    };
    std::fs::write(&file, experiment().to_string()).unwrap();
    let create = ["create", file.to_str().unwrap()];
    let (code, text) = run(&create).await;
    assert!(code == 1 && text.contains("name: missing"), "{text}");
    let mut other = experiment();
    other["name"] = json!("x");
    other["salt"] = json!("other");
    other["ramp"] = json!(["0.01%", "100% after 10h"]);
    std::fs::write(&file, other.to_string()).unwrap();
    assert_eq!(run(&create).await, (0, "x is running\n".to_owned()));
    assert!(gateway.arms().await.iter().all(Option::is_none), "replaced by one that has just begun");
    other["sticky"] = json!("heder");
    std::fs::write(&file, other.to_string()).unwrap();
    let (code, text) = run(&create).await;
    assert!(code == 1 && text.contains("\nsticky: unknown value 'heder'; did you mean 'header'?"), "{text}");
    assert_eq!(run(&["remove", "x"]).await, (0, "x is removed\n".to_owned()));
    assert_eq!(gateway.names().await, ["of-file"]);
    gateway.gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_an_experiment_is_said_at_its_key_and_nothing_changes() {
    let engines = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(&engines, folder.path()).await;
    let change = |change: &dyn Fn(&mut Value)| {
        let mut body = experiment();
        change(&mut body);
        body
    };
    for (body, problem) in [
        (change(&|body| body["arm"][1]["model"] = json!("lorra")), "arm[1].model: no model is called 'lorra'"),
        (change(&|body| body["arm"][0]["weight"] = json!(40)), "arm: the weights of the arms add up to 90"),
        (change(&|body| body["arm"][0]["weigth"] = json!(40)), "arm[0].weigth: unknown key; did you mean 'weight'?"),
        (change(&|body| body["arm"][0]["weight"] = json!("half")), "arm[0].weight: expected"),
        (change(&|body| body["models"] = json!(["lora"])), "traffic: "),
        (change(&|body| body["name"] = json!("y")), "name: \"y\" is not the name in the path"),
        (change(&|body| drop(body.as_object_mut().unwrap().remove("arm"))), "arm: "),
    ] {
        let response = gateway.put("x", &body).await;
        assert_eq!((response.status(), code(&response).as_str()), (422, "invalid_experiment"), "{}", response.text());
        let problems = response.json()["error"]["problems"].clone();
        assert!(problems[0].as_str().unwrap().starts_with(problem), "{problems} instead of {problem}");
    }
    let of_file = [gateway.put("of-file", &experiment()).await, gateway.remove("of-file").await];
    for response in of_file {
        assert_eq!((response.status(), code(&response).as_str()), (409, "declared_in_file"), "{}", response.text());
    }
    assert_eq!(gateway.remove("y").await.status(), 404);
    for body in ["", "[]", "{\"models\": "] {
        let response = gateway.send("PUT", "/admin/experiments/x", body).await;
        assert_eq!((response.status(), code(&response).as_str()), (400, "bad_request"), "{}", response.text());
    }
    let long = format!("{{\"name\": \"{}\"}}", "x".repeat(70_000));
    assert_eq!(gateway.send("PUT", "/admin/experiments/x", &long).await.status(), 413);
    assert_eq!(gateway.names().await, ["of-file"]);
    assert!(gateway.arms().await.iter().all(Option::is_none));
    gateway.gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arm_without_a_ready_backend_is_refused_and_one_that_the_file_rules_out_later_is_left_out() {
    let [ready, gone] = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let engines = [ready, gone];
    let gateway = start(&engines, folder.path()).await;
    assert_eq!(gateway.put("x", &experiment()).await.status(), 200);
    let [ready, gone] = engines;
    gone.end().await;
    eventually("the backend is down", async || gateway.gateway.state(1) == "down").await;
    let response = gateway.put("y", &experiment()).await;
    assert_eq!((response.status(), code(&response).as_str()), (422, "invalid_experiment"), "x has the same requests");
    let mut other = experiment();
    other["running"] = json!(false);
    assert_eq!(gateway.put("x", &other).await.status(), 200, "it does not run yet");
    assert_eq!(gateway.remove("x").await.status(), 200);
    let response = gateway.put("x", &experiment()).await;
    assert_eq!((response.status(), code(&response).as_str()), (409, "arm_not_ready"), "{}", response.text());
    assert!(response.text().contains("experiment.x.arm.second"), "{}", response.text());
    assert_eq!(gateway.put("x", &other).await.status(), 200);

    let Gateway { gateway: running, file, text } = gateway;
    assert!(running.stop().await);
    std::fs::write(&file, text.replace("name = \"b1\"", "name = \"b2\"")).unwrap();
    let gateway = Gateway { gateway: TestGateway::from_file(&file).await, file, text };
    assert_eq!(gateway.names().await, ["of-file", "x"]);
    assert!(gateway.arms().await.iter().all(Option::is_none));
    assert!(ready.count() > 0);
    gateway.gateway.settled().await;
}

async fn shown(gateway: &Gateway) -> Value {
    TestClient::to(gateway.gateway.admin()).await.request(get("/admin/experiments/x")).await.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_experiment_that_does_not_fit_the_file_is_kept_with_its_measurements_until_it_fits_again() {
    let engines = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(&engines, folder.path()).await;
    assert_eq!(gateway.put("x", &experiment()).await.status(), 200);
    let arms = gateway.arms().await;
    let measured = async |gateway: &Gateway| {
        let report = shown(gateway).await;
        report["arms"].as_array().unwrap().iter().map(|arm| arm["requests"].as_u64().unwrap()).sum::<u64>()
    };
    eventually("the requests are measured", async || measured(&gateway).await == 20).await;
    let restart = async |gateway: Gateway, text: String| {
        let Gateway { gateway: running, file, .. } = gateway;
        assert!(running.stop().await);
        std::fs::write(&file, &text).unwrap();
        Gateway { gateway: TestGateway::from_file(&file).await, file, text }
    };
    let fits = gateway.text.clone();
    let gateway = restart(gateway, fits.replace("name = \"b1\"", "name = \"b2\"")).await;
    let report = shown(&gateway).await;
    let why = report["why"].as_str().unwrap();
    assert!(report["phase"] == "not_active" && why.starts_with("arm[1].backends[0]: "), "{report}");
    let start = gateway.send("POST", "/admin/experiments/x/start", "").await;
    assert_eq!((start.status(), code(&start).as_str()), (409, "not_active"), "{}", start.text());
    let mut other = experiment();
    other["arm"][1]["backends"] = json!(["b2"]);
    other["traffic"] = json!({ "from": 0.5 });
    assert_eq!(gateway.put("y", &other).await.status(), 200, "x takes no requests");
    assert_eq!(gateway.remove("y").await.status(), 200);
    let gateway = restart(gateway, fits).await;
    assert_eq!((shown(&gateway).await["phase"].as_str(), measured(&gateway).await), (Some("running"), 20));
    assert_eq!(gateway.arms().await, arms);
    let unfit = gateway.text.replace("name = \"b1\"", "name = \"b2\"");
    let gateway = restart(gateway, unfit).await;
    assert_eq!(gateway.remove("x").await.status(), 200);
    assert_eq!(gateway.names().await, ["of-file"]);
    gateway.gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_of_saved_experiments_that_cannot_be_read_is_set_aside() {
    let engines = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    for name in ["added_experiments.json", "experiments.json"] {
        std::fs::write(state.join(name), "[{\"name\": ").unwrap();
    }
    let gateway = start(&engines, folder.path()).await;
    assert_eq!(gateway.put("x", &experiment()).await.status(), 200);
    for name in ["added_experiments.json", "experiments.json"] {
        let kept = std::fs::read_to_string(state.join(format!("{name}.unreadable-1"))).unwrap();
        assert_eq!(kept, "[{\"name\": ");
    }
    gateway.gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_cannot_be_saved_is_refused_and_changes_nothing() {
    let engines = [Engine::with_adapter().await, Engine::with_adapter().await];
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(&engines, folder.path()).await;
    assert_eq!(gateway.put("x", &experiment()).await.status(), 200);
    let arms = gateway.arms().await;
    // A folder at the path of the temporary file prevents the gateway from writing this file.
    let draft = folder.path().join("state/added_experiments.json.tmp");
    std::fs::create_dir(&draft).unwrap();
    let mut other = experiment();
    other["salt"] = json!("other");
    for response in [gateway.put("x", &other).await, gateway.remove("x").await] {
        assert_eq!((response.status(), code(&response).as_str()), (500, "not_saved"), "{}", response.text());
        assert!(response.text().contains("(fleet.state)"), "{}", response.text());
    }
    assert_eq!((gateway.names().await, gateway.arms().await), (vec!["of-file".to_owned(), "x".to_owned()], arms));
    std::fs::remove_dir(&draft).unwrap();
    assert_eq!(gateway.remove("x").await.status(), 200);
    gateway.gateway.settled().await;
}
