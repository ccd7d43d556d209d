"""The family IDEFICS."""
