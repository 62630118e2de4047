"""PEFT adapters: keys, plans, and the base they change."""
