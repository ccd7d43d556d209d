"""accelerate: its launch settings, FSDP2 on CPU, and its context parallelism kept out."""
