"""vLLM's own argument parser on many command lines in one process, because a start of vLLM for each
would take minutes.

Runs with the Python of ./setup. Reads a JSON list of command lines from stdin, and writes a list
with [exit status, last line of stderr] for each.
"""

import contextlib
import io
import json
import sys

sys.argv = ["vllm", "serve"]

import vllm.entrypoints.cli.serve as serve  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def parsed(argv):
    top = FlexibleArgumentParser(prog="vllm")
    command = serve.cmd_init()[0]
    command.subparser_init(top.add_subparsers(required=False, dest="subparser"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            top.parse_args(["serve", *argv])
        return [0, ""]
    except SystemExit as end:
        lines = [line for line in said.getvalue().splitlines() if "error: " in line]
        return [end.code, lines[-1] if lines else ""]
    except Exception as error:  # a start ends with 1 here
        return [1, f"{type(error).__name__}: {error}"]


print(json.dumps([parsed(argv) for argv in json.load(sys.stdin)]))
