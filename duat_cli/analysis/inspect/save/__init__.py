"""`duat inspect --save`: files with what the input sets (attention weights, scales, biases)."""
