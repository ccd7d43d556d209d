"""A model's sizes from the `config.json` of a Hugging Face model directory.

The file is read as JSON, so that planning needs no model library. Each family translates its own configuration, in
`patches/<family>/planner.py`.
"""

import json
from pathlib import Path

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.families import family_specs

from .model_sizes import ModelSizes


def read_hf_config(path: Path) -> ModelSizes:
    """Return the sizes of a model directory, or of its `config.json`; raise ConfigError if they cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model: there is no {file}; pass a model directory, its config.json or a model file")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"model: {file} is not JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    family = next((spec for spec in family_specs() if model_type in spec.model_types), None)
    if family is None:
        known = ", ".join(sorted(name for spec in family_specs() for name in spec.model_types))
        raise ConfigError(f"model: {file} has model_type {model_type!r}; known model types: {known}")
    try:
        return family.module("planner").model_sizes(config, file.resolve().parent.name)
    except KeyError as error:
        raise ConfigError(f"model: {file} lacks {error}, which a {model_type} model needs") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"model: {file} has values that a {model_type} model cannot have: {error}") from error
