"""Statements of a checkpoint beside its weights: config, generation config, tokenizer, chat template."""
