"""How the engine's processes start: from which parent each comes, and what it runs first.

SGLang spawns two children that each import it anew, about 20 s of one core apiece. On a plain CPU ours are forked
from a process that has imported the engine and done nothing else: by the launcher that is the launcher itself, by
``Engine`` a fork server, because the user's program may have threads. On an accelerator they are spawned as SGLang
does it, because a process must not fork once a driver is loaded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from typing import Any

from vlora_sgl._sgl_types import ServerArgs
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import VLoraError
from vlora_sgl.startup import imports, quiet

PRELOADED = ("vlora_sgl.startup.preload",)

_start_method: str | None = None


class WithEnvironment:
    """A process's target that brings the parent's environment along: a fork server's children have the server's.

    Args:
        target: a module-level function.
    """

    def __init__(self, target: Callable[..., None]) -> None:
        self.target = target

    def __getstate__(self) -> JsonDict:
        return {"target": self.target, "environment": dict(os.environ)}

    def __setstate__(self, state: JsonDict) -> None:
        self.target = state["target"]
        os.environ.update(state["environment"])

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.target(*args, **kwargs)


def fork_from_here() -> None:
    """Have the engine's processes forked from this one, which must have started no threads of its own by then."""
    global _start_method
    _start_method = "fork"


def start_fork_server() -> None:
    """Begin importing the engine in a fork server, and return at once. Call before this process imports it.

    Does nothing in a child process (a program's main module is imported there again).
    """
    global _start_method
    if _start_method is not None or multiprocessing.parent_process() is not None:
        return
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    _start_method = "forkserver"


def use_start_method(original: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """Wraps SGLang's ``_set_envs_and_config``, which sets the start method to spawn: ours, if one was chosen."""
    original(server_args)
    if _start_method is not None:
        multiprocessing.set_start_method(_start_method, force=True)
    # One for all processes, whatever their start method: a segment that one makes and another removes is no leak.
    resource_tracker.ensure_running()


def pass_failures_on() -> None:
    """In the fork server: a child that fails signals its parent with SIGQUIT; the engine's main process wants it."""
    signal.signal(signal.SIGQUIT, lambda number, frame: os.kill(os.getppid(), number))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_signals_to_the_main_process() -> None:
    """In a process of the engine: what tells a whole group to stop (Ctrl-C, a service manager) tells the main process.

    It lets requests finish, for which it needs this one. If it is killed, the kernel ends this one.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_the_main_process() -> None:
    """In a process of the engine: end when the main process has, however that ended.

    SGLang has the kernel end it with its parent. Here that is the fork server, which goes on for as long as one of
    its children lives.
    """
    main = multiprocessing.parent_process()

    def wait() -> None:
        if main is not None:
            main.join()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-main", daemon=True).start()


def run_scheduler(*args: object, **kwargs: object) -> None:
    """The scheduler process: ours in place, checked, then SGLang's entry."""
    leave_signals_to_the_main_process()
    end_with_the_main_process()
    try:
        import_engine()
        from vlora_sgl import _sgl, plugin

        plugin.verify()
    except VLoraError as error:
        sys.exit(f"vlora_sgl: {error}")
    _sgl.run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: object, **kwargs: object) -> None:
    """The detokenizer process: one class of ours in the SGLang that we know."""
    leave_signals_to_the_main_process()
    end_with_the_main_process()
    quiet.silence()
    from vlora_sgl import _sgl

    _sgl.check_version()
    from vlora_sgl.managers import decoding

    decoding.install()
    gc.freeze()  # as the scheduler does
    _sgl.run_detokenizer_process(*args, **kwargs)


def init_tokenizer_manager(
    server_args: ServerArgs, port_args: object, TokenizerManagerClass: type | None = None
) -> Any:
    """The tokenizer manager and the templates, in the main process."""
    from vlora_sgl import _sgl, plugin

    plugin.verify()
    return _sgl.init_tokenizer_manager(server_args, port_args, TokenizerManagerClass)


def init_serving_tokenizer_manager(*args: Any, **kwargs: Any) -> Any:
    """The same, of a server that is all that its process does."""
    manager, templates = init_tokenizer_manager(*args, **kwargs)
    manager.shutdown.ends_process = True
    return manager, templates


def import_engine() -> None:
    """Import what the engine's processes run, less what this machine and this model have no use for; put ours in."""
    quiet.silence()
    with imports.without_useless_packages():
        from vlora_sgl import _sgl, plugin

        plugin.install()
        for name in ("run_scheduler_process", "run_detokenizer_process", "ModelRunner"):
            getattr(_sgl, name)
        if imports.DISABLED_MODELS in os.environ:
            _ = _sgl.ModelRegistry  # the models that are left
