"""The list of packages, the one thing `pyproject.toml` cannot say: all that is found, and one under another name.

`[tool.setuptools] packages` is either a search or a fixed list. A fixed list would silently leave a new subpackage out
of the wheel; a search alone does not know that the folder `patches/` installs as `mllm_seqpar.patches`.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mllm_seqpar", "mllm_seqpar.*"]), "mllm_seqpar.patches"])
