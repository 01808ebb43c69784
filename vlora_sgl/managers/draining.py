"""The scheduler's side of an unload: it waits for the rows that still use the adapter.

The front of the engine asks for an unload when no request of the adapter is left there. A client that hung up has left
the front, while its row runs until the scheduler has carried out the abort.
"""

from __future__ import annotations

from typing import Any

# SGLang's scheduler, of which this is one side.
Base: Any = object


class AdapterDraining(Base):
    """Mixed into the scheduler, before SGLang's class."""

    _leaving: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._leaving = []
        super().__init__(*args, **kwargs)

    def unload_lora_adapter(self, recv_req: Any) -> Any:
        """SGLang's reply, or ``None`` while rows use the adapter: the reply follows when they have ended."""
        if recv_req.lora_id in self._adapters_in_use():
            self._leaving.append(recv_req)
            return None
        return super().unload_lora_adapter(recv_req)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """SGLang's, then the unloads that have waited long enough. Every iteration of the event loop comes here."""
        super().process_input_requests(recv_reqs)
        self._unload_drained()

    def on_idle(self) -> None:
        """SGLang's, which may sleep until a message comes: not before the last row's adapter is gone."""
        self._unload_drained()
        super().on_idle()

    def _unload_drained(self) -> None:
        if not self._leaving:
            return
        used = self._adapters_in_use()
        ready = [req for req in self._leaving if req.lora_id not in used]
        self._leaving = [req for req in self._leaving if req.lora_id in used]
        for req in ready:
            self.ipc_channels.send_to_tokenizer.send_output(super().unload_lora_adapter(req), req)

    def _adapters_in_use(self) -> set[str | None]:
        rows = [*self.waiting_queue, *self.grammar_manager.grammar_queue, *self._in_flight()]
        for batch in (self.running_batch, self.last_batch):
            rows += batch.reqs if batch is not None else []
        return {req.lora_id for req in rows}
