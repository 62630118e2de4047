"""Plans a run's memory and time from the headers of the files and config.json alone; no library is loaded."""
