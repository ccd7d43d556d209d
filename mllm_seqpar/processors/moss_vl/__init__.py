"""The processor of MOSS-VL."""
