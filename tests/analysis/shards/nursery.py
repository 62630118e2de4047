"""Processes of duat that start at once: one of its own runs first commands on a checkpoint and forks for each other.

Lines of JSON on standard input: {"arguments", "env", "out"} starts one and answers its id; {"ended": id} answers 1 once
it has ended, else 0; {"wait": id} answers how it ended, as subprocess does (negative: the signal).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from typing import Any, NoReturn


def child(asked: dict[str, Any]) -> NoReturn:
    """Both streams go to files: `out`.1 and `out`.2."""
    os.environ.update(asked["env"])
    for number in (1, 2):
        file = os.open(f"{asked['out']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    code = 70
    try:
        from duat_cli.cli.main import main

        main(asked["arguments"])
    except SystemExit as leave:
        code = int(leave.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def answer() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    codes: dict[int, int] = {}  # of those that are known to have ended
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked.get("ended", asked.get("wait"))
        if number is not None and number not in codes:
            ended, status = os.waitpid(number, os.WNOHANG if "ended" in asked else 0)
            codes |= {number: os.waitstatus_to_exitcode(status)} if ended else {}
        if "ended" in asked:
            said = int(number in codes)
        elif "wait" in asked:
            said = codes[number]
        else:
            said = os.fork() or child(asked)
        print(said, flush=True)


if __name__ == "__main__":
    import torch

    from duat_cli.cli.main import run

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what commands import is there for all of them
        out = f"{folder}/out"
        run(["inspect", sys.argv[1], "--prompt", "a", "--json", "-q", "-o", os.devnull, "--out", out])
        run(["merge", out, "-q", "-o", os.devnull])
    answer()
