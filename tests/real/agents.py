"""Calls of coding agents, as `tests/real/clients` makes them: agents.py NAME FOLDER URL.

NAME is `codex` (OpenAI's, which uses /v1/responses) or `claude` (Claude Code, which uses
/v1/messages). FOLDER has the installed programs. Prints one JSON object with a member for each
call.

The model says the text that the prompt asks for (`parrot.py`), so an agent gets answers and calls
of tools. The only tool that it is asked to run is `echo`. The agent has an empty home and no
environment variable of the caller. Its proxy does not exist, so it reaches no address except the
URL.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

# Time limit of one call.
SECONDS = 60
NOWHERE = "http://127.0.0.1:9"
SAY = "Repeat after me: "
HELLO, GOODBYE = SAY + "hello to you", SAY + "goodbye"
CODEX = """
model = "tiny"
model_provider = "vllm"
model_context_window = 32768
model_reasoning_effort = "low"
model_reasoning_summary = "auto"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.vllm]
name = "vllm"
base_url = "%s/v1"
wire_api = "responses"
env_key = "AGENT_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
CLAUDE = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "tiny",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}


def tool(name, **arguments):
    """A prompt whose answer is a call of a tool, in the form of Hermes."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{SAY}<tool_call>\n{call}\n</tool_call>"


class Agent:
    """A program with a separate home. `lines` are the JSON objects that the program prints."""

    def __init__(self, folder, *command, **variables):
        self.command, self.home = command, pathlib.Path(folder) / "home"
        shutil.rmtree(self.home, ignore_errors=True)
        (self.home / "work").mkdir(parents=True)
        self.variables = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "AGENT_KEY": "none",
            "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1", **variables,
        }

    def lines(self, *arguments):
        done = subprocess.run(
            [*map(str, self.command), *arguments], env=self.variables, cwd=self.home / "work",
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not found:
            raise RuntimeError(f"{self.command}: status {done.returncode}: {done.stderr[-2000:]}")
        return found


def without(value, *names):
    """A value without members of these names, at any depth."""
    if isinstance(value, dict):
        return {k: without(v, *names) for k, v in value.items() if k not in names}
    return [without(v, *names) for v in value] if isinstance(value, list) else value


def codex(folder, url):
    agent = Agent(folder, "node", folder / "node_modules/@openai/codex/bin/codex.js", "exec")
    config = agent.home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_text(CODEX % url)

    def seen(*arguments, ids=("id", "thread_id")):
        return without(agent.lines("--json", "--skip-git-repo-check", *arguments), *ids)

    def refused(*arguments):
        """The statuses of refused calls. Codex shows only the text of a response."""
        return re.findall(r"unexpected status (\d+)", json.dumps(seen(*arguments)))

    # A tool's result contains a random id, so its number of tokens varies.
    vary = ("id", "thread_id", "input_tokens")
    yield "answer", lambda: seen(HELLO)
    yield "call of a tool", lambda: seen(tool("exec_command", cmd="echo one two three"), ids=vary)
    yield "next turn", lambda: seen("resume", "--last", GOODBYE, ids=vary)
    yield "unknown model", lambda: refused("--model", "nope", HELLO)


def claude(folder, url):
    program = folder / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    agent = Agent(folder, "node", program, "-p", "--verbose", "--output-format", "stream-json",
                  ANTHROPIC_BASE_URL=url, **CLAUDE)
    # The members of the last line whose values follow from the responses.
    result = ("subtype", "is_error", "api_error_status", "result", "stop_reason", "num_turns")

    def seen(*arguments):
        found = agent.lines(*arguments)
        talk = [line["message"]["content"] for line in found if "message" in line]
        last = {name: found[-1].get(name) for name in result}
        return without([*talk, last, found[-1]["usage"]], "id", "tool_use_id")

    def refused(*arguments):
        return without(seen(*arguments)[-2], "result")

    yield "answer", lambda: seen(HELLO)
    call = tool("Bash", command="echo one two three", description="three words")
    yield "call of a tool", lambda: seen("--allowedTools", "Bash", "--", call)
    yield "next turn", lambda: seen("--continue", GOODBYE)
    yield "context", lambda: seen("/context")
    yield "unknown model", lambda: refused("--model", "nope", HELLO)


if __name__ == "__main__":
    _, which, installed, base = sys.argv
    calls = {"codex": codex, "claude": claude}[which](pathlib.Path(installed), base)
    print(json.dumps({name: call() for name, call in calls}))
