"""The chat formats of the families in `mllm_seqpar.patches`: what programs need of a family besides its model."""
