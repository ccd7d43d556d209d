"""The small commands, and the parts that all commands share: options, launch, own ranks, progress, exit."""
