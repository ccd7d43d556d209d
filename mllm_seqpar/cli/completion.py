"""The command `mllm-seqpar completion`: a script that completes commands, options and values in bash, zsh or fish.

The options are read from the help of each command, which imports all of them; the script itself starts no Python. The
values of an option are those that its help lists in braces, and of --cluster the known ones; other values are files.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.records import known_files

from .commands import COMMANDS, Command, load_entry
from .options import Parser

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """mllm-seqpar completion bash > ~/.local/share/bash-completion/completions/mllm-seqpar
  mllm-seqpar completion zsh > ~/.zfunc/_mllm-seqpar         # a folder of $fpath, before compinit
  mllm-seqpar completion fish > ~/.config/fish/completions/mllm-seqpar.fish"""


@dataclass(frozen=True)
class Values:
    """What may follow an option: `names`, directories, or files; nothing for a switch."""

    names: tuple[str, ...] = ()
    kind: str = "files"  # or "directories", or "names", or "none"


Options = Mapping[str, Values]
"""The options of a command by name, such as "--model"."""

DIRECTORIES = ("model", "language_model", "vision_model", "features", "save_features", "media_root")
"""Options that name a directory, in addition to those whose names end in _dir."""

BASH = """\
_mllm_seqpar() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} options= values= directories=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
        return
    fi
    if [[ $previous == --* ]]; then
        previous=${{previous#--}} previous=${{previous//-/_}}
    else
        previous=
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=()  # files, by -o default
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    elif [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    fi
    if [[ -n $directories && $word != -* ]]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -d -- "$word"))
    fi
}}
complete -o default -F _mllm_seqpar mllm-seqpar
"""

ZSH = """\
#compdef mllm-seqpar
_mllm_seqpar() {{
    local -a commands options values
    local directories= previous=
    if (( CURRENT == 2 )); then
        commands=({described})
        _describe command commands
        return
    fi
    if [[ $words[CURRENT-1] == --* ]]; then
        previous=${{${{words[CURRENT-1]#--}}//-/_}}
    fi
    case $words[2] in
{cases}
    esac
    if [[ $words[CURRENT] == -* ]]; then
        compadd -- $options
    elif (( $#values )) || [[ -n $directories ]]; then
        (( $#values )) && compadd -- $values
        [[ -n $directories ]] && _files -/
    else
        _files
    fi
}}
compdef _mllm_seqpar mllm-seqpar
"""


def completion(argv: Sequence[str]) -> None:
    """Print the script for the shell that `argv` names."""
    parser = Parser(
        prog="mllm-seqpar completion",
        description="Print a script that completes commands, options and values; store it where the shell looks.",
        example=EXAMPLE,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    shell = parser.parse_args(argv).shell
    options = {name: options_of(command.entry) for name, command in COMMANDS.items()}
    sys.stdout.write(script(shell, COMMANDS, options))


def options_of(entry: str) -> dict[str, Values]:
    """Return the options that a command's --help shows; none if its module cannot be imported."""
    text = _help(entry, "--help")
    if "--help_all" in text:
        text = _help(entry, "--help_all") or text
    found = {name: values for line in text.splitlines() for name, values in _options(line).items()}
    return dict(sorted(found.items()))


def _help(entry: str, option: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit, ImportError, ConfigError):
        load_entry(entry)([option])
    return text.getvalue()


def _options(line: str) -> dict[str, Values]:
    """Return the options of a line that begins with one, as in "  -x X, --name {a,b}, --no_name  help"."""
    found = re.match(r"\s+((?:-\w(?: \S+)?, )?--\w.*?)(?:\s{2}|$)", line)
    return {name: _values(name, value) for name, value in _NAMED.findall(found[1])} if found else {}


_NAMED = re.compile(r"(?<!\S)(--\w+)(?: (\{[^}]*\}|[A-Z_]+))?")


def _values(option: str, metavar: str) -> Values:
    """Return what may follow an option whose help shows `metavar` after it."""
    name = option.removeprefix("--")
    if not metavar:
        return Values(kind="none")
    if metavar.startswith("{"):
        return Values(tuple(metavar[1:-1].split(",")), "names")
    if name in DIRECTORIES or name.endswith("_dir"):
        return Values(kind="directories")
    if name == "cluster":
        return Values(tuple(known_files("cluster").split(", ")), "names")
    return Values()


def script(shell: str, commands: Mapping[str, Command], options: Mapping[str, Options]) -> str:
    """Return the completion script for a shell.

    Args:
        shell: one of `SHELLS`.
        commands: by name.
        options: the options of each command.
    """
    if shell == "fish":
        return "\n".join(_fish_lines(commands, options)) + "\n"
    cases = "\n".join(_case(shell, name, options[name]) for name in commands)
    described = " ".join(_quoted(f"{name}:{command.text}") for name, command in commands.items())
    return (BASH if shell == "bash" else ZSH).format(names=" ".join(commands), cases=cases, described=described)


def _case(shell: str, command: str, options: Options) -> str:
    """Return the branch of a command, for bash or zsh: its options, and the values of the previous one."""
    left, right = ('"', '"') if shell == "bash" else ("(", ")")
    lines = [f"    {command})", f"        options={left}{' '.join(options)}{right}", "        case $previous in"]
    for names, kind in dict.fromkeys((v.names, v.kind) for v in options.values() if v.kind in ("names", "directories")):
        alike = "|".join(name.removeprefix("--") for name, v in options.items() if (v.names, v.kind) == (names, kind))
        what = "directories=1" if kind == "directories" else f"values={left}{' '.join(names)}{right}"
        lines.append(f"            {alike}) {what} ;;")
    return "\n".join([*lines, "        esac ;;"])


def _fish_lines(commands: Mapping[str, Command], options: Mapping[str, Options]) -> list[str]:
    lines = ["complete -c mllm-seqpar -n __fish_use_subcommand -f -a '--help --version'"]
    for name, command in commands.items():
        lines.append(f"complete -c mllm-seqpar -n __fish_use_subcommand -f -a {name} -d {_quoted(command.text)}")
        condition = f"complete -c mllm-seqpar -n '__fish_seen_subcommand_from {name}' -l "
        for option, values in options[name].items():
            what = {
                "none": "",
                "files": " -r",
                "directories": " -x -a '(__fish_complete_directories)'",
                "names": f" -x -a {_quoted(' '.join(values.names))}",
            }[values.kind]
            lines.append(condition + option.removeprefix("--") + what)
    return lines


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"
