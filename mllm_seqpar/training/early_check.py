"""Names and numbers on the command line of fine-tuning, checked before torch and transformers are imported.

Their import takes seconds, and a run on several ranks repeats it on each. The options are therefore read from the
source of the dataclasses that define them. What is found wrong here would be found later too (`arguments`): if a
release of transformers defines its options in another way, nothing is checked here.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from mllm_seqpar.cli import options

_FILES = (Path(options.__file__).with_name("shared_options.py"), Path(__file__).with_name("arguments.py"))
_OTHER = {"num_processes": "int", "config": "str"}
"""Options beside the fields of these classes, and their types."""


def check_command_line(argv: Sequence[str]) -> None:
    """Raise ConfigError if `argv` has an unknown or repeated option, or a text where an option takes a number."""
    spec = find_spec("transformers")
    theirs = None if spec is None or spec.origin is None else Path(spec.origin).with_name("training_args.py")
    if theirs is None or not theirs.is_file() or not {"-h", "--help", "--help_all", "--help-all"}.isdisjoint(argv):
        return
    parser = options.Parser(add_help=False)
    fields = dict(item for file in (theirs, *_FILES) for item in _fields(file))
    for name, annotation in {**_OTHER, **fields}.items():
        first = annotation.split(" | ")[0]
        kind = next((kind for kind in (int, float) if first == kind.__name__), str)
        names = [f"--{name}", f"--no_{name}"] if first == "bool" else [f"--{name}"]
        number = "*" if "list" in annotation else "?"
        parser.add_argument(*names, dest=name, type=kind, nargs=number, default=argparse.SUPPRESS)
    parser.parse_args(argv)


def _fields(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the annotation of each field of the classes in a file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, ast.unparse(field.annotation)
