"""Recomputation of MLPs in backward, in chunks of tokens. K and V are recomputed in `runtime.visual_features`."""
