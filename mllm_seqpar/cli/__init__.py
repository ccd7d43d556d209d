"""What all commands share: options, launch, progress, and how a run ends after an error; and the small commands."""
