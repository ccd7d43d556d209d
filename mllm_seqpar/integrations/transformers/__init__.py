"""Sequence-parallel forward passes, caches and generation for model classes of transformers.

A patched model's forward converts its arguments to `inputs.ForwardInputs` and calls `passes.run_pass`. In the order of
a pass:

    family          the interface to a model family: its frames, masks and decoder
    checks          arguments are valid on each rank, and equal on all ranks
    frames          the vision tower runs on this rank's frames; what rows may attend to
    text            how the text is sharded; the rows of this rank; masks as rectangles
    attention       the attention function that the decoder's self-attention calls
    outputs         loss and logits
    passes          a pass without a cache, from these parts
    cached_passes   a prompt, or a decoding step
    cache           the state that is stored in a transformers cache
    generation      `generate` with the same tokens on every rank
"""
