"""The additive terms of a block: attention, heads, FFNs, neurons, experts, and where they meet the stream."""
