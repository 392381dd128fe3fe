"""Parts that know no reinforcement learning: layers, heads, outputs, an optimizer."""
