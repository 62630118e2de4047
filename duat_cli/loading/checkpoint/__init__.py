"""The files of a checkpoint: headers, index, pre-flight, values."""
