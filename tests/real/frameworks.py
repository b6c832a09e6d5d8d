"""Calls of LangChain and litellm, as `tests/real/clients` makes them: frameworks.py NAME URL.

Prints one JSON object with a member for each call. A result has the parts that a program sees: the
text, the usage, the calls of tools, or the class and status of the exception. At temperature 0 no
result varies.
"""

import functools
import json
import operator
import os
import sys

TALK = [{"role": "user", "content": "The quick brown fox"}]
LIMITS = {"temperature": 0, "max_tokens": 6}
# vLLM's own field, which strict readers do not know.
EXTRA = {"ignore_eos": True}
# The model says the text that the request asks for (`parrot.py`), here a call of a tool in the form
# of Hermes.
SAY = '{"name": "echo", "arguments": {"text": "one two"}}'
CALL = f"Repeat after me: <tool_call>\n{SAY}\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
ASK = [{"role": "user", "content": CALL}]
TOOLS = [{"type": "function", "function": {"name": "echo", "parameters": PARAMETERS}}]


def langchain(url):
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    base = {"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    chat = ChatOpenAI(model="tiny", extra_body=EXTRA, **base, **LIMITS)
    text = OpenAI(model="tiny", extra_body=EXTRA, **base, **LIMITS)
    tools = ChatOpenAI(model="tiny", **base).bind_tools(TOOLS)
    answers = ChatOpenAI(model="tiny", use_responses_api=True, temperature=0, max_tokens=40, **base)

    def seen(message):
        return [message.content, getattr(message, "usage_metadata", None)]

    joined = lambda chunks: functools.reduce(operator.add, chunks)

    def called(message):
        return [[call["name"], call["args"]] for call in message.tool_calls]

    yield "chat", lambda: seen(chat.invoke("The quick brown fox"))
    yield "chat, streamed", lambda: "".join(c.content for c in chat.stream("The quick brown fox"))
    yield "chat, streamed usage", lambda: [
        c.usage_metadata for c in chat.stream("The quick", stream_usage=True) if c.usage_metadata]
    yield "chat, batch", lambda: [seen(m) for m in chat.batch(["The quick", "brown fox", "jumps"])]
    yield "call of a tool", lambda: called(tools.invoke(CALL))
    yield "call of a tool, streamed", lambda: called(joined(tools.stream(CALL)))
    yield "responses", lambda: answers.invoke("The quick brown fox").text
    yield "responses, streamed", lambda: joined(answers.stream("The quick brown fox")).text
    yield "responses, call of a tool", lambda: called(answers.bind_tools(TOOLS).invoke(CALL))
    yield "text", lambda: text.invoke("The quick brown")
    many = lambda: text.generate(["The quick"] * 20).generations
    yield "text, many prompts", lambda: [each[0].text for each in many()]
    yield "unknown model", lambda: ChatOpenAI(model="nope", **base).invoke("x")
    vectors = OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, **base)
    yield "embeddings of a model that has none", lambda: vectors.embed_documents(["x"])


def litellm(url):
    # Without this, the client would fetch the list of models.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as module

    module.telemetry, module.num_retries = False, 0
    base = {"model": "hosted_vllm/tiny", "api_base": url + "/v1", "api_key": "none", "timeout": 60}
    settings = {"extra_body": EXTRA, **base, **LIMITS}

    def seen(answer):
        choice = answer.choices[0]
        return [choice.message.content, choice.finish_reason, answer.usage.total_tokens]

    def called(answer):
        calls = answer.choices[0].message.tool_calls or []
        return [[call.function.name, json.loads(call.function.arguments)] for call in calls]

    def streamed(**more):
        parts = module.completion(messages=TALK, stream=True, **settings, **more)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    yield "chat", lambda: seen(module.completion(messages=TALK, **settings))
    yield "chat, streamed", streamed
    yield "chat, streamed with usage", lambda: streamed(stream_options={"include_usage": True})
    yield "call of a tool", lambda: called(module.completion(messages=ASK, tools=TOOLS, **base))
    parts = lambda: list(module.completion(messages=ASK, tools=TOOLS, stream=True, **base))
    yield "call of a tool, streamed", lambda: called(module.stream_chunk_builder(parts()))
    # With a slash at the end of the base URL, litellm makes paths with two slashes.
    slash = {**settings, "api_base": url + "/v1/"}
    yield "base with a slash", lambda: seen(module.completion(messages=TALK, **slash))
    text = lambda: module.text_completion(prompt="The quick", **settings)
    yield "text", lambda: text().choices[0].text
    nope = {**base, "model": "hosted_vllm/nope"}
    yield "unknown model", lambda: module.completion(messages=TALK, **nope)


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
