"""Steps of several commands before and after they compute: options, opening a model, writing a result."""
