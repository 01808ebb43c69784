"""``vlora``: serve a model with its adapters, ask them, see what they do, and make more of them (docs/cli.md).

A command is a row of ``commands.COMMANDS``; what carries it out is imported when it runs, so that those that need no
engine answer at once.
"""

from vlora_sgl.cli.main import main

__all__ = ["main"]
