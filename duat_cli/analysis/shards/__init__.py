"""Many prompts, many processes: results per prompt in a folder of append-only files, and the report made of them."""
