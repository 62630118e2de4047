"""Every module can be imported where Python lacks what only Unix has."""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from children import forked

import duat_cli

UNIX = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt")
NAMES = [
    name
    for _, name, _ in pkgutil.walk_packages(duat_cli.__path__, "duat_cli.")
    if not name.endswith("__main__")  # runs the command
]

OS_NAMES = ("fchmod", "fchown", "getuid", "geteuid", "getgid", "mkfifo", "fork", "uname", "O_NONBLOCK", "O_NOFOLLOW")
SIGNAL_NAMES = ("SIGHUP", "SIGPIPE", "SIGXFSZ", "SIGALRM", "SIGKILL", "alarm", "pthread_sigmask")


def import_again(names: list[str]) -> None:
    """Imports these modules anew. What the libraries import is theirs; only the package's own imports are refused."""
    for name in names:  # the libraries first, as they are
        importlib.import_module(name)
    for name in [n for n in sys.modules if n.startswith("duat_cli")]:
        del sys.modules[name]
    real = builtins.__import__

    def refusing(name: str, globals: Any = None, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] in UNIX and (globals or {}).get("__name__", "").startswith("duat_cli"):
            raise ModuleNotFoundError(name)
        return real(name, globals, *rest, **named)

    builtins.__import__ = refusing
    for module, lacking in ((os, OS_NAMES), (signal, SIGNAL_NAMES)):
        for name in lacking:
            if hasattr(module, name):
                delattr(module, name)
    for name in names:
        importlib.import_module(name)
    print(sum(name in sys.modules for name in names), flush=True)


def test_every_module_can_be_imported_without_what_windows_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    code, (said, error) = forked(import_again, NAMES), capfd.readouterr()
    assert code == 0, error[-2000:]
    assert int(said.splitlines()[-1]) == len(NAMES) > 150


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "duat_cli_odd.py").write_text("import resource")
    monkeypatch.syspath_prepend(tmp_path)
    assert forked(import_again, ["duat_cli_odd"]) == 1
    assert "ModuleNotFoundError: resource" in capfd.readouterr().err
