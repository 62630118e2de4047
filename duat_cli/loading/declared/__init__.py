"""What a checkpoint says of itself beside its weights: config, generation config, tokenizer, chat template."""
