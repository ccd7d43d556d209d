"""Native models that no library provides for current transformers."""
