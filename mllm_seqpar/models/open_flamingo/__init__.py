"""OpenFlamingo (package open-flamingo 2.0.1) as a directory that loads and saves like other models.

The package builds its model from a CLIP of open_clip and a language model, and publishes only the weights that it
trained. Here a directory has all of it:

    config.json           model_type "open_flamingo"; the configs of the language model and of the CLIP vision tower
    model.safetensors     all weights, under the names of the real class's state_dict, each tensor once
    tokenizer.json ...    of the language model, with <image> and <|endofchunk|> (and a pad token) added
    preprocessor_config.json, processor_config.json    CLIP's image processor

`convert` makes one of a language model's directory, a CLIP directory and a published checkpoint.pt. Importing this
package registers it with transformers' Auto classes and does not need open-flamingo; loading a model does.
"""

from .configuration import OpenFlamingoConfig
from .conversion import convert
from .processing import OpenFlamingoProcessor
from .registration import OpenFlamingoLoader, register

__all__ = ["OpenFlamingoConfig", "OpenFlamingoLoader", "OpenFlamingoProcessor", "convert", "register"]

register()
