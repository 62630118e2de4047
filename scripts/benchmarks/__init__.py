"""The parts of scripts/bench.py: one question a file, each a function from a number of runs to rows."""
