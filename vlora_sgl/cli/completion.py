"""Completion for bash and zsh, made from the parser: commands, flags, and files where a value may be one."""

from __future__ import annotations

import argparse

from vlora_sgl.cli.result import Result

_BASH = """\
_vlora() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ "$COMP_CWORD" -gt 1 ] && [ "${{current#-}}" = "$current" ] && COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _vlora vlora
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n"
"""zsh reads what bash does."""


def completion(args: argparse.Namespace) -> Result:
    """The script for a shell, to be evaluated in its start file."""
    from vlora_sgl.cli.main import make_parser

    script = script_of(make_parser())
    text = (_ZSH if args.shell == "zsh" else "") + script
    return Result({"script": text}, text)


def script_of(parser: argparse.ArgumentParser) -> str:
    """What bash sources."""
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    words = {
        name: [
            *(flag for action in one._actions for flag in action.option_strings if flag.startswith("--")),
            *(choice for action in one._actions for choice in action.choices or ()),
        ]
        for name, one in commands.choices.items()
    }
    cases = "\n".join(f'      {name}) words="{" ".join(found) or "--help"}" ;;' for name, found in words.items())
    return _BASH.format(commands=" ".join(words), cases=cases)
