"""Is a checkpoint sound, and did it drift? Policies, rules, baselines, and what they come to."""
