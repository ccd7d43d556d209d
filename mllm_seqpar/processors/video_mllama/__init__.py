"""The processor of MOSS-Video-Preview."""
