"""`python -m duat_cli` is `duat`."""

from duat_cli.cli.main import main

if __name__ == "__main__":
    main()
