"""What a run will need, from the headers of the files and config.json alone: no library is loaded."""
