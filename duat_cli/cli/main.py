"""`duat`: the command line, and the handling of errors and signals.

Neither torch nor transformers is imported here or in a command's module, so that `duat --help` appears at once.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from duat_cli.cli.commands.attribute import attribute
from duat_cli.cli.commands.check import check
from duat_cli.cli.commands.compare import compare
from duat_cli.cli.commands.explain import explain
from duat_cli.cli.commands.inspect import inspect
from duat_cli.cli.commands.lora_diff import lora_diff
from duat_cli.cli.commands.matrix import matrix
from duat_cli.cli.commands.merge import merge
from duat_cli.cli.commands.plan import plan
from duat_cli.cli.commands.prune_bound import prune_bound
from duat_cli.cli.commands.report import report
from duat_cli.cli.commands.schema import schema
from duat_cli.cli.commands.support import support
from duat_cli.cli.commands.verify import verify
from duat_cli.cli.shared.options import CONTEXT
from duat_cli.cli.shared.outlets import say_usage
from duat_cli.cli.terminal import libraries, signals, streams, talk
from duat_cli.cli.terminal.faults import kind_of, line_of
from duat_cli.cli.terminal.help import Command, Group
from duat_cli.cli.terminal.versions import versions
from duat_cli.compat.typer import get_command
from duat_cli.errors import EXIT_SOUND, EXIT_UNDECIDED, DuatError

PANELS: dict[str, dict[str, Callable[..., int]]] = {
    "Read a checkpoint": {
        "inspect": inspect,
        "attribute": attribute,
        "matrix": matrix,
        "compare": compare,
        "prune-bound": prune_bound,
        "lora-diff": lora_diff,
    },
    "How far to trust it": {"check": check, "verify": verify, "support": support, "plan": plan},
    "What it means": {"explain": explain},
    "For programs": {"merge": merge, "report": report, "schema": schema},
}
"""Panels of the help page, each with its commands by name."""

app = typer.Typer(
    name="duat",
    cls=Group,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    add_completion=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 sound, 1 findings (a check failed, the certificate is not exact), 2 could not tell. "
    "Every command explains its options: duat inspect --help.",
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(command)


@app.callback(invoke_without_command=True)
def duat(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", is_eager=True, help="Print the versions of duat and of what it runs on."
    ),
) -> None:
    """What a Hugging Face checkpoint really computes: its exact Dynamic Universal Approximation form, with a
    certificate.

    Start with duat inspect: it reads a bundled demo model.
    """
    if version:
        streams.write_result(versions())
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and leaves with its exit code."""
    streams.prepare()
    signals.install()
    libraries.wait_asleep()
    libraries.keep_few_products()
    libraries.grow_in_place()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except signals.Stopped as stop:
        streams.say(f"duat: {stop.text}")
        os._exit(stop.exit_code)  # does not wait for the libraries' threads; all of ours is cleaned up
    code = _flushed(code)
    streams.settle_talk()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; every error becomes one line on standard error."""
    try:
        code = _command()(list(arguments), prog_name="duat", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_SOUND
    except signals.Stopped:
        raise
    except DuatError as error:
        talk.error(line_of(error))
        if error.__cause__ is not None and os.environ.get("DUAT_DEBUG"):
            streams.say(talk.redact(traceback.format_exc().rstrip()))
        return error.exit_code
    except SystemExit as leave:
        return _left(leave)
    except BaseException as error:  # a Rust panic in a tokenizer is not an Exception
        if _flushed(EXIT_SOUND) == EXIT_SOUND:  # otherwise standard output was the fault, and is reported
            say_usage(arguments, error)
            _explain(error)
        return EXIT_UNDECIDED


@functools.cache
def _command() -> Callable[..., object]:
    """The command with all subcommands and their options, built once in a process."""
    return get_command(app)


def _explain(error: BaseException) -> None:
    """Prints an error as one line; for a bug of duat, the traceback instead if DUAT_DEBUG is set."""
    if kind_of(error) == "internal" and os.environ.get("DUAT_DEBUG"):
        streams.say(talk.redact(traceback.format_exc().rstrip()))
    else:
        talk.error(line_of(error))


def _left(leave: SystemExit) -> int:
    """Exit code where something ended the process. Typer does so with 1 when the reader of a help page is gone, which
    is no finding: 0. Code of a checkpoint may do so too, and then the command could not tell: 2."""
    if streams.is_broken_pipe(leave.__context__):
        streams.discard_output()
        return EXIT_SOUND
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(leave.__traceback__)]
    if modules and modules[-1].partition(".")[0] not in ("typer", __name__.partition(".")[0]):
        own = [name for name in modules if name.startswith("transformers_modules.")]
        by = f"{(own or modules)[-1]} ended the process (SystemExit: {leave.code}) before the command was done"
        talk.error(f"{by}; read the code that comes with the checkpoint")
        return EXIT_UNDECIDED
    return leave.code if isinstance(leave.code, int) else EXIT_UNDECIDED


def _flushed(code: int) -> int:
    """The code; or that of the error, where buffered output such as a help page cannot be written."""
    try:
        streams.write_result("")
    except DuatError as error:
        talk.error(line_of(error))
        return error.exit_code
    return code
