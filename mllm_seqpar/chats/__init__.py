"""Conversations about videos and images: their records, their tokens, and what is stored of their frames."""
