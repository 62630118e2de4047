"""`duat`, and `python -m duat_cli`."""

import sys

from duat_cli.errors import EXIT_INTERRUPTED


def main() -> None:
    """Runs the command line. While that is imported, no handler is installed: an interrupt is answered here."""
    try:
        from duat_cli.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("duat: interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
