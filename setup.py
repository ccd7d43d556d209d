"""The list of packages, the one thing `pyproject.toml` cannot say: all that is found, and two under other names.

`[tool.setuptools] packages` is either a search or a fixed list. A fixed list would silently leave a new subpackage out
of the wheel; a search alone does not know that the folders `patches/` and `configs/` install inside `mllm_seqpar`.
"""

from setuptools import find_packages, setup

FOUND = find_packages(include=["mllm_seqpar", "mllm_seqpar.*"])

FAMILIES = [f"mllm_seqpar.{name}" for name in find_packages(include=["patches", "patches.*"])]

setup(packages=[*FOUND, *FAMILIES, "mllm_seqpar.configs"])
