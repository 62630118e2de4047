"""The report of `duat explain`."""
