"""Helpers of the command-line programs: options, launch, progress, and how a run ends after an error."""
