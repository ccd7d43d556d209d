"""Native models: models that no library provides for current transformers."""
