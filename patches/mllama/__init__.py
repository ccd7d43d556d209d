"""The family Llama 3.2 Vision."""
