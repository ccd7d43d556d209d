"""State of one forward pass: the group, the text shards, the visual features, KV caches and the loss."""
