"""The command `mllm-seqpar completion`: a script that completes commands, options and files in bash, zsh or fish.

The options are read from the help of each command, which imports all of them; the script itself starts no Python.
"""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence

from mllm_seqpar.errors import ConfigError

from .entry import load_entry
from .options import Parser
from .program_exit import run_alone

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """mllm-seqpar completion bash > ~/.local/share/bash-completion/completions/mllm-seqpar
  mllm-seqpar completion zsh > ~/.zfunc/_mllm-seqpar         # a folder of $fpath, before compinit
  mllm-seqpar completion fish > ~/.config/fish/completions/mllm-seqpar.fish"""

Commands = Mapping[str, tuple[str, str]]
"""The table of `mllm_seqpar.__main__`: by name, "module:function" and a line of help."""

BASH = """\
_mllm_seqpar() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} options=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=()  # files, by -o default
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    fi
}}
complete -o default -F _mllm_seqpar mllm-seqpar
"""

ZSH = """\
#compdef mllm-seqpar
_mllm_seqpar() {{
    local -a commands options
    if (( CURRENT == 2 )); then
        commands=({described})
        _describe command commands
        return
    fi
    case $words[2] in
{cases}
    esac
    if [[ $words[CURRENT] == -* ]]; then
        compadd -- $options
    else
        _files
    fi
}}
compdef _mllm_seqpar mllm-seqpar
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 2 for invalid input."""
    return run_alone(completion, argv)


def completion(argv: Sequence[str]) -> None:
    """Print the script for the shell that `argv` names."""
    parser = Parser(
        prog="mllm-seqpar completion",
        description="Print a script that completes commands, options and files; store it where the shell looks for it.",
        example=EXAMPLE,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    shell = parser.parse_args(argv).shell
    commands: Commands = pkgutil.resolve_name("mllm_seqpar.__main__:COMMANDS")
    sys.stdout.write(script(shell, commands, {name: options_of(entry) for name, (entry, _) in commands.items()}))


def options_of(entry: str) -> list[str]:
    """Return the names of a command's options, by its --help_all or --help; none if its module cannot be imported."""
    found = _shown(entry, "--help")
    return sorted(_shown(entry, "--help_all") if "--help_all" in found else found)


def _shown(entry: str, option: str) -> set[str]:
    """Return the names of the options in the text that a command prints for an option."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit, ImportError, ConfigError):
        load_entry(entry)([option])
    return {name for line in text.getvalue().splitlines() for name in _names(line)}


def _names(line: str) -> list[str]:
    """Return the options of a line that begins with one, as in "  -x X, --name NAME, --no_name  help"."""
    found = re.match(r"\s+((?:-\w(?: \S+)?, )?--\w.*?)(?:\s{2}|$)", line)
    return re.findall(r"(?<!\S)--\w+", found[1]) if found else []


def script(shell: str, commands: Commands, options: Mapping[str, Sequence[str]]) -> str:
    """Return the completion script for a shell.

    Args:
        shell: one of `SHELLS`.
        commands: by name, the entry and a line of help.
        options: the names of the options of each command.
    """
    if shell == "fish":
        lines = ["complete -c mllm-seqpar -n __fish_use_subcommand -f -a '--help --version'"]
        for name, (_, text) in commands.items():
            lines.append(f"complete -c mllm-seqpar -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}")
            condition = f"complete -c mllm-seqpar -n '__fish_seen_subcommand_from {name}' -l "
            lines += [condition + option.removeprefix("--") for option in options[name]]
        return "\n".join(lines) + "\n"
    left, right = ('"', '"') if shell == "bash" else ("(", ")")
    cases = "\n".join(f"    {name}) options={left}{' '.join(options[name])}{right} ;;" for name in commands)
    described = " ".join(_quoted(f"{name}:{text}") for name, (_, text) in commands.items())
    return (BASH if shell == "bash" else ZSH).format(names=" ".join(commands), cases=cases, described=described)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"
