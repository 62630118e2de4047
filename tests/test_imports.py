"""Every module can be imported where Python lacks what only Unix has."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

from children import PATIENCE

import duat_cli

UNIX = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt")
NAMES = [
    name
    for _, name, _ in pkgutil.walk_packages(duat_cli.__path__, "duat_cli.")
    if not name.endswith("__main__")  # runs the command
]

# What the libraries import is theirs; only the package's own imports are refused.
SCRIPT = """
import builtins, importlib, os, signal, sys
real = builtins.__import__
def refusing(name, globals=None, *rest, **named):
    if name.partition(".")[0] in {unix} and (globals or {{}}).get("__name__", "").startswith("duat_cli"):
        raise ModuleNotFoundError(name)
    return real(name, globals, *rest, **named)
for name in {names}:  # the libraries first, as they are
    importlib.import_module(name)
for name in [n for n in sys.modules if n.startswith("duat_cli")]:
    del sys.modules[name]
builtins.__import__ = refusing
for module, names in ((os, {os_names}), (signal, {signal_names})):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in {names}:
    importlib.import_module(name)
print(len({names}))
"""
OS_NAMES = ("fchmod", "fchown", "getuid", "geteuid", "getgid", "mkfifo", "fork", "uname", "O_NONBLOCK", "O_NOFOLLOW")
SIGNAL_NAMES = ("SIGHUP", "SIGPIPE", "SIGXFSZ", "SIGALRM", "SIGKILL", "alarm", "pthread_sigmask")


def imported(names: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    script = before + SCRIPT.format(names=names, unix=UNIX, os_names=OS_NAMES, signal_names=SIGNAL_NAMES)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_every_module_can_be_imported_without_what_windows_lacks() -> None:
    done = imported(NAMES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) == len(NAMES) > 150


def test_the_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "duat_cli_odd.py").write_text("import resource")
    done = imported(["duat_cli_odd"], f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert "ModuleNotFoundError: resource" in done.stderr
