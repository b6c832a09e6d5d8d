//! The routes of the admin port: paths, methods and the actions behind them, over loopback.

use super::tests::{TOKEN, code, no_changes, send, served};

#[tokio::test]
async fn an_unknown_path_is_404_and_a_wrong_method_405_in_json() {
    let served = served(None, no_changes).await;
    for missing in ["GET /nothing", "GET /v1/chat/completions", "POST /admin/backends/short/gpu0/explode"] {
        let (status, _, body) = send(&served, missing, "").await;
        assert_eq!((status, code(&body).as_str()), (404, "not_found"), "{missing}");
    }
    for (wrong, allowed) in [("GET /admin/reload", "allow: post"), ("DELETE /metrics", "allow: get, head")] {
        let (status, head, body) = send(&served, wrong, "").await;
        assert_eq!((status, code(&body).as_str()), (405, "method_not_allowed"), "{wrong}");
        assert!(head.contains(allowed), "{head}");
    }
}

#[tokio::test]
async fn experiments_are_listed_with_the_token_and_changed_with_the_right_methods() {
    let served = served(Some(TOKEN), no_changes).await;
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    let with_body = |body: &str| format!("{token}Content-Length: {}\r\n\r\n{body}", body.len());
    for (request, headers, want) in [
        ("GET /admin/experiments", "", 401),
        ("GET /admin/experiments", token.as_str(), 200),
        ("POST /admin/experiments", token.as_str(), 405),
        ("GET /admin/experiments/y", token.as_str(), 404),
        ("GET /admin/experiments/y/start", token.as_str(), 405),
        ("POST /admin/experiments/y/start", "", 401),
        ("POST /admin/experiments/y/start", token.as_str(), 409),
        ("POST /admin/experiments/y/stop", token.as_str(), 404),
        ("POST /admin/experiments/y/pause", token.as_str(), 404),
        ("POST /admin/experiments/y", token.as_str(), 405),
        ("PUT /admin/experiments/y", "", 401),
        ("PUT /admin/experiments/y", with_body("{}").as_str(), 404),
        ("PUT /admin/experiments/y", with_body("{\"weight\":1}").as_str(), 422),
        ("PUT /admin/experiments/y", with_body("[]").as_str(), 400),
        ("DELETE /admin/experiments/y", "", 401),
        ("DELETE /admin/experiments/y", token.as_str(), 409),
    ] {
        let (status, _, body) = send(&served, request, headers).await;
        assert_eq!(status, want, "{request}: {body}");
    }
    let (_, head, _) = send(&served, "POST /admin/experiments/y", &token).await;
    assert!(head.contains("allow: get, head, put, delete\r\n"), "{head}");
    let (_, _, body) = send(&served, "PUT /admin/experiments/y", &with_body("{\"weight\":1}")).await;
    assert!(code(&body) == "invalid_experiment" && body.contains("[\"weight: unknown key\"]"), "{body}");
    let (_, _, body) = send(&served, "POST /admin/experiments/y/start", &token).await;
    assert!(body.contains("experiment.y.arm.b: none of its backends is ready"), "{body}");
}

#[tokio::test]
async fn names_in_a_path_may_be_encoded() {
    let served = served(None, no_changes).await;
    for (request, status, says) in [
        ("POST /admin/backends/a%2Fb/gpu%3a0/enable", 404, "there is no pool 'a/b'"),
        ("POST /admin/backends/short/gpu%3a0/drain", 404, "there is no backend 'gpu:0' in pool 'short'"),
        ("GET /admin/experiments/a%2Fb", 404, "there is no experiment 'a/b'"),
        ("POST /admin/experiments/a/promote/b%2Fc", 404, "experiment 'a' has no arm 'b/c'"),
        ("POST /admin/tuner/approve/2%2E1", 404, "there is no proposal 2.1"),
        ("GET /admin/requests/a%2Fb", 404, "no request with this id"),
        ("POST /admin/backends/a/b/c/drain", 404, "there is no route"),
        ("POST /admin/backends//b/drain", 404, "there is no route"),
        ("POST /admin/backends/a/%2/drain", 404, "there is no route"),
        ("GET /Metrics", 404, "there is no route"),
        ("GET /admin/experimentsx", 404, "there is no route"),
        ("GET /admin/experiments/", 404, "there is no route"),
        ("POST /admin/experiments/a/promote", 404, "there is no route"),
    ] {
        let (found, _, body) = send(&served, request, "").await;
        assert!(found == status && body.contains(says), "{request}: {body}");
    }
}

#[tokio::test]
async fn orders_to_the_tuner_have_a_path_each() {
    let served = served(None, no_changes).await;
    for request in
        ["GET /admin/tuner", "POST /admin/tuner/freeze", "POST /admin/tuner/resume", "POST /admin/tuner/reset"]
    {
        let (status, _, body) = send(&served, request, "").await;
        assert!(status == 200 && body.contains("\"mode\":\"approve\""), "{request}: {body}");
    }
    for path in ["/admin/tuners", "/admin/tuner/", "/admin/tuner/approve", "/admin/tuner/thaw"] {
        assert_eq!(send(&served, &format!("POST {path}"), "").await.0, 404, "{path}");
    }
}
