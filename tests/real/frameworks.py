"""Calls of LangChain and litellm, as `tests/real/clients` makes them: frameworks.py NAME URL prints one JSON object, a call a member.

A result is what a program sees: the text, the usage, or the class and status of the exception. Nothing here varies between two
runs at temperature 0.
"""

import json
import sys

TALK = [{"role": "user", "content": "The quick brown fox"}]
LIMITS = {"temperature": 0, "max_tokens": 6}
# vLLM's own field, which strict readers do not know.
EXTRA = {"ignore_eos": True}


def langchain(url):
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    base = {"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    chat = ChatOpenAI(model="tiny", extra_body=EXTRA, **base, **LIMITS)
    text = OpenAI(model="tiny", extra_body=EXTRA, **base, **LIMITS)

    def seen(message):
        return [message.content, getattr(message, "usage_metadata", None)]

    yield "chat", lambda: seen(chat.invoke("The quick brown fox"))
    yield "chat, streamed", lambda: "".join(chunk.content for chunk in chat.stream("The quick brown fox"))
    yield "chat, streamed usage", lambda: [c.usage_metadata for c in chat.stream("The quick", stream_usage=True)][-1]
    yield "chat, batch", lambda: [seen(message) for message in chat.batch(["The quick", "brown fox", "jumps"])]
    yield "text", lambda: text.invoke("The quick brown")
    yield "text, many prompts", lambda: [each[0].text for each in text.generate(["The quick"] * 20).generations]
    yield "unknown model", lambda: ChatOpenAI(model="nope", **base).invoke("x")
    yield "embeddings of a model that has none", lambda: OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, **base).embed_documents(["x"])


def litellm(url):
    import litellm as module

    module.telemetry, module.num_retries = False, 0
    base = {"model": "hosted_vllm/tiny", "api_base": url + "/v1", "api_key": "none", "timeout": 60}
    seen = lambda answer: [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.total_tokens]

    def streamed(**more):
        parts = module.completion(messages=TALK, stream=True, extra_body=EXTRA, **base, **LIMITS, **more)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    yield "chat", lambda: seen(module.completion(messages=TALK, extra_body=EXTRA, **base, **LIMITS))
    yield "chat, streamed", streamed
    yield "chat, streamed with usage", lambda: streamed(stream_options={"include_usage": True})
    # A base with a slash at its end makes paths with two.
    yield "base with a slash", lambda: seen(module.completion(messages=TALK, extra_body=EXTRA, **{**base, "api_base": url + "/v1/"}, **LIMITS))
    yield "text", lambda: module.text_completion(prompt="The quick", extra_body=EXTRA, **base, **LIMITS).choices[0].text
    yield "unknown model", lambda: module.completion(messages=TALK, **{**base, "model": "hosted_vllm/nope"})


def result(call):
    try:
        return call()
    except Exception as error:
        status = getattr(error, "status_code", None)
        if status is None:
            raise
        return f"{type(error).__name__} {status}"


if __name__ == "__main__":
    calls = {"langchain": langchain, "litellm": litellm}[sys.argv[1]]
    print(json.dumps({name: result(call) for name, call in calls(sys.argv[2])}))
