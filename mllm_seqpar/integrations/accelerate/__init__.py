"""accelerate: FSDP2 on any device, and its device mesh without its own context parallelism."""
