"""A logits processor for vLLM that lets a model without weights say a given text.

An agent needs a model that calls tools and ends its turn, which noise does not do. The answer
depends on the last message that is not the system's:

- If this message is `Repeat after me: TEXT`, the model says TEXT and ends its turn. If the model
  continues a message of its own, it says the rest of TEXT.
- If it is the prompt `Repeat after me: TEXT <|> BEGINNING` of a completion, the model says the rest
  of TEXT behind BEGINNING.
- If only an earlier message has such a text, as before the result of a tool, the model says `Done.`
  and ends its turn.
- If no message has such a text, the model answers as without this processor.

All the rest is vLLM's own: templates, scheduling, sampling, the parser of tool calls, the streams.
Use: `PYTHONPATH=tests/real vllm serve ... --logits-processors parrot:Parrot`.
"""

import pathlib

from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

# The ends of messages and the system's role, as the chat template of `model.py` writes them.
END, SYSTEM = "<|end|>", "<|system|>"
MARK, DONE = "Repeat after me: ", "Done."
# Ends the text in the prompt of a completion.
SEPARATOR = " <|> "


class Parrot(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        folder = pathlib.Path(vllm_config.model_config.model)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id(END)
        # By index in the batch, the tokens to say, and the list of tokens said so far, which vLLM
        # extends.
        self.lines = {}

    def is_argmax_invariant(self):
        return False

    def line(self, _, prompt, said):
        text = self.tokenizer.decode(prompt or [], skip_special_tokens=False)
        if MARK not in text:
            return None
        if END in text:
            # The answer begins after the last end of a message.
            *messages, answer = text.split(END)
            messages = [m for m in messages if SYSTEM not in m]
            say, begun = (messages[-1].partition(MARK)[2].strip() if messages else ""), answer.partition("|>")[2]
        else:
            say, _, begun = text.partition(MARK)[2].partition(SEPARATOR)
        say = say.removeprefix(begun)
        return [*self.tokenizer.encode(say or DONE, add_special_tokens=False).ids, self.end], said

    def update_state(self, batch_update):
        process_dict_updates(self.lines, batch_update, self.line)

    def apply(self, logits):
        for place, (say, said) in self.lines.items():
            token = say[min(len(said), len(say) - 1)]
            logits[place] = float("-inf")
            logits[place, token] = 0
        return logits
