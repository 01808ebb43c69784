"""``vlora_sgl.Engine``: SGLang's engine in this process, running ours.

Importing this module imports SGLang, and on a plain CPU begins the same import in the fork server beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from vlora_sgl.platforms.cpu import has_accelerator
from vlora_sgl.startup import processes, quiet

if not has_accelerator():
    processes.start_fork_server()

from vlora_sgl import _sgl, names, plugin
from vlora_sgl.core import JsonDict
from vlora_sgl.defaults import engine_defaults, refuse_unsupported, settle
from vlora_sgl.heads.asking import ask
from vlora_sgl.managers import leftovers
from vlora_sgl.managers.shutdown import POLL_S, end_processes, stop_ranks
from vlora_sgl.server_args import VLoraArgs
from vlora_sgl.startup import imports

RELEASE_S = 2.0
"""How long schedulers may take to release what they hold, before they are killed."""

quiet.silence()
plugin.install()


class Engine(_sgl.Engine):
    """SGLang's ``Engine`` with our scheduler, LoRA manager and defaults.

    A program that builds one must guard its main module with ``if __name__ == "__main__":``, because the engine's
    processes import it.

    Args:
        vlora: our own settings; the defaults when left out.
        **server_args: any field of SGLang's ``ServerArgs``.

    Raises:
        ConfigError: a combination we do not support.
        ContractError: the installed SGLang is not the one we extend.
    """

    init_tokenizer_manager_func = staticmethod(processes.init_tokenizer_manager)
    run_scheduler_process_func = processes.WithEnvironment(processes.run_scheduler)
    run_detokenizer_process_func = processes.WithEnvironment(processes.run_detokenizer)

    def __init__(self, *, vlora: VLoraArgs | None = None, **server_args: object) -> None:
        ours = vlora or VLoraArgs()
        _ = ours.sources
        ours.to_environment()
        imports.disable_other_models(str(server_args.get("model_path", "")))
        model, given = str(server_args.get("model_path", "")), bool(server_args.get("lora_paths"))
        defaults = engine_defaults(model, given, ours.slot_ranks)
        adapters, served = names.adapters_of(server_args.get("lora_paths")), server_args.get("served_model_name")
        names.check_names(adapters, None if served is None else str(served), model)
        settings = settle(_sgl.ServerArgs(**{**defaults, "log_level": "error", **server_args}), server_args)
        refuse_unsupported(settings)
        super().__init__(server_args=settings)

    def shutdown(self) -> None:
        """End the engine's processes, in bounded time, and remove what they leave; again, it does nothing more.

        The program's other processes are not touched.
        """
        manager, links = self.tokenizer_manager, getattr(self, "port_args", None)
        if manager is None or links is None or self._weight_cache_daemon_procs:
            super().shutdown()  # it was never whole, or has processes of another kind
            return
        link, self.send_to_rpc = getattr(self, "send_to_rpc", None), None
        if link is not None:
            link.close(linger=0)
            ranks, deadline = stop_ranks(manager), time.monotonic() + RELEASE_S
            while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        end_processes(self.get_all_child_pids())
        leftovers.remove(links)

    def set_internal_state(self, settings: Mapping[str, float]) -> bool:
        """Change settings of the running engine: what ``POST /set_internal_state`` takes (docs/design/policies.md).

        Returns:
            Whether every rank took them.
        """
        request = _sgl.SetInternalStateReq(server_args=dict(settings))
        return all(self.loop.run_until_complete(self.tokenizer_manager.set_internal_state(request)))

    def classify(
        self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None
    ) -> JsonDict:
        """One of the head's labels: ``label``, ``probability``, ``labels``, ``probabilities``.

        Args:
            images: one image or several, for one question: whatever SGLang takes (PIL images, paths, URLs).
            adapter: whose head.
            head: left out: the adapter's only one for this task.
            prompt: the question; left out: the one the adapter was trained with.
        Raises:
            HeadError: no such head; the message lists what exists.
            UnknownAdapterError: no such adapter.
        """
        return ask(self, "classify", images, adapter, head, prompt)

    def count(self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None) -> JsonDict:
        """How many: ``count``, ``probability``, ``or_more``, ``expectation``. Arguments and errors as ``classify``."""
        return ask(self, "count", images, adapter, head, prompt)

    def detect(self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None) -> JsonDict:
        """Where: ``boxes``, each with ``label``, ``score``, ``box``, ``pixels``. Otherwise as ``classify``."""
        return ask(self, "detect", images, adapter, head, prompt)
