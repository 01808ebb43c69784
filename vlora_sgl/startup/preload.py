"""Imported by the fork server, so that its children find the engine already imported (see ``processes``)."""

from vlora_sgl.startup import processes

processes.pass_failures_on()
processes.import_engine()
