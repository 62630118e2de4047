"""What several commands do before they compute and after: options, opening a model, writing a result."""
