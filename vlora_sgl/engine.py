"""``vlora_sgl.Engine``: SGLang's engine in this process, running ours.

Importing this module imports SGLang, and on a plain CPU begins the same import in the fork server beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlora_sgl.platforms.cpu import has_accelerator
from vlora_sgl.startup import processes, quiet

if not has_accelerator():
    processes.start_fork_server()

from vlora_sgl import _sgl, plugin
from vlora_sgl.defaults import engine_defaults, refuse_unsupported, settle
from vlora_sgl.heads.asking import AsksHeads
from vlora_sgl.server_args import VLoraArgs
from vlora_sgl.startup import imports

quiet.silence()
plugin.install()


class Engine(AsksHeads, _sgl.Engine):
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
        ours.to_environment()
        imports.disable_other_models(str(server_args.get("model_path", "")))
        model, given = str(server_args.get("model_path", "")), bool(server_args.get("lora_paths"))
        defaults = engine_defaults(model, given, ours.slot_ranks)
        settings = settle(_sgl.ServerArgs(**{**defaults, "log_level": "error", **server_args}))
        refuse_unsupported(settings)
        super().__init__(server_args=settings)

    def set_internal_state(self, settings: Mapping[str, float]) -> bool:
        """Change settings of the running engine: what ``POST /set_internal_state`` takes (docs/policies.md).

        Returns:
            Whether every rank took them.
        """
        request = _sgl.SetInternalStateReq(server_args=dict(settings))
        return all(self.loop.run_until_complete(self.tokenizer_manager.set_internal_state(request)))
