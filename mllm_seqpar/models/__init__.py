"""Models that this package brings along because no library has them for current transformers."""
