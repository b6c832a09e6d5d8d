// Calls of the Vercel AI SDK, as tests/real/clients makes them: vercel.mjs URL.
// Prints one JSON object with one member for each call.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const url = process.argv[2];
const provider = baseURL =>
  createOpenAICompatible({ name: "vllm", baseURL, apiKey: "none", includeUsage: true });
const settings = {
  prompt: "The quick brown fox", temperature: 0, maxOutputTokens: 6, maxRetries: 0,
  providerOptions: { vllm: { ignore_eos: true } },
};
const usage = used => [used.inputTokens, used.outputTokens, used.totalTokens];
// The model says the text that the request asks for (parrot.py), here a call of a tool. The SDK
// sends the result of the tool.
const say = JSON.stringify({ name: "echo", arguments: { text: "one two" } });
const schema = { type: "object", properties: { text: { type: "string" } } };
const tools = {
  model: provider(`${url}/v1`)("tiny"),
  prompt: `Repeat after me: <tool_call>\n${say}\n</tool_call>`,
  maxRetries: 0, stopWhen: stepCountIs(2),
  tools: { echo: tool({ inputSchema: jsonSchema(schema), execute: async ({ text }) => text }) },
};
const steps = all =>
  all.map(step => [step.toolCalls.map(call => call.input), step.text, step.finishReason]);
const chat = base => generateText({ model: provider(base)("tiny"), ...settings });

const calls = {
  chat: async () => {
    const { text, finishReason, usage: used } = await chat(`${url}/v1`);
    return { text, finishReason, usage: usage(used) };
  },
  "chat, streamed": async () => {
    const stream = streamText({ model: provider(`${url}/v1`)("tiny"), ...settings });
    let text = "";
    for await (const part of stream.textStream) text += part;
    return { text, finishReason: await stream.finishReason, usage: usage(await stream.usage) };
  },
  "call of a tool": async () => steps((await generateText(tools)).steps),
  "call of a tool, streamed": async () => {
    const stream = streamText(tools);
    await stream.consumeStream();
    return steps(await stream.steps);
  },
  text: async () => {
    const model = provider(`${url}/v1`).completionModel("tiny");
    return (await generateText({ model, ...settings })).text;
  },
  "base with a slash": async () => (await chat(`${url}/v1/`)).text,
  "unknown model": async () => generateText({ model: provider(`${url}/v1`)("nope"), ...settings }),
};

const results = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    results[name] = await call();
  } catch (error) {
    if (error.statusCode === undefined) throw error;
    results[name] = `${error.name} ${error.statusCode}`;
  }
}
console.log(JSON.stringify(results));
