"""Checks of whether a checkpoint is sound and whether it drifted: policies, rules, baselines and the verdict."""
