"""Which directories a client may have adapters loaded from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vlora_sgl.errors import AdapterError, quoted
from vlora_sgl.files import files_in, resolved_directory


def allowed_directory(path: str, roots: Iterable[str]) -> Path:
    """The adapter directory that ``path`` names, with every link resolved.

    Args:
        path: as the client gave it.
        roots: directories below which adapters may lie; none means anywhere on this machine.

    Raises:
        AdapterError: no directory of this machine, or none that can be read; or it, or a file in it, lies outside the
            roots once links and ``..`` are resolved. The message does not tell whether an outside path exists.
    """
    allowed = [Path(root).resolve() for root in roots]
    directory = resolved_directory(path)
    inside = not allowed or any(directory.is_relative_to(root) for root in allowed)
    if not inside:
        raise AdapterError(f"{quoted(path)} does not lie below an allowed adapter root (--vlora-adapter-root)")
    if not os.path.isdir(directory):
        raise AdapterError(f"{quoted(path)} is not a directory on this machine")
    for file in files_in(directory):
        target = resolved_directory(str(file)) if allowed else file
        if allowed and not any(target.is_relative_to(root) for root in allowed):
            raise AdapterError(f"{quoted(path)}: {file.name} links out of the allowed adapter roots")
    return directory
