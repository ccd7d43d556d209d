"""The family mPLUG-Owl3."""
