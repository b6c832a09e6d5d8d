// Calls of the Vercel AI SDK, as tests/real/clients makes them: vercel.mjs URL prints one JSON object, a call a member.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const url = process.argv[2];
const provider = base => createOpenAICompatible({ name: "vllm", baseURL: base, apiKey: "none", includeUsage: true });
const settings = { prompt: "The quick brown fox", temperature: 0, maxOutputTokens: 6, maxRetries: 0, providerOptions: { vllm: { ignore_eos: true } } };
const usage = ({ inputTokens, outputTokens, totalTokens }) => ({ inputTokens, outputTokens, totalTokens });

const calls = {
  chat: async () => {
    const { text, finishReason, usage: used } = await generateText({ model: provider(`${url}/v1`)("tiny"), ...settings });
    return { text, finishReason, usage: usage(used) };
  },
  "chat, streamed": async () => {
    const stream = streamText({ model: provider(`${url}/v1`)("tiny"), ...settings });
    let text = "";
    for await (const part of stream.textStream) text += part;
    return { text, finishReason: await stream.finishReason, usage: usage(await stream.usage) };
  },
  text: async () => (await generateText({ model: provider(`${url}/v1`).completionModel("tiny"), ...settings })).text,
  "base with a slash": async () => (await generateText({ model: provider(`${url}/v1/`)("tiny"), ...settings })).text,
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
