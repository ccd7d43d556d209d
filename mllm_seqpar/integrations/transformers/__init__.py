"""Sequence-parallel forward passes, caches and generation for model classes of transformers.

A patched model's forward converts its arguments to `inputs.ForwardInputs` and calls `passes.run_pass`. In the order of
a pass:

    inputs          the arguments, and the sizes derived from them
    checks          the arguments are valid on each rank, and equal on all ranks
    family          the interface to a model family: its frames, masks and decoder
    frames          the vision tower runs on this rank's frames; what rows may attend to
    data_parallel   ranks under one FSDP2 or DDP agree on whether any of them has frames
    text            how the text is sharded; the rows of this rank; loss and logits
    attention       the attention function that the decoder's self-attention calls
    passes          a pass from these parts: without a cache, a prompt, or a decoding step
    cache           the state that is stored in a transformers cache
    generation      `generate` with the same tokens on every rank
"""
