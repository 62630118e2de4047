"""Forms of reports for other programs: those of `duat check` by name, and those for model repositories."""
