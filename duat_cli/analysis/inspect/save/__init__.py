"""Files of what the input sets, and of the stream: `duat inspect --save`."""
