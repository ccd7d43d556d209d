"""Sequence-parallel forward passes, caches and generation for model classes of transformers.

A patched model's forward converts its arguments to `inputs.ForwardInputs` and runs a `passes.Pass`. In the order of a
pass:

    family      a model family, and the forward of a model that it is installed on
    inputs      the arguments of the forward, and the sizes derived from them
    passes      the pass itself: which rows are sharded, the frames, the decoder, loss and logits
    facts       what a pass reads of the model
    checks      the arguments are valid on each rank, and equal on all ranks
    tower       the vision tower runs on this rank's frames, in step with the other ranks
    attention   the attention function that the decoder's self-attention calls
    generation  `generate` with the same tokens on every rank

What a patched model stores in a transformers cache is in `mllm_seqpar.models.cache`.
"""
