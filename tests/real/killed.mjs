// Streams of the Vercel AI SDK, as tests/real/killed makes them: killed.mjs URL STREAMS TOKENS.
// Prints one JSON list, which has the text, the reason for the end and the usage of each stream.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const [url, streams, tokens] = process.argv.slice(2);
const provider =
  createOpenAICompatible({ name: "vllm", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });

const read = async number => {
  const stream = streamText({
    model: provider("m"), prompt: `story ${number}`, maxOutputTokens: Number(tokens), maxRetries: 0,
    providerOptions: { vllm: { ignore_eos: true } },
    onError: ({ error }) => { throw error; },
  });
  let text = "";
  for await (const part of stream.textStream) text += part;
  const { inputTokens, outputTokens } = await stream.usage;
  return [text, await stream.finishReason, inputTokens, outputTokens];
};
console.log(JSON.stringify(await Promise.all([...Array(Number(streams)).keys()].map(read))));
