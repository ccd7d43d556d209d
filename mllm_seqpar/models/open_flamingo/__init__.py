"""OpenFlamingo (package open-flamingo 2.0.1) as a directory that loads and saves like other models.

The package builds its model from a CLIP of open_clip and a language model, and publishes only the weights that it
trained. Here a directory is complete:

    config.json           model_type "open_flamingo"; the configs of the language model and of the CLIP vision tower
    model.safetensors     all weights, under the names of the real class's state_dict, each tensor once
    tokenizer.json ...    the language model's tokenizer, with <image> and <|endofchunk|> (and a pad token) added
    preprocessor_config.json, processor_config.json    CLIP's image processor

`convert` writes such a directory from a language model's directory, a CLIP directory and a published checkpoint.pt.
Names load on first use: `OpenFlamingo`, the class of the model, needs the package open-flamingo.
"""

from mllm_seqpar._lazy_names import lazy_names

__all__ = lazy_names(__name__, __file__)
